// The NICs of one provider: a domain group. Owns their endpoints, and the aliases of our memory that peers were given;
// spreads what goes to a peer over them. Owner thread only, except for the constructor.
//
// Between n NICs here and m there, pair j joins NIC j % n with NIC j % m: each side has max(n, m) of them, in the same
// order, and uses them by turns.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "address.h"
#include "link.h"
#include "memory/memory.h"
#include "nics/endpoint.h"

namespace headrace::fabric {

struct SourceMemory {  // ours
  int fd = -1;
  std::byte* data = nullptr;
  std::size_t length = 0;
  std::shared_ptr<CudaDevice> device{};  // where it is, if not the host's
};

class Rails {
 public:
  // One endpoint for each of `locals`.
  Rails(const std::string& provider, const std::vector<Local>& locals, SourceMemory memory, std::uint64_t sender);

  const std::string& provider() const { return provider_; }
  const Traits& traits() const { return nics_[0]->traits(); }
  std::vector<NicAddress> addresses() const;

  // Throws InputError where they are no addresses of this provider.
  std::unique_ptr<Link> link(const std::vector<NicAddress>& theirs);

  void read(std::vector<Completion>& completions);
  // Buffers for what may come.
  void post_receives();
  void received(const Completion& completion);

  // Writes to one peer that may be under way, so that a hung one leaves the others room in the queue.
  std::uint64_t window(std::size_t num_peers) const;
  // Now and then. Where the other side's kernel gave a connection up and ours knows nothing of it, the provider would
  // use it for ever, and take no second one from that peer.
  void keep_alive(std::uint64_t now);
  bool may_sleep();
  void add_wait_fds(std::vector<int>& fds) const;

 private:
  friend class RailLink;

  // A revoked alias, kept while a half received write may still land there: until each connection of that time, if it
  // could be seen, is closed or has brought more than one write can hold.
  struct Detached {
    Mapping alias;
    std::optional<std::vector<Connection>> connections;
  };
  void detach(Mapping alias);
  void release_detached();
  std::optional<std::vector<Connection>> connections() const;

  const std::string provider_;
  const SourceMemory memory_;
  const std::uint64_t sender_;  // of messages
  std::vector<std::unique_ptr<Endpoint>> nics_;
  std::vector<std::size_t> num_receives_;
  std::vector<Detached> detached_;
  std::uint64_t keep_alive_at_ = 0;
};

class RailLink final : public Link {
 public:
  RailLink(Rails& rails, const std::vector<NicAddress>& theirs);

  const std::string& transport() const override { return rails_.provider_; }
  std::size_t num_rails() const override { return pairs_.size(); }
  void connect(const Descriptor& descriptor) override;
  Posted post_write(std::uint64_t peer, const std::byte* from, const Write& write) override;
  Posted post_fragment(std::uint64_t peer, const std::shared_ptr<OutgoingMessage>& message) override;
  void flush(bool) override {}
  Descriptor grant(std::uint32_t generation) override;
  bool withdraw() override;
  void abandon(std::uint64_t peer) override;

 private:
  struct Pair {
    Endpoint* ours = nullptr;
    fi_addr_t theirs = FI_ADDR_UNSPEC;
    std::size_t key = 0;  // which of the descriptor's
  };

  Rails& rails_;
  std::vector<Pair> pairs_;
  std::size_t num_theirs_;
  std::size_t next_ = 0;  // whose turn it is
  std::uint64_t base_ = 0;
  std::vector<std::uint64_t> keys_;
  Mapping alias_;
  std::vector<Registration> access_;  // one for each of our NICs; behind `alias_`, so that it ends first
};

}  // namespace headrace::fabric
