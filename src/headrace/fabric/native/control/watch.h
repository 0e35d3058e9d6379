// Peers of other hosts, watched over TCP: whether their process lives and their host answers. Owns the links of the
// control thread to them; what follows from their news is the owner's affair. Owner thread only.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "control/control.h"

namespace headrace::fabric {

// What the owner does with news of its peers; `queue` may be called from any thread, the others on the owner's.
struct PeerNews {
  std::function<void(std::function<void()>)> queue;
  std::function<void(std::uint64_t peer, int code, const std::string& text)> lost;
  std::function<void(std::uint64_t peer)> silent;
  std::function<void(std::uint64_t peer)> heard;
};

class Watch {
 public:
  // Listens at `name`, "host:port"; a port of 0 becomes the one that was given.
  Watch(std::string& name, std::uint64_t silence_ns, PeerNews news);

  void begin(std::uint64_t peer, const std::string& name);
  void end(std::uint64_t peer);
  // Dials those again that were lost. -> when there is somebody to dial next, 0 for nobody.
  std::uint64_t dial_again(std::uint64_t now);
  void stop() { control_.stop(); }

 private:
  struct Watched {
    std::string name;
    std::uint64_t link = 0;
    std::uint64_t dial_at = 0;  // 0: dialled
    bool lost = false;          // and told
  };

  class News final : public ControlEvents {
   public:
    explicit News(Watch& watch) : watch_(watch) {}
    void linked(std::uint64_t link, Process there, Fd bell) override;
    void silent(std::uint64_t link) override;
    void heard(std::uint64_t link) override;
    void lost(std::uint64_t link, int code, const std::string& text) override;
    // Only memory brings these, and none is handed over here.
    void opened(std::uint64_t, std::uint64_t, Fd, std::uint64_t) override {}
    void denied(std::uint64_t, std::uint64_t) override {}
    void close_asked(std::uint64_t, std::uint64_t) override {}
    void lane_came(std::uint64_t, std::shared_ptr<InLane>, Fd) override {}
    void lane_left(std::uint64_t) override {}
    void open_asked(std::uint64_t, std::uint64_t, std::uint64_t, pid_t) override {}
    void access_ended(std::uint64_t) override {}

   private:
    void with_peer(std::uint64_t link, std::function<void(std::uint64_t peer, Watched&)> act);
    Watch& watch_;
  };

  void dial(std::uint64_t peer, Watched& watched);

  const PeerNews owner_;
  News news_;
  std::map<std::uint64_t, Watched> peers_;
  std::map<std::uint64_t, std::uint64_t> links_;  // -> peer
  std::uint64_t next_link_ = 1;
  Control control_;  // last: its thread uses the others
};

}  // namespace headrace::fabric
