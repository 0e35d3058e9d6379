// What a loop took: time on the wall and processor time of the whole process, threads of a provider included.
#pragma once

#include <time.h>

#include <cstdint>

#include "clock.h"

namespace headrace::fabric::limits {

struct Spent {
  std::uint64_t ns = 0;
  std::uint64_t cpu_ns = 0;
};

class Stopwatch {
 public:
  Spent read() const { return {.ns = now_ns() - began_.ns, .cpu_ns = cpu_ns() - began_.cpu_ns}; }

 private:
  static std::uint64_t cpu_ns() {
    timespec used{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return static_cast<std::uint64_t>(used.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(used.tv_nsec);
  }

  Spent began_{.ns = now_ns(), .cpu_ns = cpu_ns()};
};

}  // namespace headrace::fabric::limits
