#include "streams.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "errors.h"
#include "rounds.h"

namespace headrace::fabric::limits {
namespace {

[[noreturn]] void fail(const char* call) { throw FabricError(call, errno, std::strerror(errno)); }

}  // namespace

StreamLoop::StreamLoop(int socket, int memory_fd, std::size_t length)
    : memory_(memory_fd, length), socket_(::fcntl(socket, F_DUPFD_CLOEXEC, 0)) {
  if (socket_ < 0) throw InputError("socket", std::string("must be an open socket: ") + std::strerror(errno));
  // A small message leaves at once. Other streams than TCP know no such option and need none.
  const int on = 1;
  ::setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

StreamLoop::~StreamLoop() { ::close(socket_); }

void StreamLoop::put(const void* from, std::size_t length) {
  const auto* next = static_cast<const std::byte*>(from);
  while (length > 0) {
    const ssize_t sent = ::send(socket_, next, length, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) fail("send");
    next += sent;
    length -= static_cast<std::size_t>(sent);
  }
}

void StreamLoop::get(void* to, std::size_t length) {
  auto* next = static_cast<std::byte*>(to);
  while (length > 0) {
    const ssize_t received = ::recv(socket_, next, length, MSG_WAITALL);
    if (received < 0 && errno == EINTR) continue;
    if (received < 0) fail("recv");
    if (received == 0) throw FabricError("recv", ECONNRESET, "the other side closed the connection");
    next += received;
    length -= static_cast<std::size_t>(received);
  }
}

Spent StreamLoop::send(std::span<const std::int64_t> src_offsets, std::size_t page_bytes) {
  const Offsets src = to_offsets("src_offsets", src_offsets, page_bytes, memory_.length());
  char told = 0;
  get(&told, 1);
  const Stopwatch watch;
  for (const std::size_t offset : src) put(memory_.data() + offset, page_bytes);
  get(&told, 1);
  return watch.read();
}

Spent StreamLoop::receive(std::span<const std::int64_t> dst_offsets, std::size_t page_bytes) {
  const Offsets dst = to_offsets("dst_offsets", dst_offsets, page_bytes, memory_.length());
  put("r", 1);
  const Stopwatch watch;
  for (const std::size_t offset : dst) get(memory_.data() + offset, page_bytes);
  const Spent spent = watch.read();
  put("a", 1);
  return spent;
}

std::vector<std::uint64_t> StreamLoop::ping(std::size_t num_rounds, std::uint64_t pause_ns) {
  std::uint64_t word = 0;
  return time_rounds(num_rounds, pause_ns, [&] {
    put(&word, sizeof word);
    get(&word, sizeof word);
  });
}

void StreamLoop::pong(std::size_t num_rounds) {
  std::uint64_t word = 0;
  answer_rounds(num_rounds, [&] {
    get(&word, sizeof word);
    put(&word, sizeof word);
  });
}

}  // namespace headrace::fabric::limits
