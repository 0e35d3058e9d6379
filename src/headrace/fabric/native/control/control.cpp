#include "control/control.h"

#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "clock.h"
#include "errors.h"
#include "signals.h"

namespace headrace::fabric {
namespace {

constexpr int kBatch = 64;                        // frames of one connection at a time
constexpr int kBeats = 4;                         // in the time after which a peer is silent
constexpr std::uint64_t kMaxPause = 500'000'000;  // ns between beats, whatever that time is: others rely on it
constexpr int kForgotten = 10;                    // silences, after which who dialled to us over TCP is left
constexpr int kRetryMs = 100;                     // to accept again, when files ran out
constexpr std::size_t kMaxWaiting = 64;           // answers that a connection does not take
constexpr std::size_t kMaxConnections = 4096;
constexpr std::ptrdiff_t kMaxOfOneHost = 256;  // that came over TCP: no stranger takes all the files there are

// Of whom we may trust with our memory; empty for others, and for those that are gone already.
Process process_of(const ControlSocket& socket) {
  const auto pid = socket.trusted_pid();
  if (!pid) return {};
  Fd ends(static_cast<int>(::syscall(SYS_pidfd_open, *pid, 0)));
  if (!ends) return {};
  return {.number = *pid, .ends = std::make_shared<const Fd>(std::move(ends))};
}

// Whatever file it is that a peer is to be woken by: it must not hold us up.
Fd without_waiting(Fd bell) {
  ::fcntl(bell.get(), F_SETFL, O_NONBLOCK);
  return bell;
}

bool has_exited(const Fd& process) {
  pollfd waited{process.get(), POLLIN, 0};
  return ::poll(&waited, 1, 0) == 1;
}

}  // namespace

Control::Control(Wire wire, std::string& name, int bell, std::uint64_t silence_ns, ControlEvents& events)
    : wire_(wire),
      silence_(silence_ns),
      pause_(std::min(silence_ns / kBeats, kMaxPause)),
      events_(events),
      bell_(bell),
      listener_(ControlSocket::listen(wire, name)) {
  const BlockedSignals blocked;  // inherited by the thread
  thread_ = std::thread([this] { run(); });
  ::pthread_setname_np(thread_.native_handle(), "headrace-control");
}

Control::~Control() { stop(); }

void Control::stop() {
  if (!thread_.joinable()) return;
  stopping_ = true;
  wake_.ring();
  thread_.join();
}

// ---- from the owner ------------------------------------------------------------------------------------------------

void Control::command(std::function<void()> act) {
  {
    const std::lock_guard guard(mutex_);
    commands_.push_back(std::move(act));
  }
  wake_.ring();
}

void Control::run_commands() {
  std::vector<std::function<void()>> commands;
  {
    const std::lock_guard guard(mutex_);
    commands.swap(commands_);
  }
  for (auto& act : commands) act();
}

void Control::dial(std::uint64_t link, const std::string& name, Fd lane) {
  const auto held = std::make_shared<Fd>(std::move(lane));
  command([this, link, name, held] {
    try {
      Connection made{.socket = ControlSocket(wire_, ControlSocket::dial(wire_, name)), .dialled = true};
      made.heard_at = now_ns();
      if (is_local(wire_)) made.process = process_of(made.socket);
      if (is_local(wire_) && !made.process.ends)
        throw FabricError("connect(control socket)", EPERM, "another user listens there, or nobody now");
      Frame hello{.kind = FrameKind::hello};
      if (is_local(wire_)) {
        hello.fds.push_back(std::move(*held));
        hello.lent.push_back(bell_);
      }
      made.socket.send(std::move(hello));
      connections_.insert_or_assign(link, std::move(made));
    } catch (const FabricError& error) {
      events_.lost(link, error.code, error.call + ": " + error.what());
    } catch (const InputError& error) {  // what its address says is no name
      events_.lost(link, EINVAL, error.what());
    }
  });
}

void Control::open(std::uint64_t link, std::uint64_t key, std::uint64_t token) {
  command([this, link, key, token] {
    const auto found = connections_.find(link);
    if (found != connections_.end()) found->second.socket.send({.kind = FrameKind::open, .key = key, .length = token});
  });
}

void Control::answer(std::uint64_t lane, std::uint64_t key, std::uint64_t token) {
  command([this, lane, key, token] {
    const auto found = connections_.find(lane);
    if (found == connections_.end() || found->second.over) return;
    const auto kind = token != 0 && may_open(key) ? FrameKind::opened : FrameKind::denied;
    found->second.socket.send({.kind = kind, .key = key, .length = token});
  });
}

void Control::confirm_closed(std::uint64_t link, std::uint64_t key) {
  command([this, link, key] {
    const auto found = connections_.find(link);
    if (found != connections_.end()) found->second.socket.send({.kind = FrameKind::closed, .key = key});
  });
}

void Control::hang_up(std::uint64_t link) {
  command([this, link] {
    const auto found = connections_.find(link);
    if (found == connections_.end()) return;
    found->second.socket.send({.kind = FrameKind::bye});
    connections_.erase(found);
  });
}

void Control::allow(std::uint64_t key, int memory_fd, std::uint64_t length) {
  command([this, key, memory_fd, length] {
    grants_.insert_or_assign(key, Grant{.memory_fd = memory_fd, .length = length, .holders = {}});
  });
}

void Control::withdraw(std::uint64_t key) {
  command([this, key] {
    const auto found = grants_.find(key);
    if (found == grants_.end()) return;
    found->second.withdrawn = true;
    for (const std::uint64_t holder : found->second.holders)
      connections_.at(holder).socket.send({.kind = FrameKind::close, .key = key});
    let_go(0, key);  // where nobody holds it, it is over now
  });
}

void Control::drop_lane(std::uint64_t lane) {
  command([this, lane] { end(lane, EPROTO, "what came over its lane makes no sense"); });
}

// ---- the thread ----------------------------------------------------------------------------------------------------

void Control::run() {
  while (!stopping_) {
    run_commands();
    wait();
    wake_.clear();
    for (const std::uint64_t id : std::exchange(active_, {})) read_some(id);
    drop_finished();
    if (now_ns() >= next_beat_) beat();
    if (!full_) accept_all();
    full_ = false;
  }
  run_commands();
  for (auto& [id, connection] : connections_)
    if (connection.dialled) connection.socket.send({.kind = FrameKind::bye});
}

void Control::wait() {
  std::vector<pollfd> waited{{wake_.fd(), POLLIN, 0}, {full_ ? -1 : listener_.get(), POLLIN, 0}};
  std::vector<std::uint64_t> ids;
  for (auto& [id, connection] : connections_) {
    const short events = connection.socket.num_waiting() > 0 ? POLLIN | POLLOUT : POLLIN;
    waited.push_back({connection.over ? -1 : connection.socket.fd(), events, 0});
    waited.push_back({connection.process.ends ? connection.process.ends->get() : -1, POLLIN, 0});
    ids.push_back(id);
  }
  const std::uint64_t now = now_ns();
  const int rest = next_beat_ > now ? static_cast<int>((next_beat_ - now) / 1'000'000) + 1 : 0;
  ::poll(waited.data(), waited.size(), full_ ? kRetryMs : connections_.empty() ? -1 : rest);
  for (std::size_t i = 0; i < ids.size(); ++i)
    if (waited[2 * i + 2].revents != 0 || waited[2 * i + 3].revents != 0) active_.push_back(ids[i]);
}

void Control::accept_all() {
  while (connections_.size() < kMaxConnections) {
    std::string host;
    Fd made = ControlSocket::accept(listener_, host);
    if (!made) {
      full_ = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
      return;
    }
    if (wire_ == Wire::tcp && !has_room(host)) continue;
    Connection come{.socket = ControlSocket(wire_, std::move(made)), .host = std::move(host)};
    come.heard_at = now_ns();
    if (is_local(wire_)) come.process = process_of(come.socket);
    if (is_local(wire_) && !come.process.ends) continue;
    connections_.emplace(next_lane_++, std::move(come));
  }
  full_ = true;
}

// Those who are here already are kept; a peer that is turned away dials again.
bool Control::has_room(const std::string& host) const {
  const auto is_of_it = [&host](const auto& each) { return !each.second.dialled && each.second.host == host; };
  return std::ranges::count_if(connections_, is_of_it) < kMaxOfOneHost;
}

void Control::read_some(std::uint64_t id) {
  auto found = connections_.find(id);
  if (found == connections_.end() || found->second.over) return;
  // Read all the same: its goodbye may lie there.
  const bool broken = !found->second.socket.flush();
  for (int i = 0; i < kBatch; ++i) {
    Frame frame;
    const auto read = found->second.socket.read(frame);
    if (read == ControlSocket::Read::nothing) {
      if (broken) return end(id, EPIPE, "its control connection broke");
      // A child of it may hold the connection open.
      const auto& ends = found->second.process.ends;
      if (ends && has_exited(*ends)) end(id, ECONNRESET, "its process has exited");
      return;
    }
    if (read == ControlSocket::Read::ended) return end(id, ECONNRESET, "its control connection ended");
    // What the owner allowed before the peer could know of it is in the queue by now.
    run_commands();
    found = connections_.find(id);
    if (found == connections_.end() || found->second.over) return;
    Connection& from = found->second;
    from.heard_at = now_ns();
    if (std::exchange(from.silent, false)) events_.heard(id);
    if (frame.kind == FrameKind::beat && (from.dialled || from.greeted)) continue;
    if (!(from.dialled ? handle_dialled(id, from, frame) : handle(id, from, frame)))
      return end(id, EPROTO, "its control connection brought a frame out of place");
  }
}

bool Control::handle_dialled(std::uint64_t id, Connection& from, Frame& frame) {
  if (wire_ == Wire::tcp && frame.kind != FrameKind::welcome) return false;
  switch (frame.kind) {
    case FrameKind::welcome:
      if (std::exchange(from.greeted, true)) return false;
      if (wire_ == Wire::tcp) {
        events_.linked(id, {}, Fd());
      } else {
        events_.linked(id, from.process, without_waiting(std::move(frame.fds[0])));
      }
      return true;
    case FrameKind::opened:
      events_.opened(id, frame.key, wire_ == Wire::local ? std::move(frame.fds[0]) : Fd(), frame.length);
      return true;
    case FrameKind::denied:
      events_.denied(id, frame.key);
      return true;
    case FrameKind::close:
      events_.close_asked(id, frame.key);
      return true;
    default:
      return false;
  }
}

bool Control::handle(std::uint64_t id, Connection& from, Frame& frame) {
  if (frame.kind == FrameKind::hello) return greet(id, from, frame);
  if (!from.greeted || (wire_ == Wire::tcp && frame.kind != FrameKind::bye)) return false;
  switch (frame.kind) {
    case FrameKind::open:
      if (from.socket.num_waiting() > kMaxWaiting) return false;  // it takes no answers
      if (wire_ == Wire::local) {
        answer_open(id, from, frame.key);
      } else {
        if (may_open(frame.key)) grants_.at(frame.key).holders.insert(id);
        events_.open_asked(id, frame.key, frame.length, from.process.number);
      }
      return true;
    case FrameKind::closed:
      let_go(id, frame.key);
      return true;
    case FrameKind::bye:
      let_go(id);
      return true;
    default:
      return false;
  }
}

bool Control::greet(std::uint64_t id, Connection& from, Frame& frame) {
  if (std::exchange(from.greeted, true)) return false;
  if (wire_ == Wire::tcp) {
    from.socket.send({.kind = FrameKind::welcome});
    return true;
  }
  try {
    from.lane = std::make_shared<InLane>(frame.fds[0].release());
  } catch (const FabricError&) {
    return false;
  }
  events_.lane_came(id, from.lane, without_waiting(std::move(frame.fds[1])));
  Frame welcome{.kind = FrameKind::welcome};
  welcome.lent.push_back(bell_);
  from.socket.send(std::move(welcome));
  return true;
}

bool Control::may_open(std::uint64_t key) const {
  const auto found = grants_.find(key);
  return found != grants_.end() && !found->second.withdrawn;
}

void Control::answer_open(std::uint64_t id, Connection& from, std::uint64_t key) {
  const auto found = grants_.find(key);
  if (!may_open(key)) return from.socket.send({.kind = FrameKind::denied, .key = key});
  found->second.holders.insert(id);
  from.lane->may_count = true;  // at once: its first write is but microseconds away
  Frame opened{.kind = FrameKind::opened, .key = key, .length = found->second.length};
  opened.lent.push_back(found->second.memory_fd);
  from.socket.send(std::move(opened));
}

// How long the other end of a connection that came may say nothing. One that was stopped for longer dials again.
std::uint64_t Control::patience(const Connection& connection) const {
  if (!connection.greeted) return silence_;
  return wire_ == Wire::tcp ? std::max(kForgotten * silence_, kBeats * kMaxPause) : ~std::uint64_t{0};
}

// Both ends say that they are alive; whoever dialled looks whether the other is. A thread that comes a whole beat late
// was stopped itself, and has yet to read what came meanwhile: it judges nobody.
void Control::beat() {
  const std::uint64_t now = now_ns();
  const bool on_time = now <= next_beat_ + pause_;
  next_beat_ = now + pause_;
  std::vector<std::uint64_t> left;
  for (auto& [id, connection] : connections_) {
    if (connection.over) continue;
    if (connection.socket.num_waiting() == 0 && (connection.greeted || connection.dialled))
      connection.socket.send({.kind = FrameKind::beat});
    const std::uint64_t quiet = on_time ? now - connection.heard_at : 0;
    if (connection.dialled && quiet > silence_ && !std::exchange(connection.silent, true)) events_.silent(id);
    if (!connection.dialled && quiet > patience(connection)) left.push_back(id);
  }
  for (const std::uint64_t id : left) end(id, ETIMEDOUT, "it said nothing for long");
}

// ---- ends ----------------------------------------------------------------------------------------------------------

void Control::end(std::uint64_t id, int code, const std::string& text) {
  const auto found = connections_.find(id);
  if (found == connections_.end() || found->second.over) return;
  if (found->second.dialled) {
    connections_.erase(found);
    events_.lost(id, code, text);
    return;
  }
  found->second.over = true;
  found->second.socket = ControlSocket(wire_, Fd());
  if (wire_ == Wire::shm) let_go(id);  // our own end is what it wrote through
  events_.lane_left(id);
}

// Connections that are over, once their process has exited or holds nothing of ours.
void Control::drop_finished() {
  for (auto each = connections_.begin(); each != connections_.end();) {
    const std::uint64_t id = each->first;
    Connection& connection = (each++)->second;
    if (!connection.over) continue;
    if (holds_any(id) && connection.process.ends && !has_exited(*connection.process.ends)) continue;
    let_go(id);
    connections_.erase(id);
  }
}

bool Control::holds_any(std::uint64_t id) const {
  return std::ranges::any_of(grants_, [id](const auto& each) { return each.second.holders.contains(id); });
}

void Control::let_go(std::uint64_t id) {
  std::vector<std::uint64_t> held;
  for (const auto& [key, grant] : grants_)
    if (grant.holders.contains(id)) held.push_back(key);
  for (const std::uint64_t key : held) let_go(id, key);
}

void Control::let_go(std::uint64_t id, std::uint64_t key) {
  const auto found = grants_.find(key);
  if (found == grants_.end()) return;
  found->second.holders.erase(id);
  const auto from = connections_.find(id);
  // What it still tells is about memory that it has let go of.
  if (!holds_any(id) && from != connections_.end() && from->second.lane) from->second.lane->may_count = false;
  if (!found->second.withdrawn || !found->second.holders.empty()) return;
  grants_.erase(found);
  events_.access_ended(key);
}

}  // namespace headrace::fabric
