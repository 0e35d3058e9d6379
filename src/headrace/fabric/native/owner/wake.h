// How other threads wake the owner: the layer counter and a bell that is rung only when the owner sleeps.
// `raise` and `knock` may come from any thread, the rest from the owner.
//
// No wake-up is lost: the caller stores (counter or command) and then looks whether the owner sleeps; the owner says
// that it sleeps and then looks at counter and commands. All four are sequentially consistent, so one of the two sees
// the other. (Fences would do as well; thread sanitizers do not understand them.)
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>

#include "events.h"

namespace headrace::fabric {

class Doorbell {
 public:
  static constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

  void raise(std::uint64_t counter) {
    std::uint64_t seen = layers_.load();
    while (seen < counter && !layers_.compare_exchange_weak(seen, counter)) {
    }
    if (counter >= wake_at_.load() && wake_at_.exchange(kNever) != kNever) bell_.ring();
  }
  std::uint64_t layers() const { return layers_.load(); }

  void knock() {
    if (asleep_.load() && asleep_.exchange(false)) bell_.ring();
  }

  // From here on whoever raises the counter to `gate`, or knocks, rings. Look at both once more before sleeping.
  void lie_down(std::uint64_t gate) {
    wake_at_.store(gate);
    asleep_.store(true);
  }
  void get_up() {
    wake_at_.store(kNever);
    asleep_.store(false);
    bell_.clear();
  }

  int fd() const { return bell_.fd(); }

 private:
  std::atomic<std::uint64_t> layers_{0};
  std::atomic<std::uint64_t> wake_at_{kNever};
  std::atomic<bool> asleep_{false};
  EventFd bell_;
};

}  // namespace headrace::fabric
