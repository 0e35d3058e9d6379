// Peers of this host whose memory is mapped here and written by copies; what has landed is told through the lanes.
// Owns the mappings of others' memory, and which of our keys are still mapped somewhere. Owner thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "memory/cuda.h"
#include "memory/memory.h"
#include "near/neighbours.h"

namespace headrace::fabric {

class Mapped;

class MappedLink final : public NeighbourLink {
 public:
  MappedLink(Mapped& transport, std::uint64_t peer, std::string control);
  ~MappedLink() override;

  Posted post_write(std::uint64_t peer, const std::byte* from, const Write& write) override;
  void flush(bool more) override;
  Descriptor grant(std::uint32_t generation) override;
  bool withdraw() override;
  void abandon(std::uint64_t) override {}
  void access_ended(std::uint64_t key) override;

 private:
  void require(const Descriptor& descriptor) override;
  void enter(Fd memory, std::uint64_t length) override;
  bool replace(std::uint64_t key) override;
  void leave(std::uint64_t key) override;
  void cut_off() override { memory_ = Mapping(); }
  void copy(std::byte* to, const std::byte* from, std::size_t length);
  void fence();

  Mapped& transport_;
  bool fence_ = false;  // bytes went out since the last flush
  bool on_device_ = false;
  Mapping memory_;  // there

  std::optional<std::uint64_t> granted_;  // our key for this peer
  std::set<std::uint64_t> ending_;        // earlier ones, not let go of yet
  bool told_ = false;                     // a `withdraw` that ends later
};

class Mapped final : public Neighbours {
 public:
  // `memory_fd` is what peers are given, sealed against shrinking; or the handle of a device's memory. Throws
  // InputError, FabricError.
  Mapped(const Place& place, int memory_fd, std::size_t length, std::shared_ptr<CudaDevice> device, Owner owner);
  ~Mapped() override { stop(); }

  std::unique_ptr<Link> link(std::uint64_t peer, const std::string& control) override {
    return std::make_unique<MappedLink>(*this, peer, control);
  }

 private:
  friend class MappedLink;

  const int memory_fd_;
  const std::size_t length_;
  const std::shared_ptr<CudaDevice> device_;  // whose memory ours is; none: the host's
};

}  // namespace headrace::fabric
