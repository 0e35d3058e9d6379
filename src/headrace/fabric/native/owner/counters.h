// Imm counters: what arrived here, over every NIC and lane of every device that counts with them. Owns the slots; knows
// neither peers nor pages. Any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "errors.h"
#include "events.h"

namespace headrace::fabric {

class ImmCounters {
 public:
  struct Counts {
    std::uint64_t num_armed = 0;
    std::uint64_t num_arrivals = 0;
    std::uint64_t num_surplus = 0;
  };

  explicit ImmCounters(std::shared_ptr<EventQueue> events)
      : events_(std::move(events)), slots_(std::size_t{1} << kSlotBits) {}

  void arm(std::uint32_t imm, std::uint64_t expected) {
    const std::lock_guard guard(mutex_);
    auto& slot = slots_[imm & kSlotMask];
    if (slot) throw InputError("imm", "slot " + std::to_string(imm & kSlotMask) + " is armed; disarm it first");
    if (expected == 0) throw InputError("expected", "must be at least 1");
    slot = Counter{.imm = imm, .expected = expected, .arrivals = 0};
    ++counts_.num_armed;
  }

  void retarget(std::uint32_t imm, std::uint64_t expected, std::uint64_t now_ns) {
    const std::lock_guard guard(mutex_);
    auto& slot = slots_[imm & kSlotMask];
    if (!slot || slot->imm != imm) throw InputError("imm", std::to_string(imm) + " is not armed");
    slot->expected = expected;
    if (slot->arrivals == expected) events_->append(Reached{imm, expected, now_ns});
    if (slot->arrivals > expected) events_->append(Surplus{imm, slot->arrivals, true});
  }

  void disarm(std::uint32_t imm) {
    const std::lock_guard guard(mutex_);
    auto& slot = slots_[imm & kSlotMask];
    if (!slot || slot->imm != imm) return;
    slot.reset();
    --counts_.num_armed;
  }

  void arrived(std::uint32_t imm, std::uint64_t count, std::uint64_t now_ns) {
    const std::lock_guard guard(mutex_);
    for (; count > 0; --count) count_one(imm, now_ns);
  }

  Counts counts() const {
    const std::lock_guard guard(mutex_);
    return counts_;
  }

 private:
  void count_one(std::uint32_t imm, std::uint64_t now_ns) {
    ++counts_.num_arrivals;
    auto& slot = slots_[imm & kSlotMask];
    if (!slot || slot->imm != imm) {
      ++counts_.num_surplus;
      events_->append(Surplus{imm, 1, false});
      return;
    }
    ++slot->arrivals;
    if (slot->arrivals == slot->expected) events_->append(Reached{imm, slot->arrivals, now_ns});
    if (slot->arrivals > slot->expected) {
      ++counts_.num_surplus;
      events_->append(Surplus{imm, slot->arrivals, true});
    }
  }

  static constexpr unsigned kSlotBits = 12;  // interface.IMM_SLOT_BITS
  static constexpr std::uint32_t kSlotMask = (std::uint32_t{1} << kSlotBits) - 1;

  struct Counter {
    std::uint32_t imm;
    std::uint64_t expected;
    std::uint64_t arrivals;
  };

  const std::shared_ptr<EventQueue> events_;
  mutable std::mutex mutex_;
  std::vector<std::optional<Counter>> slots_;
  Counts counts_;
};

}  // namespace headrace::fabric
