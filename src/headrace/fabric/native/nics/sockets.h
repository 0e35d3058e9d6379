// The TCP connections behind a wait fd. Knows no libfabric; reads Linux's view of the epoll sets. Owner thread only.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace headrace::fabric {

// Every connected internet socket in the epoll set `wait_fd` and in the sets within it. Nothing when that could not be
// read, for want of a free file descriptor say.
std::optional<std::vector<int>> connected_sockets(int wait_fd);

// From now on the kernel asks of each, once it has been idle for some seconds, whether the other side still has it.
void keep_alive(int wait_fd);

// How far one connection has come. The identity, unlike an fd's number, is not given to another.
struct Connection {
  std::uint64_t identity = 0;
  std::uint64_t num_bytes_received = 0;  // by the kernel
  std::uint64_t num_bytes_taken = 0;     // out of the kernel
};

std::optional<std::vector<Connection>> connections(int wait_fd);

}  // namespace headrace::fabric
