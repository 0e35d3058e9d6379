// Never run on a device: CUDA memory that processes share, by the driver's own library, which is opened when such
// memory is asked for. (The tests run it over a driver made of memory files.) Owns a device's context, one stream of
// copies, and what is allocated and mapped through it; knows no peers. One thread at a time.
//
// Life of an allocation:
//     created    exported as a file: that is the handle, and passes between processes as files do
//     mapped     by whoever holds the handle, itself included, each at addresses of its own
//     unmapped   its copies are over, none can begin; the memory lives on with the handle and the other mappings
#pragma once

#include <cstddef>
#include <memory>

#include "fds.h"

namespace headrace::fabric {

namespace cuda {
struct Driver;
}

class CudaDevice {
 public:
  // Throws InputError for a device that there is not, FabricError without a driver, or one that cannot share memory.
  explicit CudaDevice(int ordinal);
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;
  ~CudaDevice();

  int ordinal() const { return ordinal_; }
  // What can be mapped: whole pieces of the device's granularity.
  std::size_t rounded(std::size_t length) const;

  Fd create(std::size_t length);
  // Throws FabricError where the handle is none, or of less memory.
  std::byte* map(int handle, std::size_t length);
  void unmap(std::byte* data, std::size_t length) noexcept;
  // The same memory as a file that a NIC's driver takes; none where the driver has no such files.
  Fd dmabuf(const std::byte* data, std::size_t length) const;

  // In order, and over when `wait` returns. Either side may be host memory.
  void copy(std::byte* to, const std::byte* from, std::size_t length);
  void wait();

 private:
  class Entered;
  void check(const char* call, int code) const;

  const std::unique_ptr<cuda::Driver> driver_;
  const int ordinal_;
  int device_ = 0;
  void* context_ = nullptr;
  void* stream_ = nullptr;
  std::size_t granularity_ = 0;
};

// One allocation of ours, with a mapping of it here.
class CudaMemory {
 public:
  CudaMemory(int ordinal, std::size_t length);
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;
  ~CudaMemory() { close(); }

  int handle() const { return handle_.get(); }
  std::byte* data() const { return data_; }
  std::size_t length() const { return length_; }
  // Peers that have it mapped keep it.
  void close() noexcept;

 private:
  std::unique_ptr<CudaDevice> device_;
  const std::size_t length_;
  Fd handle_;
  std::byte* data_ = nullptr;
};

}  // namespace headrace::fabric
