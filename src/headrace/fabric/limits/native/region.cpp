#include "region.h"

#include "errors.h"

namespace headrace::fabric::limits {
namespace {

constexpr std::size_t kSmallPage = 4096;

}  // namespace

Offsets to_offsets(const std::string& field, std::span<const std::int64_t> told, std::size_t page_bytes,
                   std::size_t length) {
  if (page_bytes < 1 || page_bytes > length)
    throw InputError("page_bytes", "must be in [1, " + std::to_string(length) + "], is " + std::to_string(page_bytes));
  const auto last = static_cast<std::int64_t>(length - page_bytes);
  Offsets offsets;
  offsets.reserve(told.size());
  for (const std::int64_t offset : told) {
    if (offset < 0 || offset > last)
      throw InputError(field, "must be in [0, " + std::to_string(last) + "], one is " + std::to_string(offset));
    offsets.push_back(static_cast<std::size_t>(offset));
  }
  return offsets;
}

Region::Region(int fd, std::size_t length) : mapping_(fd, length) {
  // Atomic, since somebody else may be writing there.
  for (std::size_t at = 0; at < length; at += kSmallPage)
    __atomic_fetch_or(reinterpret_cast<std::uint8_t*>(data() + at), 0, __ATOMIC_RELAXED);
}

}  // namespace headrace::fabric::limits
