// Peers of this host: their memory is mapped here and written by copies, and what has landed is told through lanes.
// Owns the mappings of others' memory, the lanes both ways, and which of our keys are still mapped somewhere; the
// control thread's news come in as `ControlEvents`, turned into commands of the owner. Owner thread only.
//
// Life of a link:
//     idle      the connection is lost: the next post dials again, after a while, or time does
//     dialling  messages and writes wait
//     ready     the lane is read at the other end
// and of the memory there: none -> asked (its descriptor came) -> open (mapped) -> over (refused, revoked or
// lost), until the next one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "control.h"
#include "cuda.h"
#include "errors.h"
#include "lane.h"
#include "link.h"
#include "memory.h"
#include "watch.h"

namespace headrace::fabric {

class Mapped;

class MappedLink final : public Link {
 public:
  MappedLink(Mapped& transport, std::uint64_t peer, std::string control);
  ~MappedLink() override;

  const std::string& transport() const override;
  std::size_t num_rails() const override { return 1; }
  void connect(const Descriptor& descriptor) override;
  Posted post_write(std::uint64_t peer, const std::byte* from, const Write& write) override;
  Posted post_fragment(std::uint64_t peer, const std::shared_ptr<OutgoingMessage>& message) override;
  void flush(bool more) override;
  Descriptor grant(std::uint32_t generation) override;
  bool withdraw() override;
  void abandon(std::uint64_t) override {}

  // What the control thread told.
  void linked(Fd bell);
  void opened(std::uint64_t key, Fd memory, std::uint64_t length);
  void denied(std::uint64_t key);
  void close_asked(std::uint64_t key);
  void lost(int code, const std::string& text);
  void access_ended(std::uint64_t key);
  std::uint64_t peer() const { return peer_; }

  // As Mapped's.
  std::uint64_t dial_again(std::uint64_t now);

 private:
  enum class State { idle, dialling, ready };
  enum class There { none, asked, open, over };

  bool is_ready();
  void dial();
  void try_dial();
  void unmap(There now);
  void end_access(int code, const char* call);
  void copy(std::byte* to, const std::byte* from, std::size_t length);
  void fence();

  Mapped& transport_;
  std::uint64_t id_;  // another one for each connection
  const std::uint64_t peer_;
  const std::string control_;
  State state_ = State::idle;
  std::uint64_t idle_since_ = 0;
  std::unique_ptr<OutLane> lane_;
  Fd bell_;
  bool fence_ = false;   // bytes went out since the last flush
  bool pushed_ = false;  // something is to be published
  bool unrung_ = false;  // published, and the reader may be asleep

  There there_ = There::none;
  std::uint64_t key_ = 0;
  std::uint64_t length_ = 0;
  bool on_device_ = false;
  Mapping memory_;
  int code_ = 0;  // of what is over
  const char* call_ = "";
  bool lost_told_ = false;

  std::optional<std::uint64_t> granted_;  // our key for this peer
  std::set<std::uint64_t> ending_;        // earlier ones, not let go of yet
  bool told_ = false;                     // a `withdraw` that ends later
};

class Mapped {
 public:
  // The owner, as far as it is needed here.
  struct Owner {
    PeerNews news;
    std::function<void(std::uint64_t peer)> revoked;
    std::function<void(std::uint64_t peer)> may_retry;
    std::shared_ptr<CudaDevice> device{};  // whose memory ours is
  };

  // Listens as `name`; `memory_fd` is what peers are given, sealed against shrinking. Throws InputError, FabricError.
  Mapped(std::string name, int bell, int memory_fd, std::size_t length, std::uint64_t sender, std::uint64_t silence_ns,
         Owner owner);

  std::unique_ptr<Link> link(std::uint64_t peer, const std::string& control);

  // What has come over the lanes, some of each: `arrived(imm, count)`, `received(fragment)`. True when there was
  // anything.
  template <class Arrived, class Received>
  bool read(Arrived arrived, Received received);
  // Dials those again that were lost. -> when there is somebody to dial next, 0 for nobody.
  std::uint64_t dial_again(std::uint64_t now);
  bool has_news() const;
  void lie_down();
  void get_up();

  void stop() { control_.stop(); }

 private:
  friend class MappedLink;

  struct Incoming {
    std::shared_ptr<InLane> lane;
    Fd bell;
  };

  // On the control thread: each becomes a command.
  class News final : public ControlEvents {
   public:
    explicit News(Mapped& mapped) : mapped_(mapped) {}
    void linked(std::uint64_t link, Fd bell) override;
    void opened(std::uint64_t link, std::uint64_t key, Fd memory, std::uint64_t length) override;
    void denied(std::uint64_t link, std::uint64_t key) override;
    void close_asked(std::uint64_t link, std::uint64_t key) override;
    void silent(std::uint64_t link) override;
    void heard(std::uint64_t link) override;
    void lost(std::uint64_t link, int code, const std::string& text) override;
    void lane_came(std::uint64_t lane, std::shared_ptr<InLane> in, Fd bell) override;
    void lane_left(std::uint64_t lane) override;
    void access_ended(std::uint64_t key) override;

   private:
    Mapped& mapped_;
  };

  void with_link(std::uint64_t link, std::function<void(MappedLink&)> act);
  void end_lanes();
  static void ring(const Fd& bell);

  static constexpr std::size_t kMaxImms = 1024;  // of one lane in a turn
  static constexpr int kMaxFragments = 16;

  const std::string name_ = "mapped";
  const int memory_fd_;
  const std::size_t length_;
  const std::uint64_t sender_;  // of messages
  Owner owner_;
  News news_;
  std::map<std::uint64_t, MappedLink*> links_;
  std::map<std::uint64_t, MappedLink*> granted_;  // by our key, until nobody has the memory mapped by it
  std::map<std::uint64_t, Incoming> incoming_;
  std::vector<std::uint64_t> broken_;
  std::vector<std::uint64_t> leaving_;  // nothing more comes there; what has come is read first
  std::vector<std::byte> fragment_ = std::vector<std::byte>(kFragment);
  std::uint64_t next_link_ = 1;
  Control control_;  // last: its thread uses the others
};

template <class Arrived, class Received>
bool Mapped::read(Arrived arrived, Received received) {
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
