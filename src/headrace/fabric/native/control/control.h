// The control thread: it watches peers by their heartbeats, introduces fabrics of one host to each other, hands them
// each other's memory, and takes it back. Owns the control socket, its connections, who has which of our memory mapped,
// and pidfds; knows neither peers nor writes. It tells the owner what happened by `ControlEvents`, on its own thread,
// which nothing else can hold up: a peer that is silent for `silence` is stopped, or cut off.
//
// A connection belongs to the side that dials: it writes. Access to memory ends when every process that opened it has
// said that it unmapped it, or has exited: a closed socket alone proves nothing (a child may hold it open, or not).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "control/control_socket.h"
#include "control/lane.h"
#include "events.h"
#include "fds.h"

namespace headrace::fabric {

// Whoever is at the other end of a connection.
struct Process {
  pid_t number = 0;
  std::shared_ptr<const Fd> ends{};  // readable once it has exited; a pidfd
};

// Called on the control thread, which holds no lock then.
class ControlEvents {
 public:
  virtual ~ControlEvents() = default;
  // Of a connection that we dialled.
  virtual void linked(std::uint64_t link, Process there, Fd bell) = 0;
  // `told`: the memory's length, or a token.
  virtual void opened(std::uint64_t link, std::uint64_t key, Fd memory, std::uint64_t told) = 0;
  virtual void denied(std::uint64_t link, std::uint64_t key) = 0;
  virtual void close_asked(std::uint64_t link, std::uint64_t key) = 0;  // unmap it, then `confirm_closed`
  virtual void silent(std::uint64_t link) = 0;
  virtual void heard(std::uint64_t link) = 0;  // again
  virtual void lost(std::uint64_t link, int code, const std::string& text) = 0;
  // Of a connection that was dialled to us.
  virtual void lane_came(std::uint64_t lane, std::shared_ptr<InLane> in, Fd bell) = 0;
  virtual void lane_left(std::uint64_t lane) = 0;
  // Where there is no file to be handed over: `answer` it.
  virtual void open_asked(std::uint64_t lane, std::uint64_t key, std::uint64_t token, pid_t process) = 0;
  // Nobody has the memory of `key` mapped any more.
  virtual void access_ended(std::uint64_t key) = 0;
};

class Control {
 public:
  // Listens at once, and says where in `name`. `bell` wakes our owner, for those of this host; it and the memory that
  // is given stay open as long as we live. Throws FabricError.
  Control(Wire wire, std::string& name, int bell, std::uint64_t silence_ns, ControlEvents& events);
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  // From the owner's thread. Links are numbered by the caller. Over TCP there is no lane.
  void dial(std::uint64_t link, const std::string& name, Fd lane);
  void open(std::uint64_t link, std::uint64_t key, std::uint64_t token);
  void answer(std::uint64_t lane, std::uint64_t key, std::uint64_t token);  // 0: denied
  void confirm_closed(std::uint64_t link, std::uint64_t key);
  void hang_up(std::uint64_t link);  // what was open there is unmapped
  void allow(std::uint64_t key, int memory_fd, std::uint64_t length);
  void withdraw(std::uint64_t key);  // `access_ended` follows
  void drop_lane(std::uint64_t lane);

  // Ends the thread; the owner has stopped writing. Peers are told.
  void stop();

 private:
  struct Connection {
    ControlSocket socket;
    std::string host{};  // where it came from, over TCP
    Process process{};
    std::shared_ptr<InLane> lane{};
    bool dialled = false;
    bool greeted = false;
    bool over = false;  // the socket is; the process may live on with our memory mapped
    bool silent = false;
    std::uint64_t heard_at = 0;
  };
  struct Grant {
    int memory_fd = -1;
    std::uint64_t length = 0;
    std::set<std::uint64_t> holders;  // connections
    bool withdrawn = false;
  };

  void command(std::function<void()> act);
  void run_commands();
  void run();
  void wait();
  void accept_all();
  bool has_room(const std::string& host) const;
  std::uint64_t patience(const Connection& connection) const;
  void read_some(std::uint64_t id);
  bool handle(std::uint64_t id, Connection& from, Frame& frame);
  bool handle_dialled(std::uint64_t id, Connection& from, Frame& frame);
  bool greet(std::uint64_t id, Connection& from, Frame& frame);
  void answer_open(std::uint64_t id, Connection& from, std::uint64_t key);
  void end(std::uint64_t id, int code, const std::string& text);
  bool may_open(std::uint64_t key) const;
  void let_go(std::uint64_t id);
  void let_go(std::uint64_t id, std::uint64_t key);
  void drop_finished();
  bool holds_any(std::uint64_t id) const;
  void beat();

  const Wire wire_;
  const std::uint64_t silence_;
  const std::uint64_t pause_;  // between beats
  std::uint64_t next_beat_ = 0;
  ControlEvents& events_;
  const int bell_;
  Fd listener_;
  EventFd wake_;
  std::map<std::uint64_t, Connection> connections_;  // dialled: by link; come: by numbers above kFirstLane
  std::map<std::uint64_t, Grant> grants_;
  std::vector<std::uint64_t> active_;
  std::uint64_t next_lane_ = kFirstLane;
  bool full_ = false;  // no room for another connection: accept again later

  std::mutex mutex_;  // commands_
  std::vector<std::function<void()>> commands_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;

  static constexpr std::uint64_t kFirstLane = std::uint64_t{1} << 32;
};

}  // namespace headrace::fabric
