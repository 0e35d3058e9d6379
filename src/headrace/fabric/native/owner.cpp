#include "owner.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "clock.h"
#include "errors.h"
#include "signals.h"

namespace headrace::fabric {
namespace {

constexpr std::uint64_t kMicrosecond = 1'000;
constexpr std::uint64_t kMillisecond = 1'000'000;
constexpr std::uint64_t kSpin = 20 * kMicrosecond;
constexpr std::uint64_t kDigestSlice = 500 * kMicrosecond;

std::uint64_t random_id() {
  std::uint64_t id = 0;
  if (::getrandom(&id, sizeof id, 0) != sizeof id) throw FabricError("getrandom", errno, "no random bytes");
  return id;
}

int duplicate(int fd) {
  const int own = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own < 0) throw InputError("memory_fd", "not an open file");
  return own;
}

}  // namespace

Owner::Owner(int memory_fd, std::size_t length, const std::string& provider, const Local& local)
    : memory_(memory_fd, length),
      endpoint_(std::make_unique<Endpoint>(provider, local)),
      address_(endpoint_->name()),
      traits_(endpoint_->traits()),
      sender_(random_id()),
      counters_(events_),
      digester_(
          memory_.data(), [this](const std::shared_ptr<Transfer>& transfer) { settle(transfer); },
          [this](std::uint64_t digest, std::vector<std::uint64_t> sums) {
            events_.append(DigestsReady{digest, std::move(sums)});
          }) {
  if (traits_.local_registration)
    local_ = endpoint_->register_memory(memory_.data(), memory_.length(), FI_WRITE | FI_READ);
  post_receives();
  memory_fd_ = duplicate(memory_fd);
  const BlockedSignals blocked;  // inherited by the thread
  thread_ = std::thread([this] { run(); });
  ::pthread_setname_np(thread_.native_handle(), "headrace-fabric");
}

Owner::~Owner() {
  stop();
  ::close(memory_fd_);
}

void Owner::stop() {
  if (forked()) return leave_to_parent();
  {
    const std::lock_guard guard(mutex_);
    stopping_ = true;
    has_commands_ = true;
    bell_.knock();
  }
  if (thread_.joinable()) thread_.join();
}

bool Owner::forked() const { return ::getpid() != process_; }

// A forked child has no owner thread, and shares every connection with its parent: closing them here would break them
// there. Libfabric's objects are left as they are.
void Owner::leave_to_parent() {
  new std::thread(std::move(thread_));
  for (auto& [id, peer] : peers_) peer.access.region.release();
  local_.region.release();
  endpoint_.release();
}

std::uint64_t Owner::cpu_ns() {
  return call([] {
    timespec spent{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &spent);
    return static_cast<std::uint64_t>(spent.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(spent.tv_nsec);
  });
}

void Owner::push(std::function<void()> command) {
  if (forked()) throw Closed();  // nobody would answer
  const std::lock_guard guard(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  if (stopping_) throw Closed();
  queue(std::move(command));
}

void Owner::queue(std::function<void()> command) {
  commands_.push_back(std::move(command));
  has_commands_ = true;
  bell_.knock();
}

std::vector<Event> Owner::drain() {
  if (forked()) throw Closed();
  const std::lock_guard guard(mutex_);  // a failure comes before both looks or after them
  auto events = events_.drain();
  if (failure_) {  // what was told before the owner failed is still told, then the failure
    events_.ring();
    if (events.empty()) std::rethrow_exception(failure_);
    return events;
  }
  std::vector<std::uint64_t> told;
  for (const Event& event : events)
    if (const auto* done = std::get_if<TransferDone>(&event)) told.push_back(done->transfer);
  // Their ids end here. No answer is needed: commands run in order, so later calls find them gone.
  if (!told.empty() && !stopping_) queue([this, told] { forget(told); });
  return events;
}

void Owner::run() {
  try {
    while (turn()) {
    }
  } catch (const std::exception& error) {
    const std::lock_guard guard(mutex_);
    failure_ = std::current_exception();
    give_all_up(error.what());
    events_.ring();  // where no transfer was open there is nothing to tell but the failure
  }
  shut_down();
}

bool Owner::turn() {
  bool busy = has_commands_ && run_commands();
  busy |= read_completions();
  open_lasts();
  busy |= post_all();
  busy |= hash_some();
  if (busy) {
    busy_at_ = now_ns();
  } else if (now_ns() - busy_at_ > kSpin) {
    sleep();
  }
  const std::lock_guard guard(mutex_);
  return !stopping_;
}

bool Owner::run_commands() {
  std::vector<std::function<void()>> commands;
  {
    const std::lock_guard guard(mutex_);
    commands.swap(commands_);
    has_commands_ = stopping_;  // still something to do: or the owner would lie down once more before it ends
  }
  for (auto& command : commands) command();
  return !commands.empty();
}

bool Owner::hash_some() {
  if (digester_.idle()) return false;
  digester_.slice(now_ns() + kDigestSlice);
  return true;
}

void Owner::open_lasts() {
  const std::uint64_t layers = bell_.layers();
  if (layers == layers_seen_ && !std::exchange(look_again_, false)) return;
  layers_seen_ = layers;
  std::vector<std::shared_ptr<Transfer>> opened;
  for (auto& [id, peer] : peers_) peer.writes.open_lasts(layers, opened);
  for (const auto& transfer : opened) settle(transfer);
}

void Owner::sleep() {
  std::uint64_t gate = Doorbell::kNever;
  std::uint64_t until = now_ns() + (peers_.empty() ? 1000 : 100) * kMillisecond;
  for (auto& [id, peer] : peers_) {
    // A gate already open is held up by the window or a full queue: a completion or time brings that on.
    const std::uint64_t next = peer.writes.gate();
    if (next > layers_seen_) gate = std::min(gate, next);
    if (peer.parked_until > 0) until = std::min(until, peer.parked_until);
  }
  bell_.lie_down(gate);
  if (!has_commands_ && bell_.layers() < gate && endpoint_->may_sleep()) {
    std::array<pollfd, 2> waited{pollfd{endpoint_->wait_fd(), POLLIN, 0}, pollfd{bell_.fd(), POLLIN, 0}};
    const std::uint64_t now = now_ns();
    const std::uint64_t rest = until > now ? until - now : 0;
    const timespec timeout{static_cast<time_t>(rest / 1'000'000'000), static_cast<long>(rest % 1'000'000'000)};
    ::ppoll(waited.data(), waited.size(), &timeout, nullptr);
    if (waited[0].revents != 0)
      for (auto& [id, peer] : peers_) peer.may_retry = true;
  }
  bell_.get_up();
}

void Owner::give_all_up(const std::string& why) {
  for (auto& [id, transfer] : transfers_) {
    if (transfer->told) continue;
    transfer->fail(FI_EIO, why);
    transfer->num_failed += std::exchange(transfer->num_outstanding, 0);
    give_up(transfer);
  }
}

void Owner::shut_down() {
  std::vector<std::function<void()>> refused;
  {
    const std::lock_guard guard(mutex_);
    stopping_ = true;
    refused.swap(commands_);
  }
  refused.clear();  // their callers are told Closed
  for (auto& [id, peer] : peers_) {
    try {
      withdraw(peer);
    } catch (const FabricError&) {
      // The endpoint goes next, and nothing lands without it.
    }
  }
  local_.region.reset();
  endpoint_.reset();
  detached_.clear();
}

}  // namespace headrace::fabric
