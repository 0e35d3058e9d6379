#include "mapped.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "copy.h"
#include "errors.h"

namespace headrace::fabric {
namespace {

constexpr std::uint64_t kSlice = std::uint64_t{1} << 20;  // of a long write in one turn: about 60 us

}  // namespace

MappedLink::MappedLink(Mapped& transport, std::uint64_t peer, std::string control)
    : NeighbourLink(transport, peer, std::move(control)), transport_(transport) {}

MappedLink::~MappedLink() { withdraw(); }

void MappedLink::enter(Fd memory, std::uint64_t length) {
  if (length < length_) throw InputError("length", "shorter than its descriptor says");
  memory_ = Mapping(memory.get(), length_);
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
  if (there_ == There::denied || there_ == There::lost) return refused();
  if (there_ != There::open) return is_ready(), Posted{.kind = Posted::Kind::full};
  std::uint64_t done = write.done;
  const std::uint64_t slice = std::min(write.length - done, kSlice);
  if (slice > 0) {
    copy_out(memory_.data() + write.dst + done, from + done, slice);
    fence_ = true;
    done += slice;
  }
  if (done < write.length) return {.kind = Posted::Kind::partly, .done = done};
  if (!lane_->push_imm(write.transfer->imm)) return {.kind = Posted::Kind::full, .done = done};
  pushed_ = true;
  return {.kind = Posted::Kind::finished};
}

void MappedLink::flush(bool more) {
  if (pushed_ && std::exchange(fence_, false)) copy_fence();
  NeighbourLink::flush(more);
}

Descriptor MappedLink::grant(std::uint32_t generation) {
  withdraw();
  told_ = false;
  Fd memory(::fcntl(transport_.memory_fd_, F_DUPFD_CLOEXEC, 0));
  if (!memory) throw FabricError("fcntl(F_DUPFD_CLOEXEC)", errno, "no file for the peer's access to the memory");
  const std::uint64_t key = new_key();
  granted_ = key;
  transport_.control_.allow(key, std::move(memory), transport_.length_);
  return {.addressing = Addressing::mapped,
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
