// The TCP connections behind a wait fd. Knows no libfabric; reads Linux's view of the epoll sets. Owner thread only.
#pragma once

#include <vector>

namespace headrace::fabric {

// Every connected internet socket in the epoll set `wait_fd` and in the sets within it.
std::vector<int> connected_sockets(int wait_fd);

}  // namespace headrace::fabric
