// Mappings of the KV memory. Owns address ranges only; knows no libfabric. Used by the owner thread.
#pragma once

#include <cstddef>

namespace headrace::fabric {

// One shared mapping of a file, aligned to huge pages so that the kernel can map the pool with them.
class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, std::size_t length);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  std::byte* data() const { return data_; }
  std::size_t length() const { return length_; }

  // Puts anonymous memory where the file was mapped; the addresses stay ours. What still lands here misses the file.
  void detach();
  // Gives back what landed in detached memory.
  void discard();

 private:
  std::byte* data_ = nullptr;
  std::size_t length_ = 0;
};

}  // namespace headrace::fabric
