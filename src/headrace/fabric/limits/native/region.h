// A mapped memory whose every page is present, and places in it. Knows neither links nor Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "memory/memory.h"

namespace headrace::fabric::limits {

// Byte offsets, checked: a page at each of them lies within the memory that they were checked against.
using Offsets = std::vector<std::size_t>;

Offsets to_offsets(const std::string& field, std::span<const std::int64_t> told, std::size_t page_bytes,
                   std::size_t length);

class Region {
 public:
  // Maps the file and touches all of it for writing, changing nothing: no loop meets a page fault.
  Region(int fd, std::size_t length);

  std::byte* data() const { return mapping_.data(); }
  std::size_t length() const { return mapping_.length(); }

 private:
  Mapping mapping_;
};

}  // namespace headrace::fabric::limits
