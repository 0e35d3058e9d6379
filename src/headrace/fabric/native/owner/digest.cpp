#include "owner/digest.h"

#include <algorithm>
#include <utility>

#include "clock.h"

namespace headrace::fabric {

void RangeHash::start(const std::byte* data, std::size_t length, std::uint64_t seed) {
  data_ = data;
  left_ = length;
  seed_ = seed;
  streaming_ = length > kPiece;
  if (streaming_) XXH3_64bits_reset_withSeed(&state_, seed);
}

bool RangeHash::advance() {
  if (!streaming_) {
    value_ = XXH3_64bits_withSeed(data_, left_, seed_);
    return true;
  }
  const std::size_t piece = std::min(left_, kPiece);
  XXH3_64bits_update(&state_, data_, piece);
  data_ += piece;
  left_ -= piece;
  if (left_ > 0) return false;
  value_ = XXH3_64bits_digest(&state_);
  return true;
}

Digester::Digester(const std::byte* memory, Hashed hashed, Summed summed)
    : memory_(memory), hashed_(std::move(hashed)), summed_(std::move(summed)) {}

void Digester::add(const Write& write) { sources_.push_back({write.transfer->shared_from_this(), write}); }

void Digester::add(std::uint64_t digest, std::vector<std::shared_ptr<const PageWrites>> parts,
                   std::uint64_t num_pages) {
  Local local{.digest = digest, .parts = std::move(parts), .sums = std::vector<std::uint64_t>(num_pages)};
  if (!local.parts.empty()) local.layer = local.parts.front()->layer_begin;
  locals_.push_back(std::move(local));
}

void Digester::slice(std::uint64_t deadline_ns) {
  while (!idle()) {
    const bool source = step_source();
    const bool local = step_local();
    if ((!source && !local) || now_ns() >= deadline_ns) return;
  }
}

bool Digester::step_source() {
  if (!hashing_source_) {
    // A list given up will never post its last write, and its source may be reused: not one byte more is read.
    while (!sources_.empty() && sources_.front().transfer->given_up) sources_.pop_front();
    if (sources_.empty()) return false;
    const Write& write = sources_.front().write;
    source_hash_.start(memory_ + write.src, write.length, write.seed);
    hashing_source_ = true;
  }
  Transfer& transfer = *sources_.front().transfer;
  if (!transfer.given_up) {
    if (!source_hash_.advance()) return true;
    transfer.digests[static_cast<std::size_t>(sources_.front().write.position)] += source_hash_.value();
    --transfer.num_hashing;
  }
  hashing_source_ = false;
  const auto done = std::move(sources_.front().transfer);
  sources_.pop_front();
  hashed_(*done);
  return true;
}

bool Digester::step_local() {
  if (locals_.empty()) return false;
  Local& local = locals_.front();
  if (!hashing_local_) {
    if (!next_message(local)) {
      finish_local();
      return true;
    }
    hashing_local_ = true;
  }
  if (!local_hash_.advance()) return true;
  const PageWrites& part = *local.parts[local.part];
  local.sums[static_cast<std::size_t>(part.positions[local.page])] += local_hash_.value();
  ++local.page;
  hashing_local_ = false;
  return true;
}

bool Digester::next_message(Local& local) {
  while (local.part < local.parts.size()) {
    const PageWrites& part = *local.parts[local.part];
    if (local.layer < part.layer_end && local.page < part.num_pages()) {
      const Write write = part.at(local.layer, local.page);
      local_hash_.start(memory_ + write.src, write.length, write.seed);
      return true;
    }
    local.page = 0;
    if (++local.layer >= part.layer_end && ++local.part < local.parts.size())
      local.layer = local.parts[local.part]->layer_begin;
  }
  return false;
}

void Digester::finish_local() {
  Local done = std::move(locals_.front());
  locals_.pop_front();
  summed_(done.digest, std::move(done.sums));
}

}  // namespace headrace::fabric
