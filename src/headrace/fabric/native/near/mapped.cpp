#include "near/mapped.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "errors.h"
#include "near/copy.h"

namespace headrace::fabric {
namespace {

constexpr std::uint64_t kSlice = std::uint64_t{1} << 20;  // of a long write in one turn: about 60 us

// Memory that its owner could shorten would answer whoever writes there with SIGBUS.
bool can_shrink(int memory_fd) {
  const int seals = ::fcntl(memory_fd, F_GET_SEALS);
  return seals < 0 || (seals & F_SEAL_SHRINK) == 0;
}

int sealed(int memory_fd) {
  if (can_shrink(memory_fd) && ::fcntl(memory_fd, F_ADD_SEALS, F_SEAL_SHRINK) != 0)
    throw InputError("memory_fd",
                     "must be a memfd that can be sealed (MFD_ALLOW_SEALING), for peers of this host map it and it "
                     "must not shrink; fcntl(F_SEAL_SHRINK) says: " +
                         std::string(std::strerror(errno)));
  return memory_fd;
}

}  // namespace

Mapped::Mapped(const Place& place, int memory_fd, std::size_t length, std::shared_ptr<CudaDevice> device, Owner owner)
    : Neighbours("mapped", Wire::local, Addressing::mapped, place, std::move(owner)),
      memory_fd_(device ? memory_fd : sealed(memory_fd)),  // a handle of a device has no length to change
      length_(length),
      device_(std::move(device)) {}

MappedLink::MappedLink(Mapped& transport, std::uint64_t peer, std::string control)
    : NeighbourLink(transport, peer, std::move(control)), transport_(transport) {}

MappedLink::~MappedLink() { withdraw(); }

void MappedLink::require(const Descriptor& descriptor) {
  on_device_ = descriptor.addressing == Addressing::cuda;
  if (!on_device_) return NeighbourLink::require(descriptor);
  if (!transport_.device_)
    throw InputError("descriptor.addressing", "is CUDA memory, which memory of a CUDA device alone can be copied to");
}

void MappedLink::enter(Fd memory, std::uint64_t length) {
  if (length < length_) throw InputError("length", "shorter than its descriptor says");
  if (!on_device_ && can_shrink(memory.get()))
    throw FabricError("the peer's memory file can shrink, it must be sealed with F_SEAL_SHRINK", EPERM, "");
  memory_ = Mapping(memory.get(), length_, on_device_ ? transport_.device_ : nullptr);
  ::madvise(memory_.data(), length_, MADV_DONTFORK);
}

bool MappedLink::replace(std::uint64_t) {
  memory_ = Mapping();
  return true;
}

void MappedLink::leave(std::uint64_t key) {
  if (key == key_) memory_ = Mapping();
}

Posted MappedLink::post_write(std::uint64_t, const std::byte* from, const Write& write) {
  if (there_ == There::over) return refused();
  if (there_ != There::open) return is_ready(), Posted{.kind = Posted::Kind::full};
  std::uint64_t done = write.done;
  const std::uint64_t slice = std::min(write.length - done, kSlice);
  if (slice > 0) {
    copy(memory_.data() + write.dst + done, from + done, slice);
    fence_ = true;
    done += slice;
  }
  if (done < write.length) return {.kind = Posted::Kind::partly, .done = done};
  if (!lane_->push_imm(write.transfer->imm)) return {.kind = Posted::Kind::full, .done = done};
  pushed_ = true;
  return {.kind = Posted::Kind::finished};
}

void MappedLink::copy(std::byte* to, const std::byte* from, std::size_t length) {
  if (transport_.device_) {
    transport_.device_->copy(to, from, length);
  } else {
    copy_out(to, from, length);
  }
}

void MappedLink::fence() {
  if (transport_.device_) {
    transport_.device_->wait();
  } else {
    copy_fence();
  }
}

void MappedLink::flush(bool more) {
  // Though nothing is published: no copy may outlast its turn, for a transfer given up after it has said what can land.
  if (std::exchange(fence_, false)) fence();
  NeighbourLink::flush(more);
}

Descriptor MappedLink::grant(std::uint32_t generation) {
  withdraw();
  told_ = false;
  const std::uint64_t key = new_key();
  granted_ = key;
  transport_.control_.allow(key, transport_.memory_fd_, transport_.length_);
  return {.addressing = transport_.device_ ? Addressing::cuda : Addressing::mapped,
          .base = 0,
          .length = transport_.length_,
          .keys = {key},
          .generation = generation};
}

bool MappedLink::withdraw() {
  if (granted_) {
    ending_.insert(*granted_);
    transport_.control_.withdraw(*granted_);
    granted_.reset();
  }
  told_ = !ending_.empty();
  return ending_.empty();
}

void MappedLink::access_ended(std::uint64_t key) {
  ending_.erase(key);
  if (ending_.empty() && std::exchange(told_, false)) transport_.owner_.revoked(peer());
}

}  // namespace headrace::fabric
