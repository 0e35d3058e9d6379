#include "owner/owner.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "clock.h"
#include "errors.h"
#include "keys.h"
#include "near/mapped.h"
#include "near/shm.h"
#include "signals.h"

namespace headrace::fabric {
namespace {

constexpr std::uint64_t kMicrosecond = 1'000;
constexpr std::uint64_t kMillisecond = 1'000'000;
constexpr std::uint64_t kSpin = 20 * kMicrosecond;
constexpr std::uint64_t kDigestSlice = 500 * kMicrosecond;

// Until the next look, where nothing tells of completions: the longer nothing came, the longer. The longest cost under
// a hundredth of a core.
std::uint64_t nap(std::uint64_t idle) { return std::clamp(idle / 8, 50 * kMicrosecond, 4 * kMillisecond); }

void pin(std::thread& thread, const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  cpu_set_t chosen;
  CPU_ZERO(&chosen);
  for (const int cpu : cpus) CPU_SET(static_cast<std::size_t>(cpu), &chosen);
  ::pthread_setaffinity_np(thread.native_handle(), sizeof chosen, &chosen);  // those that exist were checked before
}

Fd duplicate(int fd) {
  Fd own(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!own) throw InputError("memory_fd", "not an open file");
  return own;
}

}  // namespace

Owner::Owner(int memory_fd, std::size_t length, const Transports& transports, const Owner* beside)
    : on_device_(transports.device != nullptr),
      memory_fd_(duplicate(memory_fd)),
      memory_(memory_fd, length, transports.device),
      sender_(random_key()),
      counters_(beside != nullptr ? beside->counters_ : std::make_shared<ImmCounters>(events_)),
      digester_(
          memory_.data(), [this](Transfer& transfer) { settle(transfer); },
          [this](std::uint64_t digest, std::vector<std::uint64_t> sums) {
            events_->append(DigestsReady{digest, std::move(sums)});
          }) {
  own_.host = own_host();
  for (const auto& [provider, locals] : transports.providers) {
    const SourceMemory memory{
        .fd = memory_fd_.get(), .data = memory_.data(), .length = memory_.length(), .device = transports.device};
    rails_.push_back(std::make_unique<Rails>(provider, locals, memory, sender_));
    traits_.push_back(rails_.back()->traits());
    for (NicAddress& nic : rails_.back()->addresses()) own_.nics.push_back(std::move(nic));
  }
  meet_neighbours(transports);
  if (!transports.watch.empty()) {
    own_.watch = transports.watch;
    watch_ = std::make_unique<Watch>(own_.watch, transports.silence_ns, peer_news());
  }
  address_ = own_.encode();
  const BlockedSignals blocked;  // inherited by the thread
  thread_ = std::thread([this] { run(); });
  ::pthread_setname_np(thread_.native_handle(), "headrace-fabric");
  pin(thread_, transports.cpus);
}

void Owner::meet_neighbours(const Transports& transports) {
  const Neighbours::Owner owner{.news = peer_news(),
                                .revoked = [this](std::uint64_t peer) { events_->append(Revoked{peer}); },
                                .may_retry = [this](std::uint64_t peer) { peer_of(peer).parked_until = 0; },
                                .complete = [this](Completion& completion) { complete(completion, now_ns()); }};
  const auto place = [&](std::string& control) {
    return Neighbours::Place{
        .control = control, .bell = bell_.fd(), .sender = sender_, .silence_ns = transports.silence_ns};
  };
  if (!transports.control.empty()) {
    own_.control = transports.control;
    neighbours_.push_back(
        std::make_unique<Mapped>(place(own_.control), memory_fd_.get(), memory_.length(), transports.device, owner));
  }
  if (!transports.shm.empty()) {
    std::string control = transports.shm;
    auto shm = std::make_unique<Shm>(place(control), memory_.data(), memory_.length(), owner);
    traits_.push_back(shm->traits());
    own_.nics.push_back({.provider = shm->name(), .name = std::move(control)});
    neighbours_.push_back(std::move(shm));
  }
}

Owner::~Owner() { stop(); }

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
// there. All of it is left as it is.
void Owner::leave_to_parent() {
  new std::thread(std::move(thread_));
  new std::map<std::uint64_t, Peer>(std::move(peers_));
  for (auto& each : rails_) each.release();
  for (auto& each : neighbours_) each.release();
  watch_.release();
}

std::uint64_t Owner::cpu_ns() {
  return ask([this] {
    clockid_t clock{};
    timespec spent{};
    ::pthread_getcpuclockid(thread_.native_handle(), &clock);
    ::clock_gettime(clock, &spent);
    return static_cast<std::uint64_t>(spent.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(spent.tv_nsec);
  });
}

bool Owner::admit() {
  if (forked()) throw Closed();  // nobody would answer
  const std::lock_guard guard(mutex_);
  refuse();
  return commands_.empty();
}

void Owner::refuse() const {
  if (failure_) std::rethrow_exception(failure_);
  if (stopping_) throw Closed();
}

void Owner::push(std::function<void()> command) {
  const std::lock_guard guard(mutex_);
  refuse();
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
  auto events = events_->drain();
  if (failure_) {  // what was told before the owner failed is still told, then the failure
    events_->ring();
    if (events.empty()) std::rethrow_exception(failure_);
    return events;
  }
  for (const Event& event : events)
    if (const auto* done = std::get_if<TransferDone>(&event)) told_.push_back(done->transfer);
  return events;
}

void Owner::run() {
  const std::lock_guard ours(turn_);
  try {
    while (turn()) {
    }
  } catch (const std::exception& error) {
    const std::lock_guard guard(mutex_);
    failure_ = std::current_exception();
    give_all_up(error.what());
    events_->ring();  // where no transfer was open there is nothing to tell but the failure
  }
  shut_down();
}

bool Owner::turn() {
  bool busy = has_commands_ && run_commands();
  busy |= read_all();
  open_lasts();
  busy |= play();
  busy |= post_all();
  busy |= hash_some();
  const std::uint64_t now = now_ns();
  end_late(now);
  if (busy) {
    busy_at_ = now;
  } else if (now - busy_at_ > kSpin) {
    sleep();
  }
  const std::lock_guard guard(mutex_);
  return !stopping_;
}

bool Owner::run_commands() {
  std::vector<std::function<void()>> commands;
  std::vector<std::uint64_t> told;
  {
    const std::lock_guard guard(mutex_);
    commands.swap(commands_);
    told.swap(told_);
    has_commands_ = stopping_;  // still something to do: or the owner would lie down once more before it ends
  }
  forget(told);
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
  for (const auto& transfer : opened) settle(*transfer);
}

void Owner::sleep() {
  forget_told();
  std::uint64_t gate = Doorbell::kNever;
  const std::uint64_t lain_down = now_ns();
  std::uint64_t until = lain_down + (peers_.empty() ? 1000 : 100) * kMillisecond;
  if (std::ranges::any_of(rails_, [](const auto& each) { return !each->traits().wait_fd; }))
    until = lain_down + nap(lain_down - busy_at_);
  for (auto& [id, peer] : peers_) {
    // A gate already open is held up by the window or a full queue: a completion or time brings that on.
    const std::uint64_t next = peer.writes.gate();
    if (next > layers_seen_) gate = std::min(gate, next);
    if (peer.parked_until > 0) until = std::min(until, peer.parked_until);
  }
  if (rally_ && rally_->sent_at == 0) until = std::min(until, rally_->next_at);
  if (!deadlines_.empty()) until = std::min(until, deadlines_.begin()->first);
  const auto dial_again = [&](auto& those) {
    const std::uint64_t next = those->dial_again(now_ns());
    if (next > 0) until = std::min(until, next);
  };
  if (watch_) dial_again(watch_);
  for (auto& each : neighbours_) dial_again(each);
  for (const auto& each : rails_) each->keep_alive(now_ns());
  bell_.lie_down(gate);
  for (auto& each : neighbours_) each->lie_down();
  if (may_sleep(gate)) {
    std::vector<int> fds{bell_.fd()};
    for (const auto& each : rails_) each->add_wait_fds(fds);
    for (const auto& each : neighbours_) each->add_wait_fds(fds);
    std::vector<pollfd> waited;
    for (const int fd : fds) waited.push_back({fd, POLLIN, 0});
    const std::uint64_t now = now_ns();
    const std::uint64_t rest = until > now ? until - now : 0;
    const timespec timeout{static_cast<time_t>(rest / 1'000'000'000), static_cast<long>(rest % 1'000'000'000)};
    // Whatever it was: room in a lane, a completion, a connection that came to stand.
    turn_.unlock();
    const int num_ready = ::ppoll(waited.data(), waited.size(), &timeout, nullptr);
    turn_.lock();
    if (num_ready > 0)
      for (auto& [id, peer] : peers_) peer.may_retry = true;
  }
  for (auto& each : neighbours_) each->get_up();
  bell_.get_up();
  num_idle_turns_ = 0;
}

// Asked when whoever brings work would ring already.
bool Owner::may_sleep(std::uint64_t gate) {
  if (has_commands_ || bell_.layers() >= gate) return false;
  const auto may_sleep = [](auto& each) { return each->may_sleep(); };
  return std::ranges::all_of(neighbours_, may_sleep) && std::ranges::all_of(rails_, may_sleep);
}

void Owner::give_all_up(const std::string& why) {
  for (auto& [id, transfer] : transfers_) {
    if (transfer->told) continue;
    transfer->fail(FI_EIO, why);
    transfer->num_failed += std::exchange(transfer->num_outstanding, 0);
    give_up(*transfer);
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
      peer.link->withdraw();
    } catch (const FabricError&) {
      // The endpoint goes next, and nothing lands without it.
    }
    peer.link.reset();
  }
  // Before it says goodbye for us nothing of ours may write any more, and no command comes from it afterwards.
  for (auto& each : neighbours_) each->stop();
  if (watch_) watch_->stop();
  rails_.clear();
}

}  // namespace headrace::fabric
