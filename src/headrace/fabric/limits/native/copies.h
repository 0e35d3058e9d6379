// The bare copy loop between two mapped memories: one thread, one page after the other, nothing else.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "region.h"
#include "spent.h"

namespace headrace::fabric::limits {

// `copy` copies one page, and others see it before they see any later store. The ranges must not overlap.
struct CopyMethod {
  const char* name;
  void (*copy)(std::byte* to, const std::byte* from, std::size_t length);
};

// Those that this CPU has: non-temporal stores, the widest first, and plain memcpy last.
const std::vector<CopyMethod>& copy_methods();

class CopyLoop {
 public:
  CopyLoop(int src_fd, std::size_t src_length, int dst_fd, std::size_t dst_length)
      : src_(src_fd, src_length), dst_(dst_fd, dst_length) {}

  // Page i from src_offsets[i] to dst_offsets[i], in that order.
  Spent copy(std::span<const std::int64_t> src_offsets, std::span<const std::int64_t> dst_offsets,
             std::size_t page_bytes, const std::string& method) const;

 private:
  Region src_;
  Region dst_;
};

}  // namespace headrace::fabric::limits
