// Never run on a device. See cuda.h.
#include "memory/cuda.h"

#include <cerrno>
#include <cstdint>
#include <string>
#include <utility>

#include "errors.h"
#include "memory/cuda_driver.h"

namespace headrace::fabric {

using namespace cuda;

// Our context on this thread, and the thread's own again afterwards: it may be one that computes.
class CudaDevice::Entered {
 public:
  explicit Entered(const CudaDevice& device)
      : driver_(*device.driver_), entered_(driver_.enter(device.context_) == 0) {}
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;
  ~Entered() {
    void* left = nullptr;
    if (entered_) driver_.leave(&left);
  }

 private:
  const Driver& driver_;
  const bool entered_;  // or the call that follows says why not
};

namespace {

Pointer pointer(const std::byte* data) { return reinterpret_cast<std::uintptr_t>(data); }

AllocationProperties properties_on(int ordinal, bool nics_reach_it) {
  AllocationProperties properties;
  properties.location.id = ordinal;
  properties.flags.nics_reach_it = nics_reach_it;
  return properties;
}

}  // namespace

void CudaDevice::check(const char* call, int code) const {
  if (code == 0) return;
  const char* text = nullptr;
  driver_->error_text(code, &text);
  throw FabricError(call, code, text != nullptr ? text : "unknown to the driver");
}

CudaDevice::CudaDevice(int ordinal) : driver_(std::make_unique<Driver>()), ordinal_(ordinal) {
  check("cuInit", driver_->init(0));
  int count = 0;
  check("cuDeviceGetCount", driver_->count_devices(&count));
  if (ordinal < 0 || ordinal >= count)
    throw InputError("cuda_device",
                     "must be one of the " + std::to_string(count) + " visible here, is " + std::to_string(ordinal));
  check("cuDeviceGet", driver_->get_device(&device_, ordinal));
  int shares = 0;
  check("cuDeviceGetAttribute", driver_->get_attribute(&shares, kSharesFiles, device_));
  if (shares == 0) throw FabricError("cuDeviceGetAttribute", ENOSYS, "this device's memory cannot be shared as a file");
  const AllocationProperties properties = properties_on(ordinal, false);
  check("cuMemGetAllocationGranularity", driver_->get_granularity(&granularity_, &properties, kLeast));
  check("cuDevicePrimaryCtxRetain", driver_->retain(&context_, device_));
  try {
    const Entered entered(*this);
    check("cuStreamCreate", driver_->create_stream(&stream_, kNonBlocking));
  } catch (...) {
    driver_->release(device_);
    throw;
  }
}

CudaDevice::~CudaDevice() {
  driver_->destroy_stream(stream_);
  driver_->release(device_);
}

std::size_t CudaDevice::rounded(std::size_t length) const {
  return (length + granularity_ - 1) / granularity_ * granularity_;
}

Fd CudaDevice::create(std::size_t length) {
  const Entered entered(*this);
  int nics = 0;
  check("cuDeviceGetAttribute", driver_->get_attribute(&nics, kNicsReachIt, device_));
  const AllocationProperties properties = properties_on(ordinal_, nics != 0);
  Allocation made = 0;
  check("cuMemCreate", driver_->create(&made, rounded(length), &properties, 0));
  int file = -1;
  const int code = driver_->export_file(&file, made, kFile, 0);
  driver_->drop(made);  // the file holds it
  check("cuMemExportToShareableHandle", code);
  return Fd(file);
}

std::byte* CudaDevice::map(int handle, std::size_t length) {
  const Entered entered(*this);
  const std::size_t whole = rounded(length);
  Allocation allocation = 0;
  void* const file = reinterpret_cast<void*>(static_cast<std::intptr_t>(handle));
  check("cuMemImportFromShareableHandle", driver_->import_file(&allocation, file, kFile));
  Pointer at = 0;
  int code = driver_->reserve(&at, whole, 0, 0, 0);
  const char* call = "cuMemAddressReserve";
  if (code == 0) {
    code = driver_->map(at, whole, 0, allocation, 0);
    call = "cuMemMap";
    if (code == 0) {
      const Access access{.location = {.id = ordinal_}};
      code = driver_->set_access(at, whole, &access, 1);
      call = "cuMemSetAccess";
      if (code != 0) driver_->unmap(at, whole);
    }
    if (code != 0) driver_->free(at, whole);
  }
  driver_->drop(allocation);  // the mapping holds it
  check(call, code);
  return reinterpret_cast<std::byte*>(at);
}

// What fails here has failed before: a context in error copies nothing any more, and nobody keeps these addresses.
void CudaDevice::unmap(std::byte* data, std::size_t length) noexcept {
  const Entered entered(*this);
  driver_->synchronize(stream_);
  driver_->unmap(pointer(data), rounded(length));
  driver_->free(pointer(data), rounded(length));
}

Fd CudaDevice::dmabuf(const std::byte* data, std::size_t length) const {
  const Entered entered(*this);
  int file = -1;
  const int code = driver_->export_range(&file, pointer(data), rounded(length), kDmabuf, 0);
  return code == 0 ? Fd(file) : Fd();
}

void CudaDevice::copy(std::byte* to, const std::byte* from, std::size_t length) {
  const Entered entered(*this);
  check("cuMemcpyAsync", driver_->copy(pointer(to), pointer(from), length, stream_));
}

void CudaDevice::wait() {
  const Entered entered(*this);
  check("cuStreamSynchronize", driver_->synchronize(stream_));
}

CudaMemory::CudaMemory(int ordinal, std::size_t length)
    : device_(std::make_unique<CudaDevice>(ordinal)),
      length_(device_->rounded(length)),
      handle_(device_->create(length)),
      data_(device_->map(handle_.get(), length)) {}

void CudaMemory::close() noexcept {
  if (data_ != nullptr) device_->unmap(std::exchange(data_, nullptr), length_);
  handle_ = Fd();
  device_.reset();
}

}  // namespace headrace::fabric
