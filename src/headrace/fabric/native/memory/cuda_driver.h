// Never run on a device: what is used of the CUDA driver, whose header is not needed to build. Names and layouts are
// those of its cuda.h, from CUDA 11.7 on. Owns the library for as long as the process lives.
#pragma once

#include <dlfcn.h>

#include <cerrno>
#include <cstddef>
#include <string>
#include <type_traits>

#include "errors.h"

namespace headrace::fabric::cuda {

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

struct Driver {
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

}  // namespace headrace::fabric::cuda
