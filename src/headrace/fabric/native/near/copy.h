// Copies into memory that another process will read: past our caches, where that pays. Knows nothing but bytes.
#pragma once

#include <cstddef>

namespace headrace::fabric {

// The ranges must not overlap. What was copied is seen by others after the next `copy_fence` and a store.
void copy_out(std::byte* to, const std::byte* from, std::size_t length);
void copy_fence();

}  // namespace headrace::fabric
