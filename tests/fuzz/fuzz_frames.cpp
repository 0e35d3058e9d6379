// What comes over a control connection, in pieces and with files: whole frames are told, anything else ends it, and
// every file is closed.
//
//     u8 wire, then pieces: u8 length, u8 number of files, bytes
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "control/control_socket.h"
#include "fuzzed.h"

namespace {

using headrace::fabric::ControlSocket;
using headrace::fabric::Fd;
using headrace::fabric::Frame;
using headrace::fabric::FrameKind;
using headrace::fabric::Wire;

constexpr std::size_t kMostFiles = 4;

void send_piece(int socket, std::span<const std::byte> bytes, std::size_t num_files, int file) {
  iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int) * kMostFiles)> space{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (num_files > 0) {
    message.msg_control = space.data();
    message.msg_controllen = CMSG_SPACE(sizeof(int) * num_files);
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int) * num_files);
    for (std::size_t i = 0; i < num_files; ++i) std::memcpy(CMSG_DATA(rights) + i * sizeof file, &file, sizeof file);
  }
  ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

// The lowest number that is free: a leak raises it.
int next_file() {
  const Fd probe(::fcntl(0, F_DUPFD_CLOEXEC, 0));
  return probe.get();
}

bool read_all(ControlSocket& socket, Wire wire) {
  while (true) {
    Frame frame;
    const auto read = socket.read(frame);
    if (read != ControlSocket::Read::frame) return read == ControlSocket::Read::nothing;
    require(frame.kind >= FrameKind::hello && frame.kind <= FrameKind::beat);
    const bool brings = (is_local(wire) && frame.kind == FrameKind::welcome) ||
                        (wire == Wire::local && frame.kind == FrameKind::opened);
    require(frame.fds.size() == (is_local(wire) && frame.kind == FrameKind::hello ? 2 : brings ? 1 : 0));
    for (const Fd& each : frame.fds) require(::fcntl(each.get(), F_GETFD) == FD_CLOEXEC);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const int file = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  Fuzzed fuzzed(data, size);
  const Wire wire = std::array{Wire::local, Wire::tcp, Wire::shm}[fuzzed.take<std::uint8_t>() % 3];
  const int before = next_file();
  {
    std::array<int, 2> ends{};
    const int kind = is_local(wire) ? SOCK_SEQPACKET : SOCK_STREAM;
    require(::socketpair(AF_UNIX, kind | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) == 0);
    const Fd theirs(ends[0]);
    ControlSocket ours(wire, Fd(ends[1]));
    for (bool lives = true; lives && !fuzzed.empty();) {
      const std::size_t length = fuzzed.take<std::uint8_t>();
      const std::size_t num_files = fuzzed.take<std::uint8_t>() % (kMostFiles + 1);
      const auto bytes = fuzzed.bytes(length);
      send_piece(theirs.get(), bytes, is_local(wire) ? num_files : 0, file);
      lives = read_all(ours, wire);
    }
  }
  require(next_file() == before);
  return 0;
}
