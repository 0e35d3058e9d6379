// The owner's commands about write lists and digests. Each runs whole between two turns, and checks all it was given
// before it touches a table.
#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "clock.h"
#include "errors.h"
#include "owner/owner.h"

namespace headrace::fabric {
namespace {

constexpr double kNoDeadline = 1e9;                          // seconds
constexpr std::uint64_t kMaxPages = std::uint64_t{1} << 32;  // positions have 32 bits in a seed

void check_positions(const PageWrites& writes, std::uint64_t num_pages, const std::string& field) {
  for (const std::int64_t position : writes.positions)
    if (position < 0 || static_cast<std::uint64_t>(position) >= num_pages)
      throw InputError(field + ".positions",
                       std::to_string(position) + " is not in [0, " + std::to_string(num_pages) + ")");
}

}  // namespace

const std::shared_ptr<Transfer>& Owner::transfer_of(std::uint64_t transfer) {
  const auto found = transfers_.find(transfer);
  if (found == transfers_.end()) throw InputError("transfer", std::to_string(transfer) + " is unknown or already done");
  return found->second;
}

const std::shared_ptr<Transfer>& Owner::open_list(std::uint64_t transfer) {
  const auto& found = transfer_of(transfer);
  if (found->ended) throw InputError("transfer", "the list of " + std::to_string(transfer) + " is ended");
  return found;
}

void Owner::check_digests(std::uint64_t num_pages) const {
  if (num_pages >= kMaxPages) throw InputError("num_pages", "must be below 2**32");
  // Hashing is the owner's, which cannot look into it.
  if (num_pages > 0 && on_device_) throw InputError("num_pages", "must be 0: CUDA memory has no digests");
}

void Owner::check_source(const PageWrites& writes, const std::string& field) const {
  if (!writes.src.within(memory_.length(), writes.layer_begin, writes.layer_end, writes.length))
    throw InputError(field, "beyond the memory of " + std::to_string(memory_.length()) + " bytes");
}

void Owner::check_last(const Transfer& transfer, const LastWrite& last) const {
  const std::uint64_t length = memory_.length();
  if (last.length > length || last.src > length - last.length)
    throw InputError("last.src_offset", "beyond the memory of " + std::to_string(length) + " bytes");
  const std::uint64_t digests = transfer.digests.size() * sizeof(std::uint64_t);
  if (digests > last.length || last.digests_at > last.length - digests)
    throw InputError("last.digests_at", std::to_string(digests) + " bytes of digests do not fit in the last write");
}

bool Owner::check_target(Transfer& transfer, const PageWrites& writes) {
  if (writes.dst.within(transfer.target.length, writes.layer_begin, writes.layer_end, writes.length)) return true;
  transfer.fail(FI_EINVAL, "destination beyond the peer's memory");
  return false;
}

bool Owner::check_target(Transfer& transfer, const LastWrite& last) {
  const std::uint64_t length = transfer.target.length;
  if (last.length <= length && last.dst <= length - last.length) return true;
  transfer.fail(FI_EINVAL, "destination of the last write beyond the peer's memory");
  return false;
}

std::uint64_t Owner::open_transfer(std::uint64_t peer, std::uint32_t imm, std::uint64_t num_pages, double deadline_s) {
  const auto open = [this, peer, imm, num_pages, deadline_s] {
    if (!(deadline_s >= 0)) throw InputError("deadline_s", "must be at least 0");
    const Peer& to = peer_of(peer);
    if (!to.target) throw InputError("peer", std::to_string(peer) + " is not connected: no descriptor of its memory");
    check_digests(num_pages);
    auto transfer = std::make_shared<Transfer>();
    transfer->id = next_transfer_++;
    transfer->peer = peer;
    transfer->imm = imm;
    transfer->target = *to.target;
    transfer->digests.resize(num_pages);
    ++num_transfers_;
    transfers_[transfer->id] = transfer;
    if (deadline_s < kNoDeadline)
      deadlines_.emplace(now_ns() + static_cast<std::uint64_t>(deadline_s * 1e9), transfer->id);
    return transfer->id;
  };
  return deadline_s < kNoDeadline ? call(open) : ask(open);
}

void Owner::submit_pages(std::uint64_t transfer, PageWrites writes) {
  post([this, transfer, writes = std::move(writes)]() mutable {
    const auto list = open_list(transfer);
    check_source(writes, "writes.src");
    if (!list->digests.empty()) check_positions(writes, list->digests.size(), "writes");
    if (list->given_up) return;
    if (!check_target(*list, writes)) return give_up(*list);
    queue_writes(list, std::move(writes));
  });
}

void Owner::submit_write(std::uint64_t transfer, std::uint64_t src, std::uint64_t dst, std::uint64_t length) {
  post([=, this] {
    const auto list = open_list(transfer);
    const auto whole = PageWrites::single(src, dst, length);
    check_source(whole, "src_offset");
    if (list->given_up) return;
    if (!check_target(*list, whole)) return give_up(*list);
    // Equal shares; the last one takes what does not divide.
    const std::uint64_t num = cuts(peer_of(list->peer), length);
    const std::uint64_t share = length / num;
    for (std::uint64_t i = 0; i < num; ++i) {
      const std::uint64_t part = i + 1 < num ? share : length - share * i;
      queue_writes(list, PageWrites::single(src + share * i, dst + share * i, part));
    }
  });
}

void Owner::queue_writes(const std::shared_ptr<Transfer>& list, PageWrites writes) {
  list->num_unposted += writes.num_writes();
  peer_of(list->peer).writes.add_ready(Part{list, std::make_shared<PageWrites>(std::move(writes))});
}

void Owner::submit_last(std::uint64_t transfer, std::optional<LastWrite> last) {
  post([this, transfer, last] {
    const auto list = open_list(transfer);
    if (last) check_last(*list, *last);
    list->ended = true;
    if (list->given_up) return;
    if (last && !check_target(*list, *last)) return give_up(*list);
    list->last = last;
    list->last_open = true;
    settle(*list);
  });
}

void Owner::submit_program(std::uint64_t step, ProgramWrites writes, std::vector<GatedLast> lasts) {
  call([this, step, writes = std::move(writes), lasts = std::move(lasts)]() mutable {
    if (any_step_ && step <= last_step_)
      throw InputError("step", "must be above " + std::to_string(last_step_) + ", the step submitted before");
    std::vector<Part> parts;
    for (auto& [transfer, pages] : writes) {
      const auto list = open_list(transfer);
      check_source(pages, "writes.src");
      if (!list->digests.empty()) check_positions(pages, list->digests.size(), "writes");
      parts.push_back(Part{list, std::make_shared<PageWrites>(std::move(pages))});
    }
    std::vector<std::uint64_t> ending;
    for (const GatedLast& gated : lasts) {
      check_last(*open_list(gated.transfer), gated.last);
      if (std::ranges::count(ending, gated.transfer) > 0)
        throw InputError("last", "transfer " + std::to_string(gated.transfer) + " has two last writes");
      ending.push_back(gated.transfer);
    }
    any_step_ = true;
    last_step_ = step;
    queue_program(step, std::move(parts), lasts);
  });
}

void Owner::queue_program(std::uint64_t step, std::vector<Part> parts, const std::vector<GatedLast>& lasts) {
  std::map<std::uint64_t, std::pair<std::vector<Part>, std::vector<ProgramLast>>> programs;  // by peer
  auto& members = steps_[step];
  for (Part& part : parts) {
    const auto list = part.transfer;
    members.push_back(list->id);
    if (list->given_up) continue;
    if (!check_target(*list, *part.writes)) {
      give_up(*list);
      continue;
    }
    list->num_unposted += part.writes->num_writes();
    programs[list->peer].first.push_back(std::move(part));
  }
  for (const GatedLast& gated : lasts) {
    const auto list = transfer_of(gated.transfer);
    members.push_back(list->id);
    list->ended = true;
    if (list->given_up) continue;
    if (!check_target(*list, gated.last)) {
      give_up(*list);
      continue;
    }
    list->last = gated.last;
    programs[list->peer].second.push_back(ProgramLast{list, step * kLayersPerStep + gated.num_layers});
  }
  for (auto& [peer, program] : programs)
    peer_of(peer).writes.add_program(Program(step, std::move(program.first), std::move(program.second)));
  look_again_ = true;
}

std::vector<std::pair<std::uint64_t, std::uint64_t>> Owner::fail_step(std::uint64_t step) {
  return ask([this, step] {
    std::vector<std::pair<std::uint64_t, std::uint64_t>> closed;
    const auto found = steps_.find(step);
    if (found == steps_.end()) return closed;
    for (auto& [id, peer] : peers_) peer.writes.drop_program(step);
    auto members = found->second;
    std::ranges::sort(members);
    const auto repeated = std::ranges::unique(members);
    members.erase(repeated.begin(), repeated.end());
    for (const std::uint64_t member : members) {
      const auto transfer = transfers_.find(member);
      if (transfer == transfers_.end()) continue;
      const auto list = transfer->second;
      list->ended = true;
      give_up(*list);
      closed.emplace_back(member, list->num_posted);
    }
    return closed;
  });
}

std::uint64_t Owner::close_transfer(std::uint64_t transfer) {
  return ask([this, transfer] {
    const auto list = transfer_of(transfer);
    list->ended = true;
    give_up(*list);
    return list->num_posted;
  });
}

void Owner::give_up(Transfer& transfer) {
  if (!transfer.complete) transfer.given_up = true;
  settle(transfer);
}

void Owner::settle(Transfer& transfer) {
  if (transfer.may_queue_last()) {
    const LastWrite& last = *transfer.last;
    const auto& digests = transfer.digests;
    if (!digests.empty())
      std::memcpy(memory_.data() + last.src + last.digests_at, digests.data(), digests.size() * sizeof digests[0]);
    transfer.last_queued = true;
    peer_of(transfer.peer).writes.add_last(transfer.shared_from_this());
  }
  if (transfer.may_complete()) transfer.complete = true;
  if (transfer.told || !transfer.over()) return;
  transfer.told = true;
  // Hashing what nobody will read is over with it: its source pages may be reused from here on.
  transfer.given_up = true;
  --num_transfers_;
  events_->append(TransferDone{.transfer = transfer.id,
                               .num_posted = transfer.num_posted,
                               .num_failed = transfer.num_failed,
                               .complete = transfer.complete,
                               .code = transfer.code,
                               .text = transfer.text});
}

void Owner::forget_told() {
  std::vector<std::uint64_t> told;
  {
    const std::lock_guard guard(mutex_);
    told.swap(told_);
  }
  forget(told);
}

void Owner::forget(const std::vector<std::uint64_t>& told) {
  if (told.empty()) return;
  for (const std::uint64_t id : told) transfers_.erase(id);
  std::erase_if(steps_, [this](const auto& step) {
    return std::ranges::none_of(step.second, [this](std::uint64_t id) { return transfers_.contains(id); });
  });
}

std::uint64_t Owner::submit_digest(std::vector<PageWrites> reads, std::uint64_t num_pages) {
  return call([this, reads = std::move(reads), num_pages]() mutable {
    check_digests(num_pages);
    std::vector<std::shared_ptr<const PageWrites>> parts;
    for (PageWrites& read : reads) {
      check_source(read, "reads.pages");
      check_positions(read, num_pages, "reads");
      parts.push_back(std::make_shared<const PageWrites>(std::move(read)));
    }
    const std::uint64_t digest = next_digest_++;
    digester_.add(digest, std::move(parts), num_pages);
    return digest;
  });
}

}  // namespace headrace::fabric
