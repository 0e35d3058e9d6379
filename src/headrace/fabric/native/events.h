// What the owner tells Python: plain records, a queue without a bound, an eventfd. The owner appends, any thread
// drains.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "errors.h"

namespace headrace::fabric {

struct MessageReceived {
  std::string message;
};

struct SendFailed {
  std::uint64_t peer;
  int code;
  std::string text;
};

struct Reached {
  std::uint32_t imm;
  std::uint64_t arrivals;
  std::uint64_t at_ns;
};

struct Surplus {
  std::uint32_t imm;
  std::uint64_t arrivals;
  bool armed;
};

struct TransferDone {
  std::uint64_t transfer;
  std::uint64_t num_posted;
  std::uint64_t num_failed;
  bool complete;
  int code;
  std::string text;
};

struct DigestsReady {
  std::uint64_t digest;
  std::vector<std::uint64_t> digests;
};

struct Revoked {
  std::uint64_t peer;
};

struct PeerLost {
  std::uint64_t peer;
  int code;
  std::string text;
};

struct PeerSilent {
  std::uint64_t peer;
};

struct PeerHeard {
  std::uint64_t peer;
};

using Event = std::variant<MessageReceived, SendFailed, Reached, Surplus, TransferDone, DigestsReady, Revoked, PeerLost,
                           PeerSilent, PeerHeard>;

class EventFd {
 public:
  EventFd() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (fd_ < 0) throw FabricError("eventfd", errno, std::strerror(errno));
  }
  EventFd(const EventFd&) = delete;
  EventFd& operator=(const EventFd&) = delete;
  ~EventFd() { ::close(fd_); }

  int fd() const { return fd_; }
  void ring() {
    const std::uint64_t one = 1;
    // Only a full counter can refuse, and a full counter is readable already.
    [[maybe_unused]] const auto written = ::write(fd_, &one, sizeof one);
  }
  void clear() {
    std::uint64_t count = 0;
    [[maybe_unused]] const auto taken = ::read(fd_, &count, sizeof count);
  }

 private:
  int fd_;
};

class EventQueue {
 public:
  void append(Event event) {
    const std::lock_guard guard(mutex_);
    events_.push_back(std::move(event));
    if (events_.size() == 1) bell_.ring();
  }

  std::vector<Event> drain() {
    const std::lock_guard guard(mutex_);
    bell_.clear();
    return std::exchange(events_, {});
  }

  // Readable until the next drain, events or not.
  void ring() { bell_.ring(); }

  int fd() const { return bell_.fd(); }

 private:
  std::mutex mutex_;
  std::vector<Event> events_;
  EventFd bell_;
};

}  // namespace headrace::fabric
