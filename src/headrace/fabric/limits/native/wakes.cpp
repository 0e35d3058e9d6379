#include "wakes.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "errors.h"
#include "rounds.h"

namespace headrace::fabric::limits {
namespace {

constexpr std::size_t kWordsLength = 4096;
constexpr std::size_t kApart = 256;  // neither one cache line nor a prefetched pair of them

enum { kPing, kPong };

[[noreturn]] void fail(const char* call) { throw FabricError(call, errno, std::strerror(errno)); }

WakeKind to_kind(const std::string& name) {
  if (name == "futex") return WakeKind::futex;
  if (name == "eventfd") return WakeKind::eventfd;
  if (name == "spin") return WakeKind::spin;
  throw InputError("kind", "must be 'futex', 'eventfd' or 'spin', is '" + name + "'");
}

// Not FUTEX_PRIVATE_FLAG: the other process has another mapping of the word.
void futex_wait(std::uint32_t* word, std::uint32_t old) {
  const long rc = ::syscall(SYS_futex, word, FUTEX_WAIT, old, nullptr, nullptr, 0);
  if (rc != 0 && errno != EAGAIN && errno != EINTR) fail("futex(wait)");
}

void futex_wake(std::uint32_t* word) {
  if (::syscall(SYS_futex, word, FUTEX_WAKE, 1, nullptr, nullptr, 0) < 0) fail("futex(wake)");
}

}  // namespace

WakeLoop::WakeLoop(const std::string& kind, int words_fd, int ping_fd, int pong_fd)
    : kind_(to_kind(kind)), words_(words_fd, kWordsLength), fds_{ping_fd, pong_fd} {}

std::uint32_t* WakeLoop::word(int side) const {
  return reinterpret_cast<std::uint32_t*>(words_.data() + static_cast<std::size_t>(side) * kApart);
}

void WakeLoop::raise(int side) {
  if (kind_ == WakeKind::eventfd) {
    const std::uint64_t one = 1;
    if (::write(fds_[side], &one, sizeof one) != sizeof one) fail("write(eventfd)");
    return;
  }
  __atomic_store_n(word(side), ++rounds_[side], __ATOMIC_SEQ_CST);
  if (kind_ == WakeKind::futex) futex_wake(word(side));
}

void WakeLoop::await(int side) {
  if (kind_ == WakeKind::eventfd) {
    std::uint64_t count = 0;
    while (::read(fds_[side], &count, sizeof count) != sizeof count)
      if (errno != EINTR) fail("read(eventfd)");
    return;
  }
  const std::uint32_t old = rounds_[side]++;
  while (__atomic_load_n(word(side), __ATOMIC_SEQ_CST) == old)
    if (kind_ == WakeKind::futex) futex_wait(word(side), old);
}

std::vector<std::uint64_t> WakeLoop::ping(std::size_t num_rounds, std::uint64_t pause_ns) {
  return time_rounds(num_rounds, pause_ns, [this] {
    raise(kPing);
    await(kPong);
  });
}

void WakeLoop::pong(std::size_t num_rounds) {
  answer_rounds(num_rounds, [this] {
    await(kPing);
    raise(kPong);
  });
}

}  // namespace headrace::fabric::limits
