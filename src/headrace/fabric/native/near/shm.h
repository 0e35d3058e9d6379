// Peers of this host that are written through libfabric's shm. Owns the endpoints: a pair for each peer and direction,
// made when the writer asks for the memory and gone with its access, so that no peer waits for another, and nothing is
// left of a key but its pair. Messages and wake-ups go over the lanes. Owner thread only.
//
// The reader's own thread puts the bytes in their place as it visits its end. So nothing lands any more once its end is
// closed, and the sources of what was under way are read no more: the writer is told, and completes that in error.
//
// No wake-up is lost. The writer posts inside the lane, leaves, and looks whether the reader sleeps; the reader says
// that it sleeps and looks whether it may visit. In the other direction likewise: what the writer awaits, a completion
// or room, comes by a visit of the reader, who leaves and then looks whether the writer waits; the writer says that it
// waits and then looks for an answer. Whoever finds the other one inside may sleep: the other one looks as it leaves.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "near/neighbours.h"
#include "near/shm_end.h"
#include "nics/endpoint.h"

namespace headrace::fabric {

class Shm;

class ShmLink final : public NeighbourLink {
 public:
  ShmLink(Shm& transport, std::uint64_t peer, std::string control);
  ~ShmLink() override;

  Posted post_write(std::uint64_t peer, const std::byte* from, const Write& write) override;
  void flush(bool more) override;
  Descriptor grant(std::uint32_t generation) override;
  bool withdraw() override;
  void abandon(std::uint64_t peer) override;

  void read(std::vector<Completion>& completions);
  void lie_down();
  bool has_news() const { return lane_ && (lane_->may_hear() || (unread_ && lane_->is_free())); }
  void add_wait_fds(std::vector<int>& fds) const;

 private:
  // Written to a process that may live on, over a connection that does not.
  struct Orphan {
    std::unique_ptr<ShmEnd> end;
    std::shared_ptr<const Fd> process;
  };

  std::uint64_t prepare() override;
  void enter(Fd, std::uint64_t token) override;
  bool replace(std::uint64_t key) override;
  void leave(std::uint64_t key) override;
  void cut_off() override;
  bool has_more(Endpoint& endpoint);
  void fail(std::unique_ptr<ShmEnd> end, int code, const std::string& text);
  void end_orphans();
  std::uint64_t num_under_way() const;

  Shm& transport_;
  std::map<std::uint64_t, std::unique_ptr<ShmEnd>> ends_;  // by the peer's key; those before `key_` still complete
  std::vector<Orphan> orphans_;
  bool inside_ = false;
  bool unread_ = false;  // some writes complete as they are posted
  bool waits_ = false;   // for room
  std::uint64_t num_unheard_bytes_ = 0;
  std::optional<std::uint64_t> granted_;
};

class Shm final : public Neighbours {
 public:
  // `memory` is what peers write. Removes what killed processes have left. Throws FabricError.
  Shm(const Place& place, std::byte* memory, std::size_t length, Owner owner);
  ~Shm() override { stop(); }

  const Traits& traits() const { return traits_; }
  std::unique_ptr<Link> link(std::uint64_t peer, const std::string& control) override;
  void read_completions(std::vector<Completion>& completions) override;
  std::uint64_t window() const override { return kShmWrites; }
  void lie_down() override;
  bool may_sleep() override;
  void add_wait_fds(std::vector<int>& fds) const override;

 private:
  friend class ShmLink;

  struct Inlet {
    std::uint64_t key = 0;
    ShmEnd end{};
    Registration access{};  // goes before its endpoint
  };

  bool has_news(const Incoming& in) const override { return in.lane->has_news() || in.lane->may_visit(); }
  void open_asked(std::uint64_t lane, std::uint64_t key, std::uint64_t token, pid_t process) override;
  std::uint64_t open(std::uint64_t lane, std::uint64_t key, std::uint64_t token, pid_t process);
  void close(std::uint64_t key);
  void lane_ended(std::uint64_t lane) override { inlets_.erase(lane); }

  std::byte* const memory_;
  const std::size_t length_;
  Traits traits_;
  std::set<ShmLink*> all_;
  std::map<std::uint64_t, std::vector<std::unique_ptr<Inlet>>> inlets_;  // by lane
};

}  // namespace headrace::fabric
