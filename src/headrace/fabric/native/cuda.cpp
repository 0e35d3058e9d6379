// Never run on a device. See cuda.h; the numbers and records below are the driver's, which have no header here.
#include "cuda.h"

#include <dlfcn.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "errors.h"

namespace headrace::fabric {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";
constexpr int kPinned = 1;            // CU_MEM_ALLOCATION_TYPE_PINNED
constexpr int kFile = 1;              // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
constexpr int kOnDevice = 1;          // CU_MEM_LOCATION_TYPE_DEVICE
constexpr int kReadWrite = 3;         // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
constexpr int kLeast = 0;             // CU_MEM_ALLOC_GRANULARITY_MINIMUM
constexpr int kDmabuf = 1;            // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
// CU_DEVICE_ATTRIBUTE_...
constexpr int kSharesFiles = 103;  // HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
constexpr int kNicsReachIt = 110;  // GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED

struct Location {
  int type = kOnDevice;
  int id = 0;
};

struct AllocationProperties {  // CUmemAllocationProp
  int type = kPinned;
  int handle_types = kFile;
  Location location;
  void* win32 = nullptr;
  struct {
    unsigned char compression = 0;
    unsigned char nics_reach_it = 0;
    unsigned short usage = 0;
    unsigned char reserved[4] = {};
  } flags;
};
static_assert(sizeof(AllocationProperties) == 32);

struct Access {  // CUmemAccessDesc
  Location location;
  int flags = kReadWrite;
};
static_assert(sizeof(Access) == 12);

using Pointer = unsigned long long;     // CUdeviceptr
using Allocation = unsigned long long;  // CUmemGenericAllocationHandle

Pointer pointer(const std::byte* data) { return reinterpret_cast<std::uintptr_t>(data); }

}  // namespace

struct CudaDevice::Driver {
  Driver() {
    void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);  // for as long as the process lives
    if (library == nullptr)
      throw FabricError("dlopen(libcuda.so.1)", ENOENT,
                        "CUDA memory needs the driver's library: " + std::string(::dlerror()));
    const auto find = [&](const char* name, auto& function) {
      void* found = ::dlsym(library, name);
      if (found == nullptr) throw FabricError(name, ENOSYS, "libcuda.so.1 is too old: CUDA 11.7 or later is needed");
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
    };
    find("cuInit", init);
    find("cuGetErrorString", error_text);
    find("cuDeviceGetCount", count_devices);
    find("cuDeviceGet", get_device);
    find("cuDeviceGetAttribute", get_attribute);
    find("cuDevicePrimaryCtxRetain", retain);
    find("cuDevicePrimaryCtxRelease_v2", release);
    find("cuCtxPushCurrent_v2", enter);
    find("cuCtxPopCurrent_v2", leave);
    find("cuStreamCreate", create_stream);
    find("cuStreamDestroy_v2", destroy_stream);
    find("cuStreamSynchronize", synchronize);
    find("cuMemcpyAsync", copy);
    find("cuMemGetAllocationGranularity", get_granularity);
    find("cuMemCreate", create);
    find("cuMemRelease", drop);
    find("cuMemExportToShareableHandle", export_file);
    find("cuMemImportFromShareableHandle", import_file);
    find("cuMemAddressReserve", reserve);
    find("cuMemAddressFree", free);
    find("cuMemMap", map);
    find("cuMemUnmap", unmap);
    find("cuMemSetAccess", set_access);
    find("cuMemGetHandleForAddressRange", export_range);
  }

  int (*init)(unsigned flags);
  int (*error_text)(int code, const char** text);
  int (*count_devices)(int* count);
  int (*get_device)(int* device, int ordinal);
  int (*get_attribute)(int* value, int attribute, int device);
  int (*retain)(void** context, int device);
  int (*release)(int device);
  int (*enter)(void* context);
  int (*leave)(void** context);
  int (*create_stream)(void** stream, unsigned flags);
  int (*destroy_stream)(void* stream);
  int (*synchronize)(void* stream);
  int (*copy)(Pointer to, Pointer from, std::size_t length, void* stream);
  int (*get_granularity)(std::size_t* granularity, const AllocationProperties* properties, int option);
  int (*create)(Allocation* made, std::size_t length, const AllocationProperties* properties, unsigned long long flags);
  int (*drop)(Allocation allocation);
  int (*export_file)(void* file, Allocation allocation, int type, unsigned long long flags);
  int (*import_file)(Allocation* allocation, void* file, int type);
  int (*reserve)(Pointer* at, std::size_t length, std::size_t alignment, Pointer wanted, unsigned long long flags);
  int (*free)(Pointer at, std::size_t length);
  int (*map)(Pointer at, std::size_t length, std::size_t offset, Allocation allocation, unsigned long long flags);
  int (*unmap)(Pointer at, std::size_t length);
  int (*set_access)(Pointer at, std::size_t length, const Access* access, std::size_t count);
  int (*export_range)(void* file, Pointer at, std::size_t length, int type, unsigned long long flags);
};

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
