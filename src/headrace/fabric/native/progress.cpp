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
constexpr unsigned kUnreachable = 6;  // refusals in a row after which only time brings a retry
constexpr int kBurst = 32;            // writes per peer and turn
constexpr std::size_t kReceives = 128;

}  // namespace

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
  peer.unqueue(op.message);
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
      peer.unqueue(message);
      message->failed = true;
      events_.append(
          SendFailed{id, static_cast<int>(-rc), std::string("fi_send: ") + fi_strerror(static_cast<int>(-rc))});
      continue;
    }
    op->peer = id;
    op->message = message;
    message->offset += length - sizeof(FragmentHeader);
    ++message->num_outstanding;
    ++peer.num_sends_outstanding;
    peer.parked_until = 0;
    if (message->posted()) peer.unqueue(message);
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

}  // namespace headrace::fabric
