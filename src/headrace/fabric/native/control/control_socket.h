// Frames between two fabrics: of one host over an abstract Unix socket, which carries open files too, else over TCP.
// Owns one socket each; blocks nowhere.
//
//     dialler (it writes)              listener (its memory is written)
//     hello     lane, bell   ->        a lane of ours, and what wakes us
//               bell         <-        welcome
//     open      key          ->
//                            <-        opened: the memory, its length      | denied
//                            <-        close: let go of the memory of `key`
//     closed    key          ->        it is unmapped, nothing lands any more
//     bye                    ->        likewise, of every key
//     beat                   <->       still alive
//
// Where memory is reached through endpoints in shared memory, `open` and `opened` bring their tokens instead of a file.
// Over TCP there is no memory to hand over: only hello, welcome, bye and beats, without files.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "fds.h"

namespace headrace::fabric {

enum class FrameKind : std::uint32_t { hello = 1, welcome, open, opened, denied, close, closed, bye, beat };

struct Frame {
  FrameKind kind = FrameKind::hello;
  std::uint64_t key = 0;
  std::uint64_t length = 0;  // or a token
  std::vector<Fd> fds{};
  std::vector<int> lent{};  // sent behind those; they stay open as long as the socket, and cost no file of ours
};

enum class Wire { local, shm, tcp };

inline bool is_local(Wire wire) { return wire != Wire::tcp; }

// What a frame is on the wire, and whether it is one: a known kind with the files that belong to it.
struct FrameHead {
  std::uint32_t magic = 0;
  std::uint32_t kind = 0;
  std::uint64_t key = 0;
  std::uint64_t length = 0;
};
std::optional<FrameKind> known_kind(Wire wire, const FrameHead& head, std::size_t num_fds);

class ControlSocket {
 public:
  enum class Read { frame, nothing, ended };

  ControlSocket(Wire wire, Fd socket) : wire_(wire), socket_(std::move(socket)) {}

  // A listener, and a connection to one. A name is of the abstract name space, or "host:port", both as numbers; a
  // listener at port 0 gets a fresh one: `name` is what peers dial. All throw FabricError, or InputError for a name
  // that cannot be one.
  static Fd listen(Wire wire, std::string& name);
  static Fd dial(Wire wire, const std::string& name);
  // Who has dialled to `listener`; empty, with errno, where nobody has. `host` is where from, over TCP.
  static Fd accept(const Fd& listener, std::string& host);

  int fd() const { return socket_.get(); }
  // Of a local one: whoever is at the other end runs as our user; its pid.
  std::optional<pid_t> trusted_pid() const;

  // `ended`: closed there, broken, or not one of ours.
  Read read(Frame& frame);
  void send(Frame frame);
  // Sends what waited; false once the connection is of no use.
  bool flush();
  std::size_t num_waiting() const { return waiting_.size(); }

 private:
  Read read_local(FrameHead& head, std::vector<Fd>& fds);
  Read read_tcp(FrameHead& head);

  Wire wire_;
  Fd socket_;
  std::deque<Frame> waiting_;
  std::size_t sent_ = 0;  // of the first that waits
  std::array<std::byte, sizeof(FrameHead)> partial_{};
  std::size_t received_ = 0;
};

}  // namespace headrace::fabric
