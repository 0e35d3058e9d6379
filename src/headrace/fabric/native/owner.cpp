#include "owner.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <span>

#include "clock.h"
#include "errors.h"
#include "signals.h"

namespace headrace::fabric {
namespace {

constexpr std::uint64_t kMicrosecond = 1'000;
constexpr std::uint64_t kMillisecond = 1'000'000;
constexpr std::uint64_t kSpin = 20 * kMicrosecond;
constexpr std::uint64_t kDigestSlice = 500 * kMicrosecond;
constexpr std::uint64_t kMaxPark = 50 * kMillisecond;
constexpr unsigned kUnreachable = 6;  // refusals in a row after which only time brings a retry
constexpr int kBurst = 32;            // writes per peer and turn
constexpr std::size_t kReceives = 128;

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

Owner::Owner(int memory_fd, std::size_t length, const std::string& provider, const std::string& node)
    : memory_(memory_fd, length),
      endpoint_(std::make_unique<Endpoint>(provider, node)),
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
  {
    const std::lock_guard guard(mutex_);
    stopping_ = true;
    has_commands_ = true;
    bell_.knock();
  }
  if (thread_.joinable()) thread_.join();
}

std::uint64_t Owner::cpu_ns() {
  return call([] {
    timespec spent{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &spent);
    return static_cast<std::uint64_t>(spent.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(spent.tv_nsec);
  });
}

void Owner::push(std::function<void()> command) {
  const std::lock_guard guard(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  if (stopping_) throw Closed();
  commands_.push_back(std::move(command));
  has_commands_ = true;
  bell_.knock();
}

std::vector<Event> Owner::drain() {
  auto events = events_.drain();
  std::vector<std::uint64_t> told;
  for (const Event& event : events)
    if (const auto* done = std::get_if<TransferDone>(&event)) told.push_back(done->transfer);
  // Their ids end here. No answer is needed: commands run in order, so later calls find them gone.
  if (!told.empty()) push([this, told] { forget(told); });
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
    has_commands_ = false;
  }
  for (auto& command : commands) command();
  return !commands.empty();
}

bool Owner::read_completions() {
  completions_.clear();
  endpoint_->read(completions_);
  if (completions_.empty()) return false;
  const std::uint64_t now = now_ns();
  for (Completion& completion : completions_) complete(completion, now);
  post_receives();
  for (auto& [id, peer] : peers_) peer.may_retry = true;
  return true;
}

void Owner::complete(Completion& completion, std::uint64_t now) {
  if (completion.op == nullptr) return counters_.arrived(completion.imm, now);
  Op& op = *completion.op;
  // Taken out of the pool's hands first: what follows may end the transfer that the op keeps alive.
  switch (op.kind) {
    case OpKind::write:
      complete_write(op, completion);
      break;
    case OpKind::send:
      complete_send(op, completion);
      break;
    case OpKind::receive:
      complete_receive(op, completion);
      break;
  }
  endpoint_->recycle(&op, completion.code != 0);
}

void Owner::complete_write(Op& op, const Completion& completion) {
  Peer& peer = peers_.at(op.peer);
  --peer.num_writes_outstanding;
  const auto transfer = op.transfer;
  --transfer->num_outstanding;
  if (completion.code == 0) {
    ++statistics_.num_writes_completed;
    peer.num_refusals = 0;
  } else {
    ++statistics_.num_writes_failed;
    ++transfer->num_failed;
    transfer->fail(completion.code, "fi_writedata: " + completion.text);
    // Its reader can never count to the end: what is not posted yet never will be.
    if (!transfer->complete) transfer->given_up = true;
  }
  settle(transfer);
}

void Owner::complete_send(Op& op, const Completion& completion) {
  Peer& peer = peers_.at(op.peer);
  --peer.num_sends_outstanding;
  OutgoingMessage& message = *op.message;
  --message.num_outstanding;
  if (completion.code == 0) {
    peer.num_refusals = 0;
    if (message.posted() && message.num_outstanding == 0 && !message.failed) ++statistics_.num_messages_sent;
    return;
  }
  if (std::exchange(message.failed, true)) return;
  std::erase(peer.messages, op.message);
  events_.append(SendFailed{op.peer, completion.code, "fi_send: " + completion.text});
}

void Owner::complete_receive(Op& op, const Completion& completion) {
  --num_receives_;
  if (completion.code != 0) {
    ++assembler_.num_dropped;
    return;
  }
  auto message = assembler_.join(std::span(op.buffer, std::min(completion.length, kFragment)));
  if (!message) return;
  ++statistics_.num_messages_received;
  events_.append(MessageReceived{std::move(*message)});
}

void Owner::post_receives() {
  for (; num_receives_ < kReceives; ++num_receives_) {
    Op* op = endpoint_->take(OpKind::receive);
    const long rc = endpoint_->post_receive(op);
    if (rc == 0) continue;
    endpoint_->recycle(op, false);
    if (rc == -FI_EAGAIN) return;
    check("fi_recv", rc);
  }
}

std::uint64_t Owner::window() const {
  // All windows together leave room in the transmit queue, so that hung peers cannot fill it for the others.
  const std::uint64_t held = std::min(endpoint_->num_abandoned(), traits_.tx_size);
  const std::uint64_t share = (traits_.tx_size - held) / 2 / std::max<std::uint64_t>(peers_.size(), 1);
  return std::clamp(share, std::uint64_t{4}, kMaxWindow);
}

bool Owner::may_post(Peer& peer, std::uint64_t now) const {
  peer.refused = false;
  if (now >= peer.parked_until) peer.parked_until = 0;
  if (peer.parked_until == 0) return true;
  return std::exchange(peer.may_retry, false) && peer.num_refusals < kUnreachable;
}

void Owner::park(Peer& peer) {
  peer.refused = true;
  peer.may_retry = false;
  const std::uint64_t now = now_ns();
  // A retry before its time is free: only those that time brought make the next one later.
  if (peer.parked_until > now) return;
  peer.parked_until = now + std::min(kMillisecond << std::min(peer.num_refusals, kUnreachable), kMaxPark);
  ++peer.num_refusals;
}

bool Owner::post_all() {
  if (peers_.empty()) return false;
  bool busy = false;
  const std::uint64_t now = now_ns();
  std::vector<std::pair<std::uint64_t, Peer*>> order;
  for (auto& [id, peer] : peers_)
    if (may_post(peer, now)) order.emplace_back(id, &peer);
  if (order.empty()) return false;
  std::rotate(order.begin(), order.begin() + static_cast<long>(first_peer_++ % order.size()), order.end());
  for (auto& [id, peer] : order) busy |= post_messages(id, *peer);
  for (auto& [id, peer] : order) busy |= post_writes(id, *peer);
  return busy;
}

bool Owner::post_messages(std::uint64_t id, Peer& peer) {
  bool busy = false;
  while (!peer.messages.empty() && peer.num_sends_outstanding < kSendWindow) {
    const auto message = peer.messages.front();
    Op* op = endpoint_->take(OpKind::send);
    const std::size_t length = cut_fragment(*message, sender_, op->buffer);
    const long rc = endpoint_->post_send(op, peer.address, length);
    if (rc != 0) {
      endpoint_->recycle(op, false);
      if (rc == -FI_EAGAIN) return park(peer), busy;
      peer.messages.pop_front();
      message->failed = true;
      events_.append(SendFailed{id, static_cast<int>(-rc), std::string("fi_send: ") + fi_strerror(static_cast<int>(-rc))});
      continue;
    }
    op->peer = id;
    op->message = message;
    message->offset += length - sizeof(FragmentHeader);
    ++message->num_outstanding;
    ++peer.num_sends_outstanding;
    peer.parked_until = 0;
    if (message->posted()) peer.messages.pop_front();
    busy = true;
  }
  return busy;
}

bool Owner::post_writes(std::uint64_t id, Peer& peer) {
  if (peer.refused) return false;
  const std::uint64_t room = window();
  bool busy = false;
  for (int burst = 0; burst < kBurst && peer.num_writes_outstanding < room; ++burst) {
    auto write = peer.writes.peek(layers_seen_);
    if (!write) break;
    Op* op = endpoint_->take(OpKind::write);
    const long rc = endpoint_->post_write(op, peer.address, memory_.data() + write->src, local_.descriptor(), *write);
    if (rc != 0) {
      endpoint_->recycle(op, false);
      if (rc == -FI_EAGAIN) return park(peer), busy;
      const int code = static_cast<int>(-rc);
      write->transfer->fail(code, std::string("fi_writedata: ") + fi_strerror(code));
      give_up(write->transfer);
      continue;
    }
    op->peer = id;
    op->transfer = write->transfer;
    peer.writes.advance();
    peer.parked_until = 0;
    posted(std::move(*write), peer);
    busy = true;
  }
  return busy;
}

void Owner::posted(Write write, Peer& peer) {
  const auto transfer = write.transfer;
  ++peer.num_writes_outstanding;
  ++transfer->num_posted;
  ++transfer->num_outstanding;
  ++statistics_.num_writes_posted;
  statistics_.num_bytes_posted += write.length;
  if (write.last) {
    transfer->complete = true;
    return;
  }
  --transfer->num_unposted;
  if (write.position >= 0) {
    ++transfer->num_hashing;
    digester_.add(std::move(write));
  }
  settle(transfer);
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
  for (auto& [id, peer] : peers_) withdraw(peer);
  local_.region.reset();
  endpoint_.reset();
  detached_.clear();
}

}  // namespace headrace::fabric
