#include "near/shm.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "errors.h"
#include "near/shm_files.h"
#include "signals.h"

namespace headrace::fabric {
namespace {

// The reader copies all that it finds: in one turn, and what it writes for waits meanwhile. About 1 ms.
constexpr std::uint64_t kVisitBytes = std::uint64_t{4} << 20;

bool is_readable(const Fd& fd) {
  pollfd waited{fd.get(), POLLIN, 0};
  return ::poll(&waited, 1, 0) == 1;
}

}  // namespace

// ---- a link --------------------------------------------------------------------------------------------------------

ShmLink::ShmLink(Shm& transport, std::uint64_t peer, std::string control)
    : NeighbourLink(transport, peer, std::move(control)), transport_(transport) {
  transport_.all_.insert(this);
}

ShmLink::~ShmLink() {
  withdraw();
  transport_.all_.erase(this);
}

std::uint64_t ShmLink::prepare() {
  auto end = std::make_unique<ShmEnd>();
  const std::uint64_t token = end->token();
  ends_.insert_or_assign(key_, std::move(end));
  return token;
}

void ShmLink::enter(Fd, std::uint64_t token) { ends_.at(key_)->join(process_.number, token); }

bool ShmLink::replace(std::uint64_t key) {
  const auto found = ends_.find(key);
  // What is under way there may still complete, or the peer takes that key back.
  if (found == ends_.end() || found->second->endpoint().num_taken() > 0) return false;
  ends_.erase(found);
  return true;
}

void ShmLink::leave(std::uint64_t key) {
  auto left = ends_.extract(key);
  if (left) fail(std::move(left.mapped()), FI_EKEYREJECTED, "the peer took its memory back");
}

void ShmLink::cut_off() {
  for (auto& [key, end] : ends_)
    if (has_more(end->endpoint())) orphans_.push_back({.end = std::move(end), .process = process_.ends});
  ends_.clear();
  inside_ = unread_ = waits_ = false;
  num_unheard_bytes_ = 0;
  end_orphans();
}

// After those that have completed. Nothing is posted, so the lane need not be entered: libfabric waits for none but its
// own lock then.
bool ShmLink::has_more(Endpoint& endpoint) {
  std::vector<Completion> completed;
  endpoint.read(completed);
  for (Completion& each : completed) transport_.owner_.complete(each);
  return endpoint.num_taken() > 0;
}

void ShmLink::fail(std::unique_ptr<ShmEnd> end, int code, const std::string& text) {
  std::vector<Completion> failed;
  if (has_more(end->endpoint())) end->endpoint().fail_all(code, text, failed);
  for (Completion& each : failed) transport_.owner_.complete(each);
}

// As long as the process lives it may read what we write from.
void ShmLink::end_orphans() {
  for (std::size_t i = 0; i < orphans_.size();) {
    if (!is_readable(*orphans_[i].process)) {
      ++i;
      continue;
    }
    auto end = std::move(orphans_[i].end);
    orphans_.erase(orphans_.begin() + static_cast<long>(i));
    fail(std::move(end), ECONNRESET, "its process has exited");
  }
}

void ShmLink::abandon(std::uint64_t peer) {
  for (auto& [key, end] : ends_) end->endpoint().abandon(peer);
  for (auto& orphan : orphans_) orphan.end->endpoint().abandon(peer);
}

Posted ShmLink::post_write(std::uint64_t peer, const std::byte* from, const Write& write) {
  if (there_ == There::over) return refused();
  if (there_ != There::open) return is_ready(), Posted{.kind = Posted::Kind::full};
  const bool has_room = num_unheard_bytes_ < kVisitBytes && (inside_ || (inside_ = lane_->try_enter()));
  if (!has_room) return waits_ = true, Posted{.kind = Posted::Kind::full};
  ShmEnd& end = *ends_.at(key_);
  Op* op = end.endpoint().take(OpKind::write);
  op->peer = peer;
  op->transfer = write.transfer->shared_from_this();
  const RemotePlace place{.at = base_ + write.dst, .key = key_};
  const long rc = end.endpoint().post_write(op, end.other(), from, write.length, write.transfer->imm, place);
  if (rc == 0) {
    unread_ = true;
    num_unheard_bytes_ += write.length;
    return {.kind = Posted::Kind::under_way};
  }
  end.endpoint().recycle(op, false);
  if (rc != -FI_EAGAIN) return {.kind = Posted::Kind::failed, .code = static_cast<int>(-rc), .call = "fi_writedata"};
  waits_ = true;  // also while the ends get to know each other
  return {.kind = Posted::Kind::full};
}

// The reader is woken though more may follow: what follows may have to wait for it.
void ShmLink::flush(bool) {
  if (std::exchange(inside_, false)) unrung_ |= lane_->leave(true);
  NeighbourLink::flush(false);
}

void ShmLink::read(std::vector<Completion>& completions) {
  if (!orphans_.empty()) end_orphans();
  if (!has_news() || !lane_->try_enter()) return;
  const bool heard = lane_->hear();
  const std::size_t before = completions.size();
  for (auto& [key, end] : ends_) end->endpoint().read(completions);
  const std::size_t num_new = completions.size() - before;
  unread_ = num_new > 0;
  // Where libfabric may not read our memory from there, long writes go over piece by piece: another visit for each.
  const bool again = heard && num_under_way() > num_new;
  unrung_ |= lane_->leave(again);
  NeighbourLink::flush(false);
  if (!heard) return;
  waits_ = false;
  num_unheard_bytes_ = 0;
  transport_.owner_.may_retry(this->peer());
}

void ShmLink::lie_down() {
  if (lane_ && (waits_ || num_under_way() > 0)) lane_->await();
}

void ShmLink::add_wait_fds(std::vector<int>& fds) const {
  for (const auto& orphan : orphans_) fds.push_back(orphan.process->get());
}

std::uint64_t ShmLink::num_under_way() const {
  std::uint64_t sum = 0;
  for (const auto& [key, end] : ends_) sum += end->endpoint().num_taken();
  return sum;
}

Descriptor ShmLink::grant(std::uint32_t generation) {
  withdraw();
  const std::uint64_t key = new_key();
  granted_ = key;
  transport_.control_.allow(key, -1, transport_.length_);
  return {.addressing = Addressing::virtual_address,
          .base = reinterpret_cast<std::uint64_t>(transport_.memory_),
          .length = transport_.length_,
          .keys = {key},
          .generation = generation};
}

// First our end, then the peer is told.
bool ShmLink::withdraw() {
  if (!granted_) return true;
  transport_.close(*granted_);
  transport_.granted_.erase(*granted_);
  transport_.control_.withdraw(*granted_);
  granted_.reset();
  return true;
}

// ---- all of them ---------------------------------------------------------------------------------------------------

Shm::Shm(const Place& place, std::byte* memory, std::size_t length, Owner owner)
    : Neighbours("shm", Wire::shm, Addressing::virtual_address, place, std::move(owner)),
      memory_(memory),
      length_(length) {
  sweep_shm_files();
  require_shm_room(static_cast<std::uint64_t>(::sysconf(_SC_NPROCESSORS_ONLN)));  // fi_getinfo wants that
  // The first one replaces the process's handlers of signals, which Python may be setting later on.
  const SignalHandlers handlers;
  ShmEnd first;
  traits_ = first.endpoint().traits();
}

std::unique_ptr<Link> Shm::link(std::uint64_t peer, const std::string& control) {
  return std::make_unique<ShmLink>(*this, peer, control);
}

void Shm::read_completions(std::vector<Completion>& completions) {
  for (auto& [lane, in] : incoming_) {
    if (!in.lane->may_visit() || !in.lane->try_enter()) continue;
    const auto found = inlets_.find(lane);
    if (found != inlets_.end())
      for (auto& inlet : found->second) inlet->end.endpoint().read(completions);
    in.lane->leave();
    if (in.lane->made_room()) ring(in.bell);
  }
  for (ShmLink* link : all_) link->read(completions);
}

void Shm::lie_down() {
  Neighbours::lie_down();
  for (ShmLink* link : all_) link->lie_down();
}

bool Shm::may_sleep() {
  return Neighbours::may_sleep() && std::ranges::none_of(all_, [](ShmLink* link) { return link->has_news(); });
}

void Shm::add_wait_fds(std::vector<int>& fds) const {
  for (ShmLink* link : all_) link->add_wait_fds(fds);
}

void Shm::open_asked(std::uint64_t lane, std::uint64_t key, std::uint64_t token, pid_t process) {
  std::uint64_t ours = 0;
  try {
    if (granted_.contains(key) && incoming_.contains(lane)) ours = open(lane, key, token, process);
  } catch (const std::exception&) {  // it is told that it may not; what is missing here its own end will miss as well
  }
  control_.answer(lane, key, ours);
}

std::uint64_t Shm::open(std::uint64_t lane, std::uint64_t key, std::uint64_t token, pid_t process) {
  auto& inlets = inlets_[lane];
  std::erase_if(inlets, [key](const auto& each) { return each->key == key; });
  auto inlet = std::make_unique<Inlet>(key);
  inlet->access = inlet->end.endpoint().register_shared(memory_, length_, FI_REMOTE_WRITE, key);
  inlet->end.join(process, token);
  inlets.push_back(std::move(inlet));
  return inlets.back()->end.token();
}

void Shm::close(std::uint64_t key) {
  for (auto& [lane, inlets] : inlets_) std::erase_if(inlets, [key](const auto& each) { return each->key == key; });
}

}  // namespace headrace::fabric
