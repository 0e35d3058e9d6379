// Round trips, timed one by one.
#pragma once

#include <time.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "clock.h"

namespace headrace::fabric::limits {

// The first rounds meet cold caches and a partner that is not there yet: both sides play them, nobody counts them.
constexpr std::size_t kWarmUpRounds = 100;

// The time of each `round`, there and back, in ns. Before each it sleeps `pause_ns`, so that the other has long been
// idle.
template <class Round>
std::vector<std::uint64_t> time_rounds(std::size_t num_rounds, std::uint64_t pause_ns, Round round) {
  const timespec pause{.tv_sec = static_cast<time_t>(pause_ns / 1'000'000'000),
                       .tv_nsec = static_cast<long>(pause_ns % 1'000'000'000)};
  std::vector<std::uint64_t> times(num_rounds + kWarmUpRounds);
  for (std::uint64_t& time : times) {
    if (pause_ns > 0) ::clock_nanosleep(CLOCK_MONOTONIC, 0, &pause, nullptr);
    const std::uint64_t began = now_ns();
    round();
    time = now_ns() - began;
  }
  return {times.begin() + kWarmUpRounds, times.end()};
}

template <class Answer>
void answer_rounds(std::size_t num_rounds, Answer answer) {
  for (std::size_t round = 0; round < num_rounds + kWarmUpRounds; ++round) answer();
}

}  // namespace headrace::fabric::limits
