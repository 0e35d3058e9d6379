// Mappings of the KV memory, host's or a device's. Owns address ranges only; knows no libfabric. Used by the owner
// thread.
#pragma once

#include <cstddef>
#include <memory>

#include "memory/cuda.h"

namespace headrace::fabric {

// One shared mapping of a file, aligned to huge pages so that the kernel can map the pool with them. With a device, of
// its memory whose handle the file is: then `data` is an address for it and for NICs, and nothing of it is read or
// written here.
class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, std::size_t length, std::shared_ptr<CudaDevice> device = nullptr);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  std::byte* data() const { return data_; }
  std::size_t length() const { return length_; }

  // Puts anonymous memory where the file was mapped; the addresses stay ours. What still lands here misses the file. Of
  // host memory only.
  void detach();
  // Gives back what landed in detached memory.
  void discard();

 private:
  std::byte* data_ = nullptr;
  std::size_t length_ = 0;
  std::shared_ptr<CudaDevice> device_;
};

}  // namespace headrace::fabric
