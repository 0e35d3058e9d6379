#include "nics/rails.h"

#include <algorithm>
#include <utility>

#include "errors.h"
#include "signals.h"

namespace headrace::fabric {
namespace {

constexpr std::size_t kReceives = 128;  // of each NIC
constexpr std::uint64_t kMaxWindow = 64;
// ns between looks for new connections: some 10 us for each that there is
constexpr std::uint64_t kKeepAlive = 5'000'000'000;
// What a provider may have taken from a socket and not yet put in its place.
constexpr std::uint64_t kMaxStaged = std::uint64_t{1} << 20;

Posted posted(long rc, const char* call) {
  if (rc == 0) return {.kind = Posted::Kind::under_way};
  if (rc == -FI_EAGAIN) return {.kind = Posted::Kind::full};
  return {.kind = Posted::Kind::failed, .code = static_cast<int>(-rc), .call = call};
}

}  // namespace

// ---- the group -----------------------------------------------------------------------------------------------------

Rails::Rails(const std::string& provider, const std::vector<Local>& locals, SourceMemory memory, std::uint64_t sender)
    : provider_(provider), memory_(memory), sender_(sender), num_receives_(locals.size()) {
  const SignalHandlers handlers;  // put back at the end: providers install their own
  for (const Local& local : locals) {
    nics_.push_back(std::make_unique<Endpoint>(provider, local, memory.device));
    nics_.back()->register_source(memory.data, memory.length);
  }
  post_receives();
}

std::vector<NicAddress> Rails::addresses() const {
  std::vector<NicAddress> found;
  for (const auto& nic : nics_) found.push_back({.provider = provider_, .name = nic->name()});
  return found;
}

std::unique_ptr<Link> Rails::link(const std::vector<NicAddress>& theirs) {
  return std::make_unique<RailLink>(*this, theirs);
}

void Rails::read(std::vector<Completion>& completions) {
  for (auto& nic : nics_) nic->read(completions);
}

void Rails::post_receives() {
  for (std::size_t i = 0; i < nics_.size(); ++i) {
    for (; num_receives_[i] < kReceives; ++num_receives_[i]) {
      Op* op = nics_[i]->take(OpKind::receive);
      const long rc = nics_[i]->post_receive(op);
      if (rc == 0) continue;
      nics_[i]->recycle(op, false);
      if (rc == -FI_EAGAIN) break;
      check("fi_recv", rc);
    }
  }
}

void Rails::received(const Completion& completion) {
  for (std::size_t i = 0; i < nics_.size(); ++i)
    if (nics_[i].get() == completion.endpoint) --num_receives_[i];
}

std::uint64_t Rails::window(std::size_t num_peers) const {
  // All windows together leave room in the transmit queue, so that hung peers cannot fill it for the others.
  std::uint64_t least = kMaxWindow;
  for (const auto& nic : nics_) {
    const std::uint64_t size = nic->traits().tx_size;
    const std::uint64_t held = std::min(nic->num_abandoned(), size);
    const std::uint64_t share = (size - held) / 2 / std::max<std::uint64_t>(num_peers, 1);
    least = std::min(least, std::max(share, std::uint64_t{4}));
  }
  return least;
}

void Rails::keep_alive(std::uint64_t now) {
  if (now < keep_alive_at_) return;
  keep_alive_at_ = now + kKeepAlive;
  for (const auto& nic : nics_) nic->keep_alive();
}

bool Rails::may_sleep() {
  return std::ranges::all_of(nics_, [](auto& nic) { return nic->may_sleep(); });
}

void Rails::add_wait_fds(std::vector<int>& fds) const {
  for (const auto& nic : nics_)
    if (nic->wait_fd() >= 0) fds.push_back(nic->wait_fd());
}

void Rails::detach(Mapping alias) {
  alias.detach();
  detached_.push_back({.alias = std::move(alias), .connections = connections()});
  release_detached();
}

// Peers that come and go must not use up the address space; nor may one fill memory with the rest of a write.
void Rails::release_detached() {
  const auto now = connections();
  const std::uint64_t longest = memory_.length * std::max<std::uint64_t>(traits().rma_iov_limit, 1) + kMaxStaged;
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

std::optional<std::vector<Connection>> Rails::connections() const {
  std::vector<Connection> all;
  for (const auto& nic : nics_) {
    const auto seen = nic->connections();
    if (!seen) return std::nullopt;
    all.insert(all.end(), seen->begin(), seen->end());
  }
  return all;
}

// ---- a peer over it ------------------------------------------------------------------------------------------------

RailLink::RailLink(Rails& rails, const std::vector<NicAddress>& theirs) : rails_(rails), num_theirs_(theirs.size()) {
  const std::size_t num_ours = rails.nics_.size();
  for (std::size_t j = 0; j < std::max(num_ours, num_theirs_); ++j) {
    Endpoint* ours = rails.nics_[j % num_ours].get();
    pairs_.push_back({.ours = ours, .theirs = ours->insert(theirs[j % num_theirs_].name), .key = j % num_theirs_});
  }
}

void RailLink::connect(const Descriptor& descriptor) {
  const bool is_virtual = rails_.traits().virtual_addressing;
  if (descriptor.addressing != (is_virtual ? Addressing::virtual_address : Addressing::offset))
    throw InputError("descriptor.addressing",
                     rails_.provider_ + " writes by " + (is_virtual ? "virtual address" : "offset"));
  if (descriptor.keys.size() != num_theirs_)
    throw InputError("descriptor.keys", "must be one for each of the peer's " + std::to_string(num_theirs_) +
                                            " NICs, are " + std::to_string(descriptor.keys.size()));
  base_ = descriptor.base;
  keys_ = descriptor.keys;
}

Posted RailLink::post_write(std::uint64_t peer, const std::byte* from, const Write& write) {
  const Pair& pair = pairs_[next_];
  Op* op = pair.ours->take(OpKind::write);
  op->peer = peer;
  op->transfer = write.transfer->shared_from_this();
  const RemotePlace place{.at = base_ + write.dst, .key = keys_[pair.key]};
  const long rc = pair.ours->post_write(op, pair.theirs, from, write.length, write.transfer->imm, place);
  if (rc == 0) {
    next_ = (next_ + 1) % pairs_.size();
  } else {
    pair.ours->recycle(op, false);
  }
  return posted(rc, "fi_writedata");
}

// All over one pair: messages keep their order.
Posted RailLink::post_fragment(std::uint64_t peer, const std::shared_ptr<OutgoingMessage>& message) {
  const Pair& pair = pairs_[0];
  Op* op = pair.ours->take(OpKind::send);
  op->peer = peer;
  op->message = message;
  const std::size_t length = cut_fragment(*message, rails_.sender_, op->buffer);
  const long rc = pair.ours->post_send(op, pair.theirs, length);
  if (rc == 0) {
    message->offset += length - sizeof(FragmentHeader);
  } else {
    pair.ours->recycle(op, false);
  }
  return posted(rc, "fi_send");
}

Descriptor RailLink::grant(std::uint32_t generation) {
  withdraw();
  // A new range each time: the old one stays ours, for what is still landing there.
  alias_ = Mapping(rails_.memory_.fd, rails_.memory_.length, rails_.memory_.device);
  Descriptor descriptor;
  for (auto& nic : rails_.nics_) {
    access_.push_back(nic->register_shared(alias_.data(), alias_.length(), FI_REMOTE_WRITE));
    descriptor.keys.push_back(access_.back().key);
  }
  if (rails_.traits().virtual_addressing) {
    descriptor.addressing = Addressing::virtual_address;
    descriptor.base = reinterpret_cast<std::uint64_t>(alias_.data());
  }
  descriptor.length = alias_.length();
  descriptor.generation = generation;
  return descriptor;
}

bool RailLink::withdraw() {
  if (alias_.data() == nullptr) return true;
  // A later write with the dead key breaks the connection (tcp, libfabric 1.17): messages under way to and from that
  // peer may be lost with it, most of them told as SendFailed; the next post connects again. Keys first, so that no new
  // header passes; then the memory, so that the rest of a write already begun misses it.
  long rc = 0;
  for (auto& each : access_) rc = std::min<long>(rc, each.close());
  if (rails_.traits().is_rdma()) {
    // Here the closed registration is all of it. Until then the NIC has the pages themselves, whatever is mapped in
    // their place: so one that does not close leaves the peer its access, and is tried again.
    check("fi_close(region)", rc);
    alias_ = Mapping();
  } else {
    rails_.detach(std::exchange(alias_, Mapping()));
  }
  access_.clear();
  check("fi_close(region)", rc);
  return true;
}

void RailLink::abandon(std::uint64_t peer) {
  for (auto& nic : rails_.nics_) nic->abandon(peer);
}

}  // namespace headrace::fabric
