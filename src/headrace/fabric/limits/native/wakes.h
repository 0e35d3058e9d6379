// How long it takes to wake another process and to be woken by it: a word or an eventfd goes to and fro. Owns the
// mapping of the words; the eventfds belong to the caller. One thread in each of the two processes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "region.h"

namespace headrace::fabric::limits {

enum class WakeKind { futex, eventfd, spin };

class WakeLoop {
 public:
  // `kind` is "futex", "eventfd" or "spin", which keeps looking at the word and never sleeps.
  WakeLoop(const std::string& kind, int words_fd, int ping_fd, int pong_fd);

  // See time_rounds.
  std::vector<std::uint64_t> ping(std::size_t num_rounds, std::uint64_t pause_ns);
  // Answers as many rounds as the other side plays.
  void pong(std::size_t num_rounds);

 private:
  void raise(int side);
  void await(int side);
  std::uint32_t* word(int side) const;

  WakeKind kind_;
  Region words_;
  int fds_[2];
  std::uint32_t rounds_[2] = {0, 0};
};

}  // namespace headrace::fabric::limits
