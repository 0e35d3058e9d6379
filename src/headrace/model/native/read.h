// How fast memory is read: the bound of a decode step, which reads every weight once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headrace::model {

// All of it in order, `passes` times -> bytes per second of the fastest pass.
double read(const std::uint8_t* bytes, std::size_t count, int passes);

}  // namespace headrace::model
