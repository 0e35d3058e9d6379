// The owner's commands about peers, access, messages and counters. Each runs whole between two turns, and checks all it
// was given before it touches a table. (Those about write lists and digests: lists.cpp.)
#include <algorithm>
#include <map>
#include <utility>

#include "clock.h"
#include "errors.h"
#include "owner.h"

namespace headrace::fabric {
namespace {

// What a provider may have taken from a socket and not yet put in its place.
constexpr std::uint64_t kMaxStaged = std::uint64_t{1} << 20;

}  // namespace

Owner::Peer& Owner::peer_of(std::uint64_t peer) {
  const auto found = peers_.find(peer);
  if (found == peers_.end()) throw InputError("peer", std::to_string(peer) + " is unknown or was removed");
  return found->second;
}

std::uint64_t Owner::add_peer(const std::string& address) {
  return call([this, address] {
    const fi_addr_t inserted = endpoint_->insert(address);
    for (const auto& [id, peer] : peers_)
      if (peer.address == inserted) throw InputError("address", "is peer " + std::to_string(id) + " already");
    const std::uint64_t id = next_peer_++;
    peers_[id].address = inserted;
    return id;
  });
}

void Owner::remove_peer(std::uint64_t peer) {
  call([this, peer] {
    Peer& removed = peer_of(peer);
    withdraw(removed);
    endpoint_->abandon(peer);
    for (const auto& [id, transfer] : std::map(transfers_.begin(), transfers_.end())) {
      if (transfer->peer != peer || transfer->told) continue;
      if (transfer->num_outstanding > 0) transfer->fail(FI_ECANCELED, "the peer was removed");
      transfer->num_failed += std::exchange(transfer->num_outstanding, 0);
      give_up(transfer);
    }
    peers_.erase(peer);
  });
}

Descriptor Owner::grant(std::uint64_t peer) {
  return call([this, peer] {
    Peer& granted = peer_of(peer);
    withdraw(granted);
    // A new range each time: the old one stays ours, for what is still landing there.
    granted.alias = Mapping(memory_fd_, memory_.length());
    granted.access = endpoint_->register_memory(granted.alias.data(), granted.alias.length(), FI_REMOTE_WRITE);
    Descriptor descriptor;
    descriptor.virtual_addressing = traits_.virtual_addressing;
    if (traits_.virtual_addressing) descriptor.base = reinterpret_cast<std::uint64_t>(granted.alias.data());
    descriptor.length = granted.alias.length();
    descriptor.key = granted.access.key;
    descriptor.generation = ++num_grants_;
    return descriptor;
  });
}

void Owner::revoke(std::uint64_t peer) {
  call([this, peer] { withdraw(peer_of(peer)); });
}

void Owner::withdraw(Peer& peer) {
  if (peer.alias.data() == nullptr) return;
  // A later write with the dead key breaks the connection (tcp, libfabric 1.17): messages under way to and from that
  // peer may be lost with it, most of them told as SendFailed; the next post connects again. Key first, so that no new
  // header passes; then the memory, so that the rest of a write already begun misses it.
  const long rc = peer.access.region ? fi_close(&peer.access.region.release()->fid) : 0;
  peer.alias.detach();
  detached_.push_back({.alias = std::exchange(peer.alias, Mapping()), .connections = endpoint_->connections()});
  release_detached();
  check("fi_close(region)", rc);
}

// Peers that come and go must not use up the address space; nor may one fill memory with the rest of a write.
void Owner::release_detached() {
  const auto now = endpoint_->connections();
  const std::uint64_t longest = memory_.length() * std::max<std::uint64_t>(traits_.rma_iov_limit, 1) + kMaxStaged;
  const auto passed = [&](const Connection& then) {
    return std::ranges::none_of(*now, [&](const Connection& each) {
      return each.identity == then.identity && each.num_bytes_taken < then.num_bytes_received + longest;
    });
  };
  for (auto& [alias, connections] : detached_) {
    alias.discard();
    if (now && connections) std::erase_if(*connections, passed);
  }
  std::erase_if(detached_, [](const Detached& each) { return each.connections && each.connections->empty(); });
}

void Owner::connect(std::uint64_t peer, const Descriptor& descriptor) {
  call([this, peer, descriptor] {
    Peer& connected = peer_of(peer);
    if (descriptor.virtual_addressing != traits_.virtual_addressing)
      throw InputError("descriptor.addressing", std::string("this provider writes by ") +
                                                    (traits_.virtual_addressing ? "virtual address" : "offset"));
    if (descriptor.length == 0) throw InputError("descriptor.length", "must be at least 1 byte");
    // A Hello overtaken by the next one must not bring back a revoked key.
    if (connected.target && descriptor.generation < connected.target->generation)
      throw InputError("descriptor", "generation " + std::to_string(descriptor.generation) + " is older than the " +
                                         std::to_string(connected.target->generation) + " in use");
    for (const auto& [id, transfer] : std::map(transfers_.begin(), transfers_.end()))
      if (transfer->peer == peer) give_up(transfer);
    connected.target = Target{.base = descriptor.base,
                              .length = descriptor.length,
                              .key = descriptor.key,
                              .generation = descriptor.generation};
  });
}

void Owner::send(std::uint64_t peer, std::string message) {
  call([this, peer, bytes = std::move(message)]() mutable {
    Peer& to = peer_of(peer);
    if (bytes.empty() || bytes.size() > kMaxMessage)
      throw InputError("message", "has " + std::to_string(bytes.size()) + " bytes, not 1 to 16 MiB");
    auto queued = std::make_shared<OutgoingMessage>();
    queued->bytes = std::move(bytes);
    if (to.num_queued_bytes + queued->cost() > kMaxQueuedBytes) {
      events_.append(SendFailed{peer, FI_ENOBUFS, std::to_string(to.messages.size()) + " messages wait already"});
      return;
    }
    to.num_queued_bytes += queued->cost();
    queued->number = next_message_++;
    to.messages.push_back(std::move(queued));
  });
}

void Owner::arm(std::uint32_t imm, std::uint64_t expected) {
  call([this, imm, expected] { counters_.arm(imm, expected); });
}

void Owner::retarget(std::uint32_t imm, std::uint64_t expected) {
  call([this, imm, expected] { counters_.retarget(imm, expected, now_ns()); });
}

void Owner::disarm(std::uint32_t imm) {
  call([this, imm] { counters_.disarm(imm); });
}

Statistics Owner::statistics() {
  return call([this] {
    Statistics now = statistics_;
    now.num_peers_now = peers_.size();
    now.num_transfers_now = num_transfers_;
    now.num_counters_now = counters_.num_armed();
    now.num_arrivals = counters_.num_arrivals;
    now.num_surplus = counters_.num_surplus;
    now.num_fragments_dropped = assembler_.num_dropped;
    return now;
  });
}

}  // namespace headrace::fabric
