// Write lists: what one peer is still to be written, in order, and what became of it. Owns the places in the lists;
// knows neither libfabric nor clocks. Owner thread only.
//
// Life of a transfer:
//     open       writes are queued; each is posted once, when its layer is computed and the peer's window has room
//     ended      no more writes come; the last write is posted after all others were posted and hashed
//     complete   everything was posted           | given_up   the rest is dropped (closed, failed, peer gone)
//     over       complete or given up, and nothing outstanding: TransferDone is told once
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace headrace::fabric {

constexpr std::uint64_t kLayersPerStep = 1024;  // interface.LAYERS_PER_STEP

struct Target {  // the peer's memory, as its descriptor told
  std::uint64_t length = 0;
  std::uint32_t generation = 0;
};

struct LastWrite {
  std::uint64_t src = 0;
  std::uint64_t dst = 0;
  std::uint64_t length = 0;
  std::uint64_t digests_at = 0;
};

// Shared by the table of transfers, the lists it is written from and the operations under way: what is posted for it
// passes a plain pointer, since every count of a shared one would wait for the stores of the copy before.
struct Transfer : std::enable_shared_from_this<Transfer> {
  std::uint64_t id = 0;
  std::uint64_t peer = 0;
  std::uint32_t imm = 0;
  Target target;
  std::vector<std::uint64_t> digests;

  std::uint64_t num_unposted = 0;  // submitted; the last write is not among them
  std::uint64_t num_hashing = 0;
  std::uint64_t num_posted = 0;
  std::uint64_t num_outstanding = 0;
  std::uint64_t num_failed = 0;

  std::optional<LastWrite> last;
  bool ended = false;      // by the caller: nothing may be submitted any more
  bool last_open = false;  // its layers are computed
  bool last_queued = false;
  bool complete = false;
  bool given_up = false;
  bool told = false;
  int code = 0;
  std::string text;

  bool may_queue_last() const {
    return last && last_open && !last_queued && !given_up && num_unposted == 0 && num_hashing == 0;
  }
  bool may_complete() const { return ended && !last && !given_up && num_unposted == 0; }
  bool over() const { return (complete || given_up) && num_outstanding == 0; }
  void fail(int error, const std::string& why);
};

struct Write {
  Transfer* transfer = nullptr;
  std::uint64_t src = 0;
  std::uint64_t dst = 0;
  std::uint64_t length = 0;
  std::uint64_t seed = 0;
  std::int64_t position = -1;  // -1: in no digest
  bool last = false;
  std::uint64_t done = 0;  // bytes of it that earlier attempts have copied
};

struct Pages {
  std::int64_t offset = 0;
  std::int64_t layer_stride = 0;
  std::int64_t page_stride = 0;
  std::vector<std::int64_t> indices;

  // True when every range [at, at + length) of those layers lies in [0, limit).
  bool within(std::uint64_t limit, std::uint32_t layer_begin, std::uint32_t layer_end, std::uint64_t length) const;
  std::uint64_t at(std::uint32_t layer, std::size_t page) const {
    // Modulo 2**64: the sum was found within bounds, its parts may wrap.
    return static_cast<std::uint64_t>(offset) + layer * static_cast<std::uint64_t>(layer_stride) +
           static_cast<std::uint64_t>(indices[page]) * static_cast<std::uint64_t>(page_stride);
  }
};

struct PageWrites {
  Pages src;
  Pages dst;  // no indices: the messages are only hashed
  std::vector<std::int64_t> positions;
  std::uint32_t layer_begin = 0;
  std::uint32_t layer_end = 0;
  std::uint64_t length = 0;
  std::uint16_t route = 0;

  std::size_t num_pages() const { return positions.size(); }
  std::uint64_t num_writes() const { return positions.size() * (layer_end - layer_begin); }
  Write at(std::uint32_t layer, std::size_t page) const;
  // One write that is in no digest.
  static PageWrites single(std::uint64_t src, std::uint64_t dst, std::uint64_t length);
};

struct Part {
  std::shared_ptr<Transfer> transfer;
  std::shared_ptr<const PageWrites> writes;
};

struct ProgramLast {
  std::shared_ptr<Transfer> transfer;
  std::uint64_t gate = 0;
};

// Some writes in layer-major order, with their place. With a step, layer l waits for the layer counter.
class Program {
 public:
  explicit Program(Part part);
  Program(std::uint64_t step, std::vector<Part> parts, std::vector<ProgramLast> lasts);

  // Adds the next ones that may be posted now to `run`, pages of one layer of one transfer, up to `limit`.
  void peek(std::uint64_t counter, std::size_t limit, std::vector<Write>& run);
  void advance(std::size_t count) { page_ += count, done_ = 0; }
  void keep(std::uint64_t done) { done_ = done; }
  // Opens the last writes whose layers are computed, and hands out their transfers.
  void open_lasts(std::uint64_t counter, std::vector<std::shared_ptr<Transfer>>& opened);
  bool finished() const { return layer_ >= layer_end_ && lasts_.empty(); }
  std::uint64_t step() const { return step_; }
  // The lowest counter at which there is more to do.
  std::uint64_t gate() const;

 private:
  bool gated_ = false;
  std::uint64_t step_ = 0;
  std::vector<Part> parts_;
  std::vector<ProgramLast> lasts_;
  std::uint32_t layer_ = 0;
  std::uint32_t layer_end_ = 0;
  std::size_t part_ = 0;
  std::size_t page_ = 0;
  std::uint64_t done_ = 0;  // of that page
};

// Everything queued towards one peer.
class WriteQueue {
 public:
  void add_ready(Part part) { ready_.emplace_back(std::move(part)); }
  void add_program(Program program) { programs_.push_back(std::move(program)); }
  void add_last(std::shared_ptr<Transfer> transfer) { lasts_.push_back(std::move(transfer)); }
  void drop_program(std::uint64_t step);

  // The next writes that may be posted now, at most `limit`, all of one transfer; valid until the next call. `advance`
  // past those that were, then `keep` what was done of the next: others may come before it is offered again.
  std::span<const Write> peek(std::uint64_t counter, std::size_t limit);
  void advance(std::size_t count);
  void keep(std::uint64_t done);
  void open_lasts(std::uint64_t counter, std::vector<std::shared_ptr<Transfer>>& opened);
  std::uint64_t gate() const;

 private:
  enum class From { lasts, ready, programs };
  void peek_last();
  void peek_ready(std::size_t limit);
  void peek_program(std::uint64_t counter, std::size_t limit);

  std::deque<std::shared_ptr<Transfer>> lasts_;
  std::deque<Program> ready_;
  std::deque<Program> programs_;
  std::vector<Write> run_;
  std::uint64_t last_done_ = 0;  // of the first of `lasts_`
  From from_ = From::lasts;
  bool programs_first_ = true;
};

}  // namespace headrace::fabric
