// Imm counters: what arrived here. Owns the slots; knows neither peers nor pages. Owner thread only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "errors.h"
#include "events.h"

namespace headrace::fabric {

class ImmCounters {
 public:
  explicit ImmCounters(EventQueue& events) : events_(events), slots_(std::size_t{1} << kSlotBits) {}

  void arm(std::uint32_t imm, std::uint64_t expected) {
    auto& slot = slots_[imm & kSlotMask];
    if (slot) throw InputError("imm", "slot " + std::to_string(imm & kSlotMask) + " is armed; disarm it first");
    if (expected == 0) throw InputError("expected", "must be at least 1");
    slot = Counter{.imm = imm, .expected = expected, .arrivals = 0};
    ++num_armed_;
  }

  void retarget(std::uint32_t imm, std::uint64_t expected, std::uint64_t now_ns) {
    auto& slot = slots_[imm & kSlotMask];
    if (!slot || slot->imm != imm) throw InputError("imm", std::to_string(imm) + " is not armed");
    slot->expected = expected;
    if (slot->arrivals == expected) events_.append(Reached{imm, expected, now_ns});
    if (slot->arrivals > expected) events_.append(Surplus{imm, slot->arrivals, true});
  }

  void disarm(std::uint32_t imm) {
    auto& slot = slots_[imm & kSlotMask];
    if (!slot || slot->imm != imm) return;
    slot.reset();
    --num_armed_;
  }

  void arrived(std::uint32_t imm, std::uint64_t now_ns) {
    ++num_arrivals;
    auto& slot = slots_[imm & kSlotMask];
    if (!slot || slot->imm != imm) {
      ++num_surplus;
      events_.append(Surplus{imm, 1, false});
      return;
    }
    ++slot->arrivals;
    if (slot->arrivals == slot->expected) events_.append(Reached{imm, slot->arrivals, now_ns});
    if (slot->arrivals > slot->expected) {
      ++num_surplus;
      events_.append(Surplus{imm, slot->arrivals, true});
    }
  }

  std::uint64_t num_armed() const { return num_armed_; }

  std::uint64_t num_arrivals = 0;
  std::uint64_t num_surplus = 0;

 private:
  static constexpr unsigned kSlotBits = 12;  // interface.IMM_SLOT_BITS
  static constexpr std::uint32_t kSlotMask = (std::uint32_t{1} << kSlotBits) - 1;

  struct Counter {
    std::uint32_t imm;
    std::uint64_t expected;
    std::uint64_t arrivals;
  };

  EventQueue& events_;
  std::vector<std::optional<Counter>> slots_;
  std::uint64_t num_armed_ = 0;
};

}  // namespace headrace::fabric
