// The owner's commands about peers, access, messages and counters. Each runs whole between two turns, and checks all it
// was given before it touches a table. (Those about write lists and digests: lists.cpp.)
#include <algorithm>
#include <map>
#include <utility>

#include "clock.h"
#include "errors.h"
#include "owner/owner.h"

namespace headrace::fabric {
namespace {

// A single write is shared by NICs from here on: below it, one of them is as fast.
constexpr std::uint64_t kLeastShared = std::uint64_t{256} << 10;

// Of each NIC; "?" where there is none.
std::string told(const Address& address) {
  std::string text = address.control.empty() ? "" : "mapped";
  for (const NicAddress& nic : address.nics) text += (text.empty() ? "" : ", ") + nic.provider;
  return text.empty() ? "?" : text;
}

}  // namespace

Owner::Peer& Owner::peer_of(std::uint64_t peer) {
  const auto found = peers_.find(peer);
  if (found == peers_.end()) throw InputError("peer", std::to_string(peer) + " is unknown or was removed");
  return found->second;
}

std::uint64_t Owner::add_peer(const std::string& address) {
  return ask([this, address] {
    const Address theirs = Address::decode(address);
    std::optional<Way> way = way_to(theirs);
    if (!way)
      throw InputError("address", "no transport in common: ours are " + told(own_) + ", the peer's " + told(theirs) +
                                      (theirs.host == own_.host ? "" : " on another host"));
    if (const auto known = peer_by(way->route))
      throw InputError("address", "is peer " + std::to_string(*known) + " already");
    auto link = way->link(next_peer_);
    const std::uint64_t id = next_peer_++;
    Peer& added = peers_[id];
    added.route = std::move(way->route);
    added.link = std::move(link);
    const bool is_near =
        std::ranges::any_of(neighbours_, [&](auto& each) { return each->name() == added.link->transport(); });
    if (watch_ && !is_near && !theirs.watch.empty()) watch_->begin(id, theirs.watch);
    share_windows();
    return id;
  });
}

std::optional<std::uint64_t> Owner::peer_at(const std::string& address) {
  return ask([this, address]() -> std::optional<std::uint64_t> {
    const std::optional<Way> way = way_to(Address::decode(address));
    return way ? peer_by(way->route) : std::nullopt;
  });
}

std::optional<std::uint64_t> Owner::peer_by(const std::string& route) const {
  for (const auto& [id, peer] : peers_)
    if (peer.route == route) return id;
  return std::nullopt;
}

// By which of its ways. Both sides find the same one: of one host mapped, then shm, then the first provider that both
// have.
std::optional<Owner::Way> Owner::way_to(const Address& theirs) {
  for (const auto& each : neighbours_) {
    const std::string control = theirs.host == own_.host ? theirs.control_of(each->name()) : "";
    if (control.empty()) continue;
    return Way{each->name() + " " + control, [&each, control](std::uint64_t peer) { return each->link(peer, control); }};
  }
  for (const auto& each : rails_) {
    std::vector<NicAddress> nics;
    std::ranges::copy_if(theirs.nics, std::back_inserter(nics),
                         [&](const NicAddress& nic) { return nic.provider == each->provider(); });
    if (nics.empty()) continue;
    const std::string route = each->provider() + " " + nics[0].name;
    return Way{route, [&each, nics](std::uint64_t) { return each->link(nics); }};
  }
  return std::nullopt;
}

void Owner::remove_peer(std::uint64_t peer) {
  ask([this, peer] {
    Peer& removed = peer_of(peer);
    removed.link->withdraw();
    removed.link->abandon(peer);
    for (const auto& [id, transfer] : std::map(transfers_.begin(), transfers_.end())) {
      if (transfer->peer != peer || transfer->told) continue;
      if (transfer->num_outstanding > 0) transfer->fail(FI_ECANCELED, "the peer was removed");
      transfer->num_failed += std::exchange(transfer->num_outstanding, 0);
      give_up(*transfer);
    }
    peers_.erase(peer);
    if (watch_) watch_->end(peer);
    share_windows();
  });
}

std::string Owner::transport(std::uint64_t peer) {
  return ask([this, peer] { return peer_of(peer).link->transport(); });
}

std::uint64_t Owner::cuts(const Peer& peer, std::uint64_t length) const {
  return length < kLeastShared ? 1 : peer.link->num_rails();
}

std::uint64_t Owner::num_cuts(std::uint64_t peer, std::uint64_t length) {
  return ask([this, peer, length] { return cuts(peer_of(peer), length); });
}

Descriptor Owner::grant(std::uint64_t peer) {
  return ask([this, peer] { return peer_of(peer).link->grant(++num_grants_); });
}

bool Owner::revoke(std::uint64_t peer) {
  return ask([this, peer] { return peer_of(peer).link->withdraw(); });
}

void Owner::connect(std::uint64_t peer, const Descriptor& descriptor) {
  ask([this, peer, descriptor] {
    Peer& connected = peer_of(peer);
    if (descriptor.length == 0) throw InputError("descriptor.length", "must be at least 1 byte");
    if (descriptor.keys.empty()) throw InputError("descriptor.keys", "must be at least one");
    // A Hello overtaken by the next one must not bring back a revoked key.
    if (connected.target && descriptor.generation < connected.target->generation)
      throw InputError("descriptor", "generation " + std::to_string(descriptor.generation) + " is older than the " +
                                         std::to_string(connected.target->generation) + " in use");
    connected.link->connect(descriptor);
    for (const auto& [id, transfer] : std::map(transfers_.begin(), transfers_.end()))
      if (transfer->peer == peer) give_up(*transfer);
    connected.target = Target{.length = descriptor.length, .generation = descriptor.generation};
  });
}

PeerNews Owner::peer_news() {
  return {.queue =
              [this](std::function<void()> command) {
                const std::lock_guard guard(mutex_);
                if (!stopping_) queue(std::move(command));
              },
          .lost = [this](std::uint64_t peer, int code, const std::string& text) { peer_lost(peer, code, text); },
          .silent = [this](std::uint64_t peer) { events_->append(PeerSilent{peer}); },
          .heard = [this](std::uint64_t peer) { events_->append(PeerHeard{peer}); }};
}

// What was not posted never will be. What was is up to the provider: its source may still be read.
void Owner::peer_lost(std::uint64_t peer, int code, const std::string& text) {
  Peer& lost = peer_of(peer);
  events_->append(PeerLost{peer, code, text});
  if (lost.target) lost.target->generation = 0;  // a process started anew counts its grants anew
  for (const auto& [id, transfer] : std::map(transfers_.begin(), transfers_.end())) {
    if (transfer->peer != peer || transfer->told || transfer->complete) continue;
    transfer->fail(code, "control connection: " + text);
    give_up(*transfer);
  }
  if (lost.messages.empty()) return;
  events_->append(SendFailed{peer, code, "control connection: " + text});
  for (const auto& message : std::deque(lost.messages)) {
    message->failed = true;
    lost.unqueue(message);
  }
}

void Owner::end_late(std::uint64_t now) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const auto found = transfers_.find(deadlines_.begin()->second);
    deadlines_.erase(deadlines_.begin());
    if (found == transfers_.end() || found->second->told || found->second->complete) continue;
    const auto late = found->second;
    late->fail(FI_ETIMEDOUT, "its deadline passed");
    late->ended = true;
    give_up(*late);
  }
}

void Owner::send(std::uint64_t peer, std::string message) {
  post([this, peer, bytes = std::move(message)]() mutable {
    Peer& to = peer_of(peer);
    if (bytes.empty() || bytes.size() > kMaxMessage)
      throw InputError("message", "has " + std::to_string(bytes.size()) + " bytes, not 1 to 16 MiB");
    auto queued = std::make_shared<OutgoingMessage>();
    queued->bytes = std::move(bytes);
    if (to.num_queued_bytes + queued->cost() > kMaxQueuedBytes) {
      events_->append(SendFailed{peer, FI_ENOBUFS, std::to_string(to.messages.size()) + " messages wait already"});
      return;
    }
    to.num_queued_bytes += queued->cost();
    queued->number = next_message_++;
    to.messages.push_back(std::move(queued));
  });
}

void Owner::arm(std::uint32_t imm, std::uint64_t expected) {
  admit();
  counters_->arm(imm, expected);
}

void Owner::retarget(std::uint32_t imm, std::uint64_t expected) {
  admit();
  counters_->retarget(imm, expected, now_ns());
}

void Owner::disarm(std::uint32_t imm) {
  admit();
  counters_->disarm(imm);
}

Statistics Owner::statistics() {
  return ask([this] {
    Statistics now = statistics_;
    now.num_peers_now = peers_.size();
    now.num_transfers_now = num_transfers_;
    const auto counted = counters_->counts();
    now.num_counters_now = counted.num_armed;
    now.num_arrivals = counted.num_arrivals;
    now.num_surplus = counted.num_surplus;
    now.num_fragments_dropped = assembler_.num_dropped;
    return now;
  });
}

}  // namespace headrace::fabric
