// A lane: what one process tells another through memory that both have mapped. The writer makes it; imms of writes that
// have landed and fragments of messages go one way, two wake-up words both ways. Owns the mapping; knows no sockets.
// Each end is used by one thread, its owner. Where something else lies beside the lane that only one of both may touch
// at a time, each enters it by turns, or not at all: nobody waits for another who may have been stopped in there.
//
// The other end is another process, which may be at fault: whatever it stores, no index leaves the rings.
//
// No wake-up is lost: the writer stores a tail and then looks whether the reader sleeps, the reader says that it sleeps
// and then looks at the tails; likewise, with full rings, the heads and `writer_waits`, and with both the visits,
// answers and who is inside. All are sequentially consistent.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace headrace::fabric {

// What lies at the lane's beginning. Tails and heads count for ever; a ring's place is the count modulo its size.
struct LaneHead {
  alignas(64) std::atomic<std::uint64_t> imm_tail;
  std::atomic<std::uint64_t> byte_tail;
  alignas(64) std::atomic<std::uint64_t> imm_head;
  std::atomic<std::uint64_t> byte_head;
  alignas(64) std::atomic<std::uint32_t> reader_sleeps;
  alignas(64) std::atomic<std::uint32_t> writer_waits;
  alignas(64) std::atomic<std::uint32_t> inside;
  std::atomic<std::uint64_t> visits;   // of the writer
  std::atomic<std::uint64_t> answers;  // of the reader: the last of the visits that it has seen
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

class Lane {
 public:
  static constexpr std::uint64_t kImms = 8192;
  static constexpr std::uint64_t kBytes = std::uint64_t{256} << 10;
  static constexpr std::size_t kLength = 4096 + kImms * sizeof(std::uint32_t) + kBytes;

  Lane();                 // a new one
  explicit Lane(int fd);  // somebody else's. Throws FabricError where it is no lane
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;
  ~Lane();

  int fd() const { return fd_; }

 protected:
  LaneHead& head() const { return *static_cast<LaneHead*>(memory_); }
  std::uint32_t* imms() const;
  std::byte* bytes() const;
  bool enter() const {
    std::uint32_t nobody = 0;
    return head().inside.compare_exchange_strong(nobody, 1);
  }

 private:
  void map();

  int fd_ = -1;
  void* memory_ = nullptr;
};

class OutLane : public Lane {
 public:
  // Both false when the ring is full: publish what there is, and the reader rings once it has made room.
  bool push_imm(std::uint32_t imm);
  bool push_fragment(std::span<const std::byte> header, std::span<const std::byte> payload);

  // Shows the reader what was pushed, after a copy_fence where bytes went with it.
  void publish();
  // True: the reader sleeps, and is to be woken. `may_wait`: more comes at once, so it may sleep on while there is
  // little to read.
  bool must_wake(bool may_wait);

  // False: the reader is inside. `leave` when done there, the reader having something to do or not. True: it has, and
  // may have gone to sleep because we were inside.
  bool try_enter() { return enter(); }
  bool leave(bool for_reader);
  // The reader was inside since we last heard of it, and is no more.
  bool may_hear() const;
  bool hear() { return std::exchange(heard_, head().answers.load()) != heard_; }
  bool is_free() const { return head().inside.load() == 0; }
  // From here on the reader rings once it has been inside.
  void await() { head().writer_waits.store(1); }

 private:
  template <class Full>
  bool no_room(Full full);

  // Pushed, and not published yet. Imms wait here: where the reader looks at this moment, each store would wait for it.
  std::vector<std::uint32_t> imms_waiting_;
  std::uint64_t imm_tail_ = 0;
  std::uint64_t byte_tail_ = 0;
  std::uint64_t imm_head_seen_ = 0;  // the reader's, as far as we last looked
  std::uint64_t visits_ = 0;
  std::uint64_t heard_ = 0;
};

class InLane : public Lane {
 public:
  using Lane::Lane;

  // At most `limit` imms that have come. Throws FabricError when the writer's counts make no sense.
  std::span<const std::uint32_t> peek_imms(std::size_t limit);
  void pop_imms(std::size_t count);
  // The next fragment, copied to `buffer`; its length, 0 where there is none. Throws FabricError as above.
  std::size_t pop_fragment(std::span<std::byte> buffer);
  bool has_news() const;
  // True: the writer waits for room, and is to be woken.
  bool made_room();
  // What the writer has shown by now is read, and nothing that it shows later.
  void cut_off();

  // As of OutLane. `leave` answers.
  bool try_enter();
  void leave();
  bool may_visit() const;  // the writer left something inside, and is no more

  // Whether its writer has been given access to our memory; else nothing that it tells has landed.
  std::atomic<bool> may_count{false};

  void lie_down() { head().reader_sleeps.store(1); }
  void get_up() { head().reader_sleeps.store(0); }

 private:
  struct Tails {
    std::uint64_t imms;
    std::uint64_t bytes;
  };
  Tails tails() const { return end_ ? *end_ : Tails{head().imm_tail.load(), head().byte_tail.load()}; }

  std::optional<Tails> end_;    // of what is cut off
  std::uint64_t imm_head_ = 0;  // ours: the writer cannot move them
  std::uint64_t byte_head_ = 0;
  std::uint64_t visited_ = 0;
};

}  // namespace headrace::fabric
