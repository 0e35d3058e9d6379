#include "nics/sockets.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <string>

namespace headrace::fabric {
namespace {

constexpr int kIdleSeconds = 5;
constexpr int kQuestions = 5;  // without an answer, one a second

bool is_connected(int fd) {
  sockaddr_storage peer{};
  socklen_t length = sizeof peer;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0) return false;
  return peer.ss_family == AF_INET || peer.ss_family == AF_INET6;
}

}  // namespace

std::optional<std::vector<int>> connected_sockets(int wait_fd) {
  std::vector<int> found;
  std::vector<int> open{wait_fd};
  std::set<int> seen;
  while (!open.empty()) {
    const int fd = open.back();
    open.pop_back();
    if (!seen.insert(fd).second) continue;
    if (is_connected(fd)) found.push_back(fd);
    std::ifstream info("/proc/self/fdinfo/" + std::to_string(fd));  // an epoll set lists its members as "tfd: N ..."
    if (!info) return std::nullopt;
    for (std::string line; std::getline(info, line);)
      if (line.starts_with("tfd:")) open.push_back(std::stoi(line.substr(4)));
  }
  return found;
}

void keep_alive(int wait_fd) {
  const auto sockets = connected_sockets(wait_fd);
  for (const int fd : sockets.value_or(std::vector<int>())) {
    const auto set = [fd](int level, int option, int value) { ::setsockopt(fd, level, option, &value, sizeof value); };
    set(IPPROTO_TCP, TCP_KEEPIDLE, kIdleSeconds);
    set(IPPROTO_TCP, TCP_KEEPINTVL, 1);
    set(IPPROTO_TCP, TCP_KEEPCNT, kQuestions);
    set(SOL_SOCKET, SO_KEEPALIVE, 1);
  }
}

std::optional<std::vector<Connection>> connections(int wait_fd) {
  const auto sockets = connected_sockets(wait_fd);
  if (!sockets) return std::nullopt;
  std::vector<Connection> found;
  for (const int fd : *sockets) {
    struct stat status{};
    tcp_info info{};
    socklen_t length = sizeof info;
    int num_waiting = 0;
    // In this order: what comes in meanwhile makes the bytes taken look fewer, never more.
    if (::fstat(fd, &status) != 0 || ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0 ||
        ::ioctl(fd, FIONREAD, &num_waiting) != 0)
      return std::nullopt;
    const std::uint64_t received = info.tcpi_bytes_received;
    const std::uint64_t waiting = std::min(static_cast<std::uint64_t>(num_waiting), received);
    found.push_back({.identity = status.st_ino, .num_bytes_received = received, .num_bytes_taken = received - waiting});
  }
  return found;
}

}  // namespace headrace::fabric
