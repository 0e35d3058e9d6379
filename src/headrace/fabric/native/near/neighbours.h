// Peers of this host: each link has a lane, over which messages go and by which both ends wake each other, and the
// control thread introduces them. What memory is there and how it is written is for those who derive: `Mapped` copies
// into memory that both have mapped, `Shm` writes through libfabric. Owns lanes both ways, and who was granted access
// by which of our keys; the control thread's news come in as `ControlEvents`, turned into commands of the owner. Owner
// thread only.
//
// Life of a link:
//     idle      the connection is lost: the next post dials again, after a while, or time does
//     dialling  messages and writes wait
//     ready     the lane is read at the other end
// and of the memory there: none -> asked (its descriptor came) -> open -> over (refused, taken back or lost), until the
// next one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "control/control.h"
#include "control/lane.h"
#include "control/watch.h"
#include "errors.h"
#include "link.h"
#include "nics/endpoint.h"

namespace headrace::fabric {

class Neighbours;

class NeighbourLink : public Link {
 public:
  NeighbourLink(Neighbours& group, std::uint64_t peer, std::string control);
  ~NeighbourLink() override;

  const std::string& transport() const override;
  std::size_t num_rails() const override { return 1; }
  void connect(const Descriptor& descriptor) override;
  Posted post_fragment(std::uint64_t peer, const std::shared_ptr<OutgoingMessage>& message) override;
  void flush(bool more) override;

  // What the control thread told.
  void linked(Process there, Fd bell);
  void opened(std::uint64_t key, Fd memory, std::uint64_t told);
  void denied(std::uint64_t key);
  void close_asked(std::uint64_t key);
  void lost(int code, const std::string& text);
  virtual void access_ended(std::uint64_t) {}  // by a key of ours
  std::uint64_t peer() const { return peer_; }
  // As the group's.
  std::uint64_t dial_again(std::uint64_t now);

 protected:
  enum class State { idle, dialling, ready };
  enum class There { none, asked, open, over };

  // Throws InputError where such memory cannot be written from here.
  virtual void require(const Descriptor& descriptor);
  // Before the peer is asked for its memory -> what it is told with the question. Throws FabricError.
  virtual std::uint64_t prepare() { return 0; }
  // Its answer. Throws where its memory cannot be used: FabricError, where there is more to say than that.
  virtual void enter(Fd memory, std::uint64_t told) = 0;
  // A newer descriptor came. True: what is there is used no more.
  virtual bool replace(std::uint64_t key) = 0;
  // The peer takes `key` back, and nothing of ours by it is under way there any more.
  virtual void leave(std::uint64_t key) = 0;
  // With the connection went all that was open there.
  virtual void cut_off() = 0;

  bool is_ready();
  // A key for the peer's access to our memory.
  std::uint64_t new_key();
  // What there is to say of memory that is over.
  Posted refused() const { return {.kind = Posted::Kind::failed, .code = code_, .call = call_.c_str()}; }

  Neighbours& group_;
  std::unique_ptr<OutLane> lane_;
  Process process_;
  bool pushed_ = false;  // something is to be published
  bool unrung_ = false;  // and the reader may be asleep
  There there_ = There::none;
  std::uint64_t key_ = 0;
  std::uint64_t base_ = 0;
  std::uint64_t length_ = 0;

 private:
  void dial();
  void try_dial();
  void ask();
  void end_access(int code, std::string call);

  std::uint64_t id_;  // another one for each connection
  const std::uint64_t peer_;
  const std::string control_;
  State state_ = State::idle;
  std::uint64_t idle_since_ = 0;
  Fd bell_;
  int code_ = 0;  // of what is over
  std::string call_;
  bool lost_told_ = false;
};

class Neighbours {
 public:
  // The owner, as far as it is needed here.
  struct Owner {
    PeerNews news;
    std::function<void(std::uint64_t peer)> revoked;
    std::function<void(std::uint64_t peer)> may_retry;
    std::function<void(Completion& completion)> complete;  // at once
  };
  struct Place {
    std::string& control;  // name of the control socket
    int bell = -1;         // wakes our owner
    std::uint64_t sender = 0;
    std::uint64_t silence_ns = 0;
  };

  Neighbours(std::string name, Wire wire, Addressing addressing, const Place& place, Owner owner);
  virtual ~Neighbours() = default;

  const std::string& name() const { return name_; }  // of the transport
  virtual std::unique_ptr<Link> link(std::uint64_t peer, const std::string& control) = 0;

  // What has come over the lanes, some of each: `arrived(imm, count)`, `received(fragment)`. True when there was
  // anything.
  template <class Arrived, class Received>
  bool read(Arrived arrived, Received received);
  // Of writes that complete later.
  virtual void read_completions(std::vector<Completion>&) {}
  // So many of one peer may be under way; 0: they are copied at once.
  virtual std::uint64_t window() const { return 0; }

  // From here on whoever brings work rings. Look once more whether some is there before sleeping.
  virtual void lie_down();
  virtual bool may_sleep();
  virtual void add_wait_fds(std::vector<int>&) const {}
  void get_up();
  // Dials those again that were lost. -> when there is somebody to dial next, 0 for nobody.
  std::uint64_t dial_again(std::uint64_t now);

  void stop() { control_.stop(); }

 protected:
  friend class NeighbourLink;

  struct Incoming {
    std::shared_ptr<InLane> lane;
    Fd bell;
  };

  virtual bool has_news(const Incoming& in) const { return in.lane->has_news(); }
  // On the owner's thread: the peer at the other end of `lane` asks to open our memory by `key`.
  virtual void open_asked(std::uint64_t, std::uint64_t, std::uint64_t, pid_t) {}
  // Nothing more comes over `lane`.
  virtual void lane_ended(std::uint64_t) {}
  static void ring(const Fd& bell);

  std::map<std::uint64_t, NeighbourLink*> links_;    // that dialled
  std::map<std::uint64_t, NeighbourLink*> granted_;  // by our key, until nobody has access by it
  std::map<std::uint64_t, Incoming> incoming_;
  const Owner owner_;

 private:
  // On the control thread: each becomes a command.
  class News final : public ControlEvents {
   public:
    explicit News(Neighbours& group) : group_(group) {}
    void linked(std::uint64_t link, Process there, Fd bell) override;
    void opened(std::uint64_t link, std::uint64_t key, Fd memory, std::uint64_t told) override;
    void denied(std::uint64_t link, std::uint64_t key) override;
    void close_asked(std::uint64_t link, std::uint64_t key) override;
    void silent(std::uint64_t link) override;
    void heard(std::uint64_t link) override;
    void lost(std::uint64_t link, int code, const std::string& text) override;
    void lane_came(std::uint64_t lane, std::shared_ptr<InLane> in, Fd bell) override;
    void lane_left(std::uint64_t lane) override;
    void open_asked(std::uint64_t lane, std::uint64_t key, std::uint64_t told, pid_t process) override;
    void access_ended(std::uint64_t key) override;

   private:
    Neighbours& group_;
  };

  void with_link(std::uint64_t link, std::function<void(NeighbourLink&)> act);
  void end_lanes();

  static constexpr std::size_t kMaxImms = 1024;  // of one lane in a turn
  static constexpr int kMaxFragments = 16;

  const std::string name_;
  const Addressing addressing_;
  const std::uint64_t sender_;  // of messages
  News news_;
  std::vector<std::uint64_t> broken_;
  std::vector<std::uint64_t> leaving_;  // nothing more comes there; what has come is read first
  std::vector<std::byte> fragment_ = std::vector<std::byte>(kFragment);
  std::uint64_t next_link_ = 1;

 protected:
  Control control_;  // last here: `stop` it before what derives goes, for its thread uses all of this
};

template <class Arrived, class Received>
bool Neighbours::read(Arrived arrived, Received received) {
  bool any = false;
  for (auto& [id, in] : incoming_) {
    try {
      if (!in.lane->has_news()) continue;
      any = true;
      const auto imms = in.lane->peek_imms(kMaxImms);
      for (auto next = imms.begin(); next != imms.end() && in.lane->may_count;) {
        const auto first = next;
        next = std::find_if(first, imms.end(), [first](std::uint32_t imm) { return imm != *first; });
        arrived(*first, static_cast<std::uint64_t>(next - first));
      }
      in.lane->pop_imms(imms.size());
      for (int i = 0; i < kMaxFragments; ++i) {
        const std::size_t length = in.lane->pop_fragment(fragment_);
        if (length == 0) break;
        received(std::span<const std::byte>(fragment_.data(), length));
      }
      if (in.lane->made_room()) ring(in.bell);
    } catch (const FabricError&) {
      broken_.push_back(id);
    }
  }
  end_lanes();
  return any;
}

}  // namespace headrace::fabric
