// The owner's progress: completions taken in, messages and writes posted, peer by peer. Owner thread only.
#include <algorithm>
#include <span>
#include <string>
#include <utility>

#include "clock.h"
#include "errors.h"
#include "owner.h"

namespace headrace::fabric {
namespace {

constexpr std::uint64_t kMillisecond = 1'000'000;
constexpr std::uint64_t kMaxPark = 50 * kMillisecond;
constexpr unsigned kUnreachable = 6;                           // refusals in a row after which only time brings a retry
constexpr int kBurst = 32;                                     // writes per peer and turn; so of fragments
constexpr std::uint64_t kBurstBytes = std::uint64_t{1} << 20;  // likewise, where they are copied here
constexpr std::uint64_t kIdleLook = 32;  // turns without work between two looks at queues where nothing is awaited

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
  const auto arrived = [&](std::uint32_t imm) {
    if (now == 0) now = now_ns();
    this->arrived(imm, now);
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
  if (completion.op == nullptr) return arrived(completion.imm, now);
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

bool Owner::post_messages(std::uint64_t id, Peer& peer) {
  bool busy = false;
  for (int burst = 0; burst < kBurst && !peer.messages.empty() && peer.num_sends_outstanding < kSendWindow; ++burst) {
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
  std::uint64_t num_bytes = 0;
  for (int burst = 0; burst < kBurst && num_bytes < kBurstBytes && peer.has_room(); ++burst) {
    auto write = peer.writes.peek(layers_seen_);
    if (!write) {
      more = false;
      break;
    }
    const Posted post = peer.link->post_write(id, memory_.data() + write->src, *write);
    if (post.kind == Posted::Kind::full) {
      more = false;
      peer.writes.keep(post.done);
      park(peer);
      break;
    }
    if (post.kind == Posted::Kind::failed) {
      write->transfer->fail(post.code, described(post));
      give_up(write->transfer);
      continue;
    }
    peer.parked_until = 0;
    if (post.kind != Posted::Kind::under_way) peer.num_refusals = 0;
    busy = true;
    if (post.kind == Posted::Kind::partly) {
      peer.writes.keep(post.done);
      break;
    }
    const bool finished = post.kind == Posted::Kind::finished;
    if (finished) num_bytes += write->length - write->done;
    peer.writes.advance();
    posted(std::move(*write), peer, finished);
  }
  peer.link->flush(more);
  return busy;
}

void Owner::posted(Write write, Peer& peer, bool finished) {
  const auto transfer = write.transfer;
  peer.num_writes_outstanding += !finished;
  ++transfer->num_posted;
  transfer->num_outstanding += !finished;
  ++statistics_.num_writes_posted;
  statistics_.num_writes_completed += finished;
  statistics_.num_bytes_posted += write.length;
  if (write.last) {
    transfer->complete = true;
    return settle(transfer);
  }
  --transfer->num_unposted;
  if (write.position >= 0) {
    ++transfer->num_hashing;
    digester_.add(std::move(write));
  }
  settle(transfer);
}

}  // namespace headrace::fabric
