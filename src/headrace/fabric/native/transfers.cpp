#include "transfers.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace headrace::fabric {

void Transfer::fail(int error, const std::string& why) {
  if (code != 0) return;
  code = error;
  text = why;
}

bool Pages::within(std::uint64_t limit, std::uint32_t layer_begin, std::uint32_t layer_end,
                   std::uint64_t length) const {
  if (indices.empty() || layer_begin == layer_end) return true;
  using Wide = __int128;  // indices and strides come from outside: no product of theirs may wrap
  const auto [low, high] = std::minmax_element(indices.begin(), indices.end());
  for (const std::int64_t index : {*low, *high}) {
    for (const std::uint32_t layer : {layer_begin, layer_end - 1}) {
      const Wide at = Wide{offset} + Wide{layer} * layer_stride + Wide{index} * page_stride;
      if (at < 0 || at + Wide{length} > Wide{limit}) return false;
    }
  }
  return true;
}

PageWrites PageWrites::single(std::uint64_t src, std::uint64_t dst, std::uint64_t length) {
  const auto place = [](std::uint64_t offset) {
    return Pages{.offset = static_cast<std::int64_t>(offset), .layer_stride = 0, .page_stride = 0, .indices = {0}};
  };
  PageWrites writes;
  writes.src = place(src);
  writes.dst = place(dst);
  writes.positions = {-1};
  writes.layer_end = 1;
  writes.length = length;
  return writes;
}

Write PageWrites::at(std::uint32_t layer, std::size_t page) const {
  const std::int64_t position = positions[page];
  Write write;
  write.src = src.at(layer, page);
  write.dst = dst.indices.empty() ? 0 : dst.at(layer, page);
  write.length = length;
  write.seed = static_cast<std::uint64_t>(position) << 32 | std::uint64_t{layer} << 16 | route;
  write.position = position;
  return write;
}

Program::Program(Part part) : layer_(part.writes->layer_begin), layer_end_(part.writes->layer_end) {
  parts_.push_back(std::move(part));
}

Program::Program(std::uint64_t step, std::vector<Part> parts, std::vector<ProgramLast> lasts)
    : gated_(true), step_(step), parts_(std::move(parts)), lasts_(std::move(lasts)) {
  layer_ = std::numeric_limits<std::uint32_t>::max();
  for (const Part& part : parts_) {
    layer_ = std::min(layer_, part.writes->layer_begin);
    layer_end_ = std::max(layer_end_, part.writes->layer_end);
  }
}

void Program::peek(std::uint64_t counter, std::size_t limit, std::vector<Write>& run) {
  for (; layer_ < layer_end_; ++layer_, part_ = 0, page_ = 0, done_ = 0) {
    if (gated_ && counter < step_ * kLayersPerStep + layer_ + 1) return;
    for (; part_ < parts_.size(); ++part_, page_ = 0, done_ = 0) {
      const auto& [transfer, writes] = parts_[part_];
      const bool covers = writes->layer_begin <= layer_ && layer_ < writes->layer_end;
      if (transfer->given_up || !covers || page_ >= writes->num_pages()) continue;
      const std::size_t end = page_ + std::min(limit, writes->num_pages() - page_);
      for (std::size_t page = page_; page < end; ++page) {
        Write& write = run.emplace_back(writes->at(layer_, page));
        write.transfer = transfer.get();
        if (transfer->digests.empty()) write.position = -1;
      }
      run.front().done = done_;
      return;
    }
  }
}

void Program::open_lasts(std::uint64_t counter, std::vector<std::shared_ptr<Transfer>>& opened) {
  std::erase_if(lasts_, [&](const ProgramLast& last) {
    if (counter < last.gate) return false;
    last.transfer->last_open = true;
    opened.push_back(last.transfer);
    return true;
  });
}

std::uint64_t Program::gate() const {
  std::uint64_t gate = std::numeric_limits<std::uint64_t>::max();
  if (layer_ < layer_end_) gate = step_ * kLayersPerStep + layer_ + 1;
  for (const ProgramLast& last : lasts_) gate = std::min(gate, last.gate);
  return gate;
}

void WriteQueue::drop_program(std::uint64_t step) {
  std::erase_if(programs_, [step](const Program& program) { return program.step() == step; });
}

std::span<const Write> WriteQueue::peek(std::uint64_t counter, std::size_t limit) {
  run_.clear();
  // A last write makes a request ready: first. Then by turns, so that neither a long hit nor a step starves the other.
  peek_last();
  for (const bool programs : {programs_first_, !programs_first_}) {
    if (!run_.empty()) break;
    programs ? peek_program(counter, limit) : peek_ready(limit);
  }
  return run_;
}

void WriteQueue::advance(std::size_t count) {
  if (count == 0) return;
  if (from_ == From::lasts) return last_done_ = 0, lasts_.pop_front();
  programs_first_ = from_ == From::ready;
  (from_ == From::ready ? ready_ : programs_).front().advance(count);
}

void WriteQueue::keep(std::uint64_t done) {
  if (from_ == From::lasts) {
    last_done_ = done;
  } else {
    (from_ == From::ready ? ready_ : programs_).front().keep(done);
  }
}

void WriteQueue::peek_last() {
  for (; !lasts_.empty() && lasts_.front()->given_up; lasts_.pop_front()) last_done_ = 0;
  if (lasts_.empty()) return;
  from_ = From::lasts;
  const LastWrite& last = *lasts_.front()->last;
  Write& write = run_.emplace_back();
  write.transfer = lasts_.front().get();
  write.src = last.src;
  write.dst = last.dst;
  write.length = last.length;
  write.last = true;
  write.done = last_done_;
}

void WriteQueue::peek_ready(std::size_t limit) {
  from_ = From::ready;
  for (; !ready_.empty(); ready_.pop_front()) {
    ready_.front().peek(0, limit, run_);
    if (!run_.empty()) return;
  }
}

void WriteQueue::peek_program(std::uint64_t counter, std::size_t limit) {
  from_ = From::programs;
  for (; !programs_.empty(); programs_.pop_front()) {
    programs_.front().peek(counter, limit, run_);
    if (!run_.empty() || !programs_.front().finished()) return;
  }
}

void WriteQueue::open_lasts(std::uint64_t counter, std::vector<std::shared_ptr<Transfer>>& opened) {
  for (Program& program : programs_) program.open_lasts(counter, opened);
}

std::uint64_t WriteQueue::gate() const {
  return programs_.empty() ? std::numeric_limits<std::uint64_t>::max() : programs_.front().gate();
}

}  // namespace headrace::fabric
