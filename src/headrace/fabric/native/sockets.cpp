#include "sockets.h"

#include <sys/socket.h>

#include <fstream>
#include <set>
#include <string>

namespace headrace::fabric {
namespace {

bool is_connected(int fd) {
  sockaddr_storage peer{};
  socklen_t length = sizeof peer;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0) return false;
  return peer.ss_family == AF_INET || peer.ss_family == AF_INET6;
}

}  // namespace

std::vector<int> connected_sockets(int wait_fd) {
  std::vector<int> found;
  std::vector<int> open{wait_fd};
  std::set<int> seen;
  while (!open.empty()) {
    const int fd = open.back();
    open.pop_back();
    if (!seen.insert(fd).second) continue;
    if (is_connected(fd)) found.push_back(fd);
    std::ifstream info("/proc/self/fdinfo/" + std::to_string(fd));  // an epoll set lists its members as "tfd: N ..."
    for (std::string line; std::getline(info, line);)
      if (line.starts_with("tfd:")) open.push_back(std::stoi(line.substr(4)));
  }
  return found;
}

}  // namespace headrace::fabric
