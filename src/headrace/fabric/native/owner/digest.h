// Digests of messages in local memory, hashed in slices so that the owner's turn stays short. Owns the jobs and nothing
// they point to; knows no libfabric. Owner thread only.
#pragma once

#include <xxhash.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "transfers.h"

namespace headrace::fabric {

// Hashes one byte range, over several slices when it is long.
class RangeHash {
 public:
  void start(const std::byte* data, std::size_t length, std::uint64_t seed);
  bool advance();  // hashes at most kPiece bytes; true when the range is done
  std::uint64_t value() const { return value_; }

 private:
  static constexpr std::size_t kPiece = std::size_t{256} << 10;  // about 25 us at 10 GB/s
  const std::byte* data_ = nullptr;
  std::size_t left_ = 0;
  std::uint64_t seed_ = 0;
  std::uint64_t value_ = 0;
  bool streaming_ = false;
  XXH3_state_t state_;
};

class Digester {
 public:
  using Hashed = std::function<void(Transfer&)>;
  using Summed = std::function<void(std::uint64_t digest, std::vector<std::uint64_t> sums)>;

  Digester(const std::byte* memory, Hashed hashed, Summed summed);

  // One posted write of a transfer; its sum goes into transfer->digests.
  void add(const Write& write);
  // Messages of our own memory: `parts` as they would be written from here.
  void add(std::uint64_t digest, std::vector<std::shared_ptr<const PageWrites>> parts, std::uint64_t num_pages);

  bool idle() const { return sources_.empty() && locals_.empty() && !hashing_source_ && !hashing_local_; }
  // Works until `deadline_ns`, sources and local digests by turns.
  void slice(std::uint64_t deadline_ns);

 private:
  struct Local {
    std::uint64_t digest;
    std::vector<std::shared_ptr<const PageWrites>> parts;
    std::vector<std::uint64_t> sums;
    std::size_t part = 0;
    std::uint32_t layer = 0;
    std::size_t page = 0;
  };

  struct Source {
    std::shared_ptr<Transfer> transfer;
    Write write;
  };

  bool step_source();
  bool step_local();
  bool next_message(Local& local);
  void finish_local();

  const std::byte* memory_;
  Hashed hashed_;
  Summed summed_;
  std::deque<Source> sources_;
  std::deque<Local> locals_;
  RangeHash source_hash_;
  RangeHash local_hash_;
  bool hashing_source_ = false;
  bool hashing_local_ = false;
};

}  // namespace headrace::fabric
