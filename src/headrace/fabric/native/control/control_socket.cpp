#include "control/control_socket.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>

#include "errors.h"

namespace headrace::fabric {
namespace {

constexpr std::uint32_t kMagic = 0x48524331;  // "HRC1"
constexpr std::size_t kMaxFds = 2;

std::size_t num_fds_of(Wire wire, FrameKind kind) {
  if (wire == Wire::tcp) return 0;
  switch (kind) {
    case FrameKind::hello:
      return 2;
    case FrameKind::welcome:
      return 1;
    case FrameKind::opened:
      return wire == Wire::local ? 1 : 0;
    default:
      return 0;
  }
}

struct Name {
  sockaddr_storage address{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&address); }
};

Name abstract(const std::string& name) {
  sockaddr_un address{};
  if (name.empty() || name.size() >= sizeof address.sun_path)
    throw InputError("address", "a control socket's name must have 1 to 107 bytes");
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  Name made;
  std::memcpy(&made.address, &address, sizeof address);
  made.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return made;
}

// "127.0.0.1:4711" or "::1:4711": the port follows the last colon.
Name internet(const std::string& name) {
  const auto colon = name.rfind(':');
  const std::string host = name.substr(0, colon);
  unsigned port = 0;
  const bool has_port =
      colon != std::string::npos &&
      std::from_chars(name.data() + colon + 1, name.data() + name.size(), port).ptr == name.data() + name.size() &&
      colon + 1 < name.size() && port < 65536;
  Name made;
  sockaddr_in four{
      .sin_family = AF_INET, .sin_port = htons(static_cast<std::uint16_t>(port)), .sin_addr = {}, .sin_zero = {}};
  sockaddr_in6 six{};
  six.sin6_family = AF_INET6;
  six.sin6_port = four.sin_port;
  if (has_port && ::inet_pton(AF_INET, host.c_str(), &four.sin_addr) == 1) {
    std::memcpy(&made.address, &four, made.length = sizeof four);
  } else if (has_port && ::inet_pton(AF_INET6, host.c_str(), &six.sin6_addr) == 1) {
    std::memcpy(&made.address, &six, made.length = sizeof six);
  } else {
    throw InputError("address", "'" + name + "' is not a numeric host and a port");
  }
  return made;
}

Name of(Wire wire, const std::string& name) { return is_local(wire) ? abstract(name) : internet(name); }

[[noreturn]] void fail(const char* call) { throw FabricError(call, errno, std::strerror(errno)); }

Fd open_socket(Wire wire, const Name& name) {
  const int kind = is_local(wire) ? SOCK_SEQPACKET : SOCK_STREAM;
  Fd made(::socket(name.get()->sa_family, kind | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!made) fail("socket(control)");
  const int on = 1;
  if (wire == Wire::tcp) ::setsockopt(made.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return made;
}

}  // namespace

std::optional<FrameKind> known_kind(Wire wire, const FrameHead& head, std::size_t num_fds) {
  const bool known = head.magic == kMagic && head.kind >= static_cast<std::uint32_t>(FrameKind::hello) &&
                     head.kind <= static_cast<std::uint32_t>(FrameKind::beat);
  if (!known) return std::nullopt;
  const auto kind = static_cast<FrameKind>(head.kind);
  return num_fds == num_fds_of(wire, kind) ? std::optional(kind) : std::nullopt;
}

Fd ControlSocket::listen(Wire wire, std::string& name) {
  Name where = of(wire, name);
  auto made = open_socket(wire, where);
  const int on = 1;
  // A successor at a fixed port comes while the connections of its predecessor are still remembered.
  if (wire == Wire::tcp) ::setsockopt(made.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(made.get(), where.get(), where.length) != 0) fail("bind(control socket)");
  if (::listen(made.get(), SOMAXCONN) != 0) fail("listen(control socket)");
  if (wire == Wire::tcp) {
    if (::getsockname(made.get(), where.get(), &where.length) != 0) fail("getsockname(control socket)");
    const auto* four = reinterpret_cast<const sockaddr_in*>(&where.address);  // the port has one place in both
    name = name.substr(0, name.rfind(':') + 1) + std::to_string(ntohs(four->sin_port));
  }
  return made;
}

Fd ControlSocket::dial(Wire wire, const std::string& name) {
  const Name where = of(wire, name);
  auto made = open_socket(wire, where);
  // Between Unix sockets a connection stands at once, or there is nobody, or too many wait.
  if (::connect(made.get(), where.get(), where.length) != 0 && errno != EINPROGRESS) fail("connect(control socket)");
  return made;
}

Fd ControlSocket::accept(const Fd& listener, std::string& host) {
  sockaddr_storage from{};
  socklen_t length = sizeof from;
  Fd made(::accept4(listener.get(), reinterpret_cast<sockaddr*>(&from), &length, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!made) return made;
  const auto take = [&host](const auto& address) {
    host.assign(reinterpret_cast<const char*>(&address), sizeof address);
  };
  if (from.ss_family == AF_INET) take(reinterpret_cast<const sockaddr_in*>(&from)->sin_addr);
  if (from.ss_family == AF_INET6) take(reinterpret_cast<const sockaddr_in6*>(&from)->sin6_addr);
  return made;
}

std::optional<pid_t> ControlSocket::trusted_pid() const {
  ucred who{};
  socklen_t length = sizeof who;
  if (::getsockopt(fd(), SOL_SOCKET, SO_PEERCRED, &who, &length) != 0 || who.uid != ::geteuid()) return std::nullopt;
  return who.pid;
}

ControlSocket::Read ControlSocket::read(Frame& frame) {
  FrameHead head;
  frame.fds.clear();
  const Read got = is_local(wire_) ? read_local(head, frame.fds) : read_tcp(head);
  if (got != Read::frame) return got;
  const auto kind = known_kind(wire_, head, frame.fds.size());
  if (!kind) return Read::ended;
  frame.kind = *kind;
  frame.key = head.key;
  frame.length = head.length;
  return Read::frame;
}

ControlSocket::Read ControlSocket::read_local(FrameHead& head, std::vector<Fd>& fds) {
  iovec part{&head, sizeof head};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int) * kMaxFds)> space{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = space.data();
  message.msg_controllen = space.size();
  const ssize_t count = ::recvmsg(fd(), &message, MSG_CMSG_CLOEXEC);
  if (count < 0) return errno == EAGAIN || errno == EINTR ? Read::nothing : Read::ended;
  for (cmsghdr* each = CMSG_FIRSTHDR(&message); each != nullptr; each = CMSG_NXTHDR(&message, each)) {
    if (each->cmsg_level != SOL_SOCKET || each->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t num_fds = (each->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < num_fds; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(each) + i * sizeof fd, sizeof fd);
      fds.emplace_back(fd);
    }
  }
  const bool cut = (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0;
  return cut || count != static_cast<ssize_t>(sizeof head) ? Read::ended : Read::frame;
}

ControlSocket::Read ControlSocket::read_tcp(FrameHead& head) {
  const ssize_t count = ::recv(fd(), partial_.data() + received_, partial_.size() - received_, 0);
  if (count < 0) return errno == EAGAIN || errno == EINTR ? Read::nothing : Read::ended;
  if (count == 0) return Read::ended;
  received_ += static_cast<std::size_t>(count);
  if (received_ < partial_.size()) return Read::nothing;
  received_ = 0;
  std::memcpy(&head, partial_.data(), sizeof head);
  return Read::frame;
}

void ControlSocket::send(Frame frame) {
  waiting_.push_back(std::move(frame));
  flush();
}

bool ControlSocket::flush() {
  while (!waiting_.empty()) {
    const Frame& frame = waiting_.front();
    FrameHead head{kMagic, static_cast<std::uint32_t>(frame.kind), frame.key, frame.length};
    iovec part{reinterpret_cast<std::byte*>(&head) + sent_, sizeof head - sent_};
    alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int) * kMaxFds)> space{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    std::vector<int> fds;
    for (const Fd& each : frame.fds) fds.push_back(each.get());
    fds.insert(fds.end(), frame.lent.begin(), frame.lent.end());
    if (!fds.empty()) {
      message.msg_control = space.data();
      message.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
      cmsghdr* rights = CMSG_FIRSTHDR(&message);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
      std::memcpy(CMSG_DATA(rights), fds.data(), sizeof(int) * fds.size());
    }
    const ssize_t count = ::sendmsg(fd(), &message, MSG_NOSIGNAL);
    if (count < 0) return errno == EAGAIN || errno == EINTR;
    sent_ += static_cast<std::size_t>(count);
    if (sent_ < sizeof head) continue;
    sent_ = 0;
    waiting_.pop_front();
  }
  return true;
}

}  // namespace headrace::fabric
