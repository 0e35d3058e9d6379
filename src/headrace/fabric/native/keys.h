// Random keys: what opens our memory to a peer, and nobody can guess.
#pragma once

#include <sys/random.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "errors.h"

namespace headrace::fabric {

inline std::uint64_t random_key(std::size_t num_bytes = sizeof(std::uint64_t)) {
  std::uint64_t key = 0;
  if (::getrandom(&key, sizeof key, 0) != sizeof key) throw FabricError("getrandom", errno, std::strerror(errno));
  return num_bytes < sizeof key ? key & ((std::uint64_t{1} << (8 * num_bytes)) - 1) : key;
}

}  // namespace headrace::fabric
