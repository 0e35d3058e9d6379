#include "memory/memory.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "errors.h"

namespace headrace::fabric {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

[[noreturn]] void fail(const char* call) { throw FabricError(call, errno, std::strerror(errno)); }

void require_file_of(int fd, std::size_t length) {
  struct stat status{};
  if (::fstat(fd, &status) != 0)
    throw InputError("memory_fd", std::string("not an open file: ") + std::strerror(errno));
  if (length == 0) throw InputError("length", "must be at least 1 byte");
  // A mapping beyond the file's end would answer a peer's write with SIGBUS.
  if (static_cast<std::size_t>(status.st_size) < length)
    throw InputError("length",
                     "the memory has " + std::to_string(status.st_size) + " bytes, not " + std::to_string(length));
}

}  // namespace

Mapping::Mapping(int fd, std::size_t length, std::shared_ptr<CudaDevice> device)
    : length_(length), device_(std::move(device)) {
  if (device_) {
    data_ = device_->map(fd, length);
    return;
  }
  require_file_of(fd, length);
  void* reserved = ::mmap(nullptr, length + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) fail("mmap(reserve)");
  auto* begin = static_cast<std::byte*>(reserved);
  const std::size_t head = (kHugePage - reinterpret_cast<std::uintptr_t>(begin) % kHugePage) % kHugePage;
  void* mapped = ::mmap(begin + head, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  if (mapped == MAP_FAILED) {
    const int code = errno;
    ::munmap(reserved, length + kHugePage);
    if (code == EACCES) throw InputError("memory_fd", "must be open for reading and writing");
    errno = code;
    fail("mmap(memory_fd)");
  }
  data_ = static_cast<std::byte*>(mapped);
  if (head > 0) ::munmap(begin, head);
  const std::size_t page = 4096;
  const std::size_t used = (length + page - 1) / page * page;
  const std::size_t tail = length + kHugePage - head;
  if (tail > used) ::munmap(data_ + used, tail - used);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      length_(std::exchange(other.length_, 0)),
      device_(std::move(other.device_)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(length_, other.length_);
  std::swap(device_, other.device_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ == nullptr) return;
  if (device_) {
    device_->unmap(data_, length_);
  } else {
    ::munmap(data_, length_);
  }
}

void Mapping::detach() {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
  if (::mmap(data_, length_, PROT_READ | PROT_WRITE, kFlags, -1, 0) == MAP_FAILED) fail("mmap(revoke)");
}

void Mapping::discard() { ::madvise(data_, length_, MADV_DONTNEED); }

}  // namespace headrace::fabric
