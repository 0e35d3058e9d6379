// Python's records (headrace.fabric.interface) read into native ones. Runs under the GIL, in the caller's thread; what
// is wrong in shape is refused here, what is wrong in place by the owner.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "owner/owner.h"
#include "transfers.h"

namespace headrace::fabric {

constexpr std::array<std::string_view, 4> kAddressings = {"offset", "virtual", "mapped", "cuda"};  // by Addressing

constexpr std::int64_t kMaxInt = std::numeric_limits<std::int64_t>::max();

// `value` when it lies in [low, high], else InputError names `field`.
std::int64_t within(const std::string& field, std::int64_t value, std::int64_t low, std::int64_t high = kMaxInt);
std::uint32_t to_imm(std::int64_t imm);

PageWrites to_page_writes(nanobind::handle record);
PageWrites to_page_reads(nanobind::handle record);
LastWrite to_last_write(nanobind::handle record);
Descriptor to_descriptor(nanobind::handle record);

}  // namespace headrace::fabric
