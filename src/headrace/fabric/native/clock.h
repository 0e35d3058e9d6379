// The monotonic clock, in nanoseconds: the same one that Python's time.monotonic_ns reads.
#pragma once

#include <time.h>

#include <cstdint>

namespace headrace::fabric {

inline std::uint64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
}

}  // namespace headrace::fabric
