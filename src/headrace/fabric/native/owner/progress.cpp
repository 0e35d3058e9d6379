// The owner's progress: completions taken in, messages and writes posted, peer by peer. Owner thread only.
#include <algorithm>
#include <span>
#include <string>
#include <utility>

#include "clock.h"
#include "errors.h"
#include "owner/owner.h"

namespace headrace::fabric {
namespace {

constexpr std::uint64_t kMillisecond = 1'000'000;
constexpr std::uint64_t kMaxPark = 50 * kMillisecond;
constexpr unsigned kUnreachable = 6;                           // refusals in a row after which only time brings a retry
constexpr std::size_t kBurst = 32;                             // writes per peer and turn; so of fragments
constexpr std::size_t kCopiedBurst = 256;                      // likewise, where they are copied here
constexpr std::uint64_t kBurstBytes = std::uint64_t{1} << 20;  // of these
constexpr std::size_t kRun = 32;
constexpr std::uint64_t kLittle = std::uint64_t{32} << 10;  // what a caller copies itself
constexpr std::uint64_t kIdleLook = 32;  // turns without work between two looks at queues where nothing is awaited

// The next page's first lines, while this one is copied: no prefetcher of the machine crosses a page.
void look_ahead(const std::byte* from) {
  for (std::size_t line = 0; line < 4; ++line) __builtin_prefetch(from + 64 * line);
}

std::string described(const Posted& post) { return std::string(post.call) + ": " + fi_strerror(post.code); }

}  // namespace

bool Owner::read_all() {
  bool any = read_lanes();
  // A look at a completion queue is dear beside one at a lane.
  const bool lanes_only =
      !neighbours_.empty() && std::ranges::all_of(peers_, [](auto& each) { return each.second.window == 0; });
  if (!lanes_only || ++num_idle_turns_ % kIdleLook == 1) any |= read_completions();
  return any;
}

bool Owner::read_lanes() {
  std::uint64_t now = 0;
  const auto arrived = [&](std::uint32_t imm, std::uint64_t count) {
    if (now == 0) now = now_ns();
    this->arrived(imm, count, now);
  };
  bool any = false;
  for (auto& each : neighbours_)
    any |= each->read(arrived, [this](std::span<const std::byte> fragment) { receive(fragment); });
  return any;
}

bool Owner::read_completions() {
  completions_.clear();
  for (auto& each : neighbours_) each->read_completions(completions_);
  for (auto& each : rails_) each->read(completions_);
  if (completions_.empty()) return false;
  const std::uint64_t now = now_ns();
  for (Completion& completion : completions_) complete(completion, now);
  for (auto& each : rails_) each->post_receives();
  for (auto& [id, peer] : peers_) peer.may_retry = true;
  return true;
}

void Owner::complete(Completion& completion, std::uint64_t now) {
  if (completion.op == nullptr) return arrived(completion.imm, 1, now);
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
      complete_receive(completion);
      break;
  }
  completion.endpoint->recycle(&op, completion.code != 0);
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
  settle(*transfer);
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
  peer.unqueue(op.message);
  events_->append(SendFailed{op.peer, completion.code, "fi_send: " + completion.text});
}

void Owner::complete_receive(const Completion& completion) {
  for (auto& each : rails_) each->received(completion);
  if (completion.code != 0) {
    ++assembler_.num_dropped;
    return;
  }
  receive(std::span(completion.op->buffer, std::min(completion.length, kFragment)));
}

void Owner::receive(std::span<const std::byte> fragment) {
  auto message = assembler_.join(fragment);
  if (!message) return;
  ++statistics_.num_messages_received;
  events_->append(MessageReceived{std::move(*message)});
}

void Owner::share_windows() {
  for (auto& [id, peer] : peers_) {
    for (const auto& each : neighbours_)
      if (each->name() == peer.link->transport()) peer.window = each->window();
    for (const auto& each : rails_)
      if (each->provider() == peer.link->transport()) peer.window = each->window(peers_.size());
  }
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

// Instead of the owner, which sleeps: some microseconds of copying, so that it need not be woken for them. True:
// nothing is left for it to do.
bool Owner::post_little() {
  for (auto& [id, peer] : peers_) {
    const auto run = peer.writes.peek(layers_seen_, 1);
    const bool any = !run.empty() || !peer.messages.empty();
    if (any && (peer.window > 0 || peer.num_queued_bytes > kLittle)) return false;
    if (!run.empty() && run.front().transfer->num_unposted * run.front().length > kLittle) return false;
  }
  post_all();
  const auto waits = [this](auto& each) {
    Peer& peer = each.second;
    return peer.parked_until > 0 || !peer.messages.empty() || !peer.writes.peek(layers_seen_, 1).empty();
  };
  return digester_.idle() && std::ranges::none_of(peers_, waits);
}

bool Owner::post_messages(std::uint64_t id, Peer& peer) {
  bool busy = false;
  for (std::size_t burst = 0; burst < kBurst && !peer.messages.empty() && peer.num_sends_outstanding < kSendWindow;
       ++burst) {
    const auto message = peer.messages.front();
    const Posted post = peer.link->post_fragment(id, message);
    if (post.kind == Posted::Kind::full) {
      park(peer);
      break;
    }
    if (post.kind == Posted::Kind::failed) {
      peer.unqueue(message);
      message->failed = true;
      events_->append(SendFailed{id, post.code, described(post)});
      continue;
    }
    const bool under_way = post.kind == Posted::Kind::under_way;
    message->num_outstanding += under_way;
    peer.num_sends_outstanding += under_way;
    peer.parked_until = 0;
    if (!under_way) peer.num_refusals = 0;
    if (message->posted()) {
      peer.unqueue(message);
      statistics_.num_messages_sent += !under_way;
    }
    busy = true;
  }
  peer.link->flush(true);  // its writes come next; where they do not, a message wakes the reader
  return busy;
}

bool Owner::post_writes(std::uint64_t id, Peer& peer) {
  // Over a NIC both share a queue; lanes have room for each.
  if (peer.refused && peer.window > 0) return false;
  bool busy = false;
  bool more = true;
  std::uint64_t num_bytes = 0;  // copied
  std::size_t left = peer.window == 0 ? kCopiedBurst : kBurst;
  while (more && left > 0 && num_bytes < kBurstBytes && peer.room() > 0) {
    const auto run = peer.writes.peek(layers_seen_, std::min({left, peer.room(), kRun}));
    more = !run.empty();
    std::size_t num_done = 0;
    Posted post;
    while (num_done < run.size() && num_bytes < kBurstBytes) {
      const Write& write = run[num_done];
      if (num_done + 1 < run.size()) look_ahead(memory_.data() + run[num_done + 1].src);
      post = peer.link->post_write(id, memory_.data() + write.src, write);
      if (!post.whole()) break;
      if (post.kind == Posted::Kind::finished) num_bytes += write.length - write.done;
      ++num_done;
    }
    peer.writes.advance(num_done);
    posted(run.first(num_done), peer);
    busy |= num_done > 0;
    left -= num_done;
    if (post.kind == Posted::Kind::full) {
      more = false;
      peer.writes.keep(post.done);
      park(peer);
    } else if (post.kind == Posted::Kind::failed) {
      run[num_done].transfer->fail(post.code, described(post));
      give_up(*run[num_done].transfer);
    } else if (post.kind == Posted::Kind::partly) {
      busy = true;
      peer.writes.keep(post.done);
      peer.parked_until = 0;
      peer.num_refusals = 0;
      break;
    }
  }
  peer.link->flush(more);
  return busy;
}

// Writes of one transfer.
void Owner::posted(std::span<const Write> run, Peer& peer) {
  if (run.empty()) return;
  const bool copied = peer.window == 0;
  Transfer& transfer = *run.front().transfer;
  peer.parked_until = 0;
  if (copied) peer.num_refusals = 0;
  if (!copied) peer.num_writes_outstanding += run.size(), transfer.num_outstanding += run.size();
  transfer.num_posted += run.size();
  statistics_.num_writes_posted += run.size();
  if (copied) statistics_.num_writes_completed += run.size();
  for (const Write& write : run) {
    statistics_.num_bytes_posted += write.length;
    if (write.position < 0) continue;
    ++transfer.num_hashing;
    digester_.add(write);
  }
  if (run.front().last) {
    transfer.complete = true;
  } else {
    transfer.num_unposted -= run.size();
  }
  // A device's copies are over at the flush: not before it may the end of a transfer be told, and its source be reused.
  if (on_device_) peer.link->flush(true);
  settle(transfer);
}

}  // namespace headrace::fabric
