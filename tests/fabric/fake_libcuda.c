// A CUDA driver made of memory files: as much of libcuda.so.1 as native/memory/cuda.cpp uses. An allocation is a memfd,
// mapping it maps the file, access is mprotect's, and copies wait in their stream until it is synchronised: whoever
// looks before finds nothing, as on a device. Sizes, ranges and order are checked more strictly than by the driver's
// own.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { kGranularity = 2 << 20, kMany = 256, kInvalid = 1, kNoContext = 201 };

typedef unsigned long long Handle;
typedef struct {
  Handle at;
  size_t length;
  int mapped;
} Range;
typedef struct {
  void* to;
  const void* from;
  size_t length;
} Copy;

typedef struct {
  Copy copies[1 << 12];
  int num_copies;
  int made;
} Stream;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;  // ranges, streams
static Range ranges[kMany];
static Stream streams[kMany];
static _Atomic int num_handles, num_contexts, num_streams;
static __thread int depth;  // of pushed contexts

// What is left, for the tests.
int fake_num_ranges(void) {
  int count = 0;
  for (int i = 0; i < kMany; ++i) count += ranges[i].at != 0;
  return count;
}
int fake_num_handles(void) { return num_handles; }
int fake_num_contexts(void) { return num_contexts + num_streams; }
int fake_num_pending(void) {
  int count = 0;
  for (int i = 0; i < kMany; ++i) count += streams[i].num_copies;
  return count;
}
int fake_depth(void) { return depth; }

static Range* range_of(Handle at, size_t length) {
  for (int i = 0; i < kMany; ++i)
    if (ranges[i].at == at && ranges[i].length == length) return &ranges[i];
  return NULL;
}

int cuInit(unsigned flags) { return flags == 0 ? 0 : kInvalid; }
int cuGetErrorString(int code, const char** text) {
  *text = code == kInvalid ? "invalid argument" : code == kNoContext ? "invalid device context" : "unknown error";
  return 0;
}
int cuDeviceGetCount(int* count) { return *count = 2, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = device == 0 ? 1 : attribute != 103;  // the second one cannot share its memory
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  (void)device;
  ++num_contexts;
  return *context = &num_contexts, 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
  (void)device;
  --num_contexts;
  return 0;
}
int cuCtxPushCurrent_v2(void* context) { return context == &num_contexts ? (++depth, 0) : kInvalid; }
int cuCtxPopCurrent_v2(void** context) { return depth > 0 ? (--depth, *context = &num_contexts, 0) : kNoContext; }

int cuStreamCreate(void** stream, unsigned flags) {
  if (depth == 0 || flags != 1) return depth == 0 ? kNoContext : kInvalid;
  Stream* made = NULL;
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < kMany && made == NULL; ++i)
    if (!streams[i].made) made = &streams[i];
  made->made = 1;
  pthread_mutex_unlock(&mutex);
  ++num_streams;
  return *stream = made, 0;
}
int cuStreamDestroy_v2(void* stream) {
  ((Stream*)stream)->made = 0;
  --num_streams;
  return 0;
}
int cuStreamSynchronize(void* opaque) {
  Stream* stream = opaque;
  if (stream->num_copies > 0) usleep(20000);  // long enough for a source to be reused too early
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < stream->num_copies; ++i)
    memcpy(stream->copies[i].to, stream->copies[i].from, stream->copies[i].length);
  stream->num_copies = 0;
  pthread_mutex_unlock(&mutex);
  return 0;
}
int cuMemcpyAsync(Handle to, Handle from, size_t length, void* opaque) {
  Stream* stream = opaque;
  if (depth == 0) return kNoContext;
  if (stream->num_copies == 1 << 12) return kInvalid;
  if (length == 1 << 20) usleep(1000);  // a slice of a long write, which can then be given up in the middle
  pthread_mutex_lock(&mutex);
  stream->copies[stream->num_copies++] = (Copy){(void*)to, (const void*)from, length};
  pthread_mutex_unlock(&mutex);
  return 0;
}
// Unmapping what a copy is still to touch is undefined; here it is refused.
static int is_used(const Range* range) {
  for (int i = 0; i < kMany; ++i) {
    for (int j = 0; j < streams[i].num_copies; ++j) {
      const Copy* copy = &streams[i].copies[j];
      if ((Handle)copy->to - range->at < range->length || (Handle)copy->from - range->at < range->length) return 1;
    }
  }
  return 0;
}

int cuMemGetAllocationGranularity(size_t* granularity, const int* properties, int option) {
  (void)properties;
  return *granularity = kGranularity, option == 0 ? 0 : kInvalid;
}
int cuMemCreate(Handle* made, size_t length, const int* properties, unsigned long long flags) {
  if (length == 0 || length % kGranularity != 0 || flags != 0 || properties[0] != 1 || properties[1] != 1)
    return kInvalid;
  const int fd = memfd_create("headrace-fake-cuda", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, (off_t)length) != 0) return 2;
  ++num_handles;
  return *made = (Handle)fd, 0;
}
int cuMemRelease(Handle allocation) {
  --num_handles;
  return close((int)allocation);
}
int cuMemExportToShareableHandle(int* file, Handle allocation, int type, unsigned long long flags) {
  *file = fcntl((int)allocation, F_DUPFD_CLOEXEC, 0);
  return *file >= 0 && type == 1 && flags == 0 ? 0 : kInvalid;
}
int cuMemImportFromShareableHandle(Handle* allocation, void* file, int type) {
  struct stat status;
  const int own = fcntl((int)(long)file, F_DUPFD_CLOEXEC, 0);
  if (own < 0 || type != 1 || fstat(own, &status) != 0 || status.st_size % kGranularity != 0) return kInvalid;
  ++num_handles;
  return *allocation = (Handle)own, 0;
}

int cuMemAddressReserve(Handle* at, size_t length, size_t alignment, Handle wanted, unsigned long long flags) {
  if (length == 0 || length % kGranularity != 0 || alignment != 0 || wanted != 0 || flags != 0) return kInvalid;
  void* reserved = mmap(NULL, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  pthread_mutex_lock(&mutex);
  int free = 0;
  while (ranges[free].at != 0) ++free;
  ranges[free] = (Range){(Handle)reserved, length, 0};
  pthread_mutex_unlock(&mutex);
  return *at = (Handle)reserved, reserved == MAP_FAILED ? 2 : 0;
}
int cuMemAddressFree(Handle at, size_t length) {
  Range* range = range_of(at, length);
  if (range == NULL || range->mapped) return kInvalid;
  *range = (Range){0, 0, 0};
  return munmap((void*)at, length);
}
int cuMemMap(Handle at, size_t length, size_t offset, Handle allocation, unsigned long long flags) {
  struct stat status;
  Range* range = range_of(at, length);
  if (range == NULL || range->mapped || offset != 0 || flags != 0) return kInvalid;
  if (fstat((int)allocation, &status) != 0 || (size_t)status.st_size < length) return kInvalid;
  if (mmap((void*)at, length, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)allocation, 0) == MAP_FAILED) return 2;
  return range->mapped = 1, 0;
}
int cuMemUnmap(Handle at, size_t length) {
  Range* range = range_of(at, length);
  pthread_mutex_lock(&mutex);
  const int used = range == NULL || !range->mapped || is_used(range);
  pthread_mutex_unlock(&mutex);
  if (used) return kInvalid;
  mmap((void*)at, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  return range->mapped = 0, 0;
}
int cuMemSetAccess(Handle at, size_t length, const int* access, size_t count) {
  Range* range = range_of(at, length);
  if (range == NULL || !range->mapped || count != 1 || access[0] != 1 || access[2] != 3) return kInvalid;
  return mprotect((void*)at, length, PROT_READ | PROT_WRITE);
}
int cuMemGetHandleForAddressRange(int* file, Handle at, size_t length, int type, unsigned long long flags) {
  (void)file, (void)type, (void)flags;
  return range_of(at, length) == NULL ? kInvalid : 801;
}
