#include "near/neighbours.h"

#include <algorithm>
#include <utility>

#include "clock.h"
#include "errors.h"
#include "keys.h"

namespace headrace::fabric {
namespace {

// ns after a connection was lost or refused: where something is to be sent, and where its end is to be seen
constexpr std::uint64_t kRedial = 50'000'000;
constexpr std::uint64_t kIdleRedial = 1'000'000'000;

constexpr const char* kOpen = "open the peer's memory";

}  // namespace

// ---- a link --------------------------------------------------------------------------------------------------------

NeighbourLink::NeighbourLink(Neighbours& group, std::uint64_t peer, std::string control)
    : group_(group), id_(group.next_link_++), peer_(peer), control_(std::move(control)) {
  dial();  // though there is nothing to say yet: its end is to be seen
  group_.links_[id_] = this;
}

// Whoever derives has let go of what is open there: only now the other side is told.
NeighbourLink::~NeighbourLink() {
  std::erase_if(group_.granted_, [this](const auto& each) { return each.second == this; });
  group_.links_.erase(id_);
  if (state_ != State::idle) group_.control_.hang_up(id_);
}

const std::string& NeighbourLink::transport() const { return group_.name_; }

void NeighbourLink::connect(const Descriptor& descriptor) {
  require(descriptor);
  const bool was_open = there_ == There::open;
  const std::uint64_t old = std::exchange(key_, descriptor.keys.at(0));
  base_ = descriptor.base;
  length_ = descriptor.length;
  // Never asked for twice: the second answer would be confirmed as closed while the first one is open.
  if ((there_ == There::asked || was_open) && key_ == old) return;
  there_ = There::asked;
  if (replace(old) && was_open) group_.control_.confirm_closed(id_, old);
  if (is_ready()) ask();
}

void NeighbourLink::require(const Descriptor& descriptor) {
  if (descriptor.addressing != group_.addressing_)
    throw InputError("descriptor.addressing", "this peer is of our host: its memory is reached by " + group_.name_);
}

void NeighbourLink::ask() {
  try {
    group_.control_.open(id_, key_, prepare());
  } catch (const FabricError& error) {
    end_access(error.code, error.call);
  }
}

void NeighbourLink::end_access(int code, std::string call) {
  there_ = There::over;
  code_ = code;
  call_ = std::move(call);
  group_.owner_.may_retry(peer_);
}

bool NeighbourLink::is_ready() {
  if (state_ == State::idle && now_ns() >= idle_since_ + kRedial) try_dial();
  return state_ == State::ready;
}

std::uint64_t NeighbourLink::dial_again(std::uint64_t now) {
  if (state_ == State::idle && now >= idle_since_ + kIdleRedial) try_dial();
  return state_ == State::idle ? idle_since_ + kIdleRedial : 0;
}

void NeighbourLink::try_dial() {
  try {
    dial();
  } catch (const FabricError&) {  // no memory or file for a lane: there may be some later
    idle_since_ = now_ns();
  }
}

void NeighbourLink::dial() {
  auto made = std::make_unique<OutLane>();
  Fd lane(::fcntl(made->fd(), F_DUPFD_CLOEXEC, 0));
  if (!lane) throw FabricError("fcntl(F_DUPFD_CLOEXEC)", errno, "no file for the peer's end of a lane");
  lane_ = std::move(made);
  state_ = State::dialling;
  group_.control_.dial(id_, control_, std::move(lane));
}

void NeighbourLink::linked(Process there, Fd bell) {
  process_ = std::move(there);
  bell_ = std::move(bell);
  state_ = State::ready;
  lost_told_ = false;
  if (there_ == There::asked) ask();
  group_.owner_.may_retry(peer_);
}

void NeighbourLink::opened(std::uint64_t key, Fd memory, std::uint64_t told) {
  if (there_ != There::asked || key != key_) return group_.control_.confirm_closed(id_, key);
  try {
    enter(std::move(memory), told);
    there_ = There::open;
    group_.owner_.may_retry(peer_);
    return;
  } catch (const FabricError& error) {
    end_access(error.code, error.call);
  } catch (const std::exception&) {
    end_access(FI_EKEYREJECTED, kOpen);
  }
  leave(key);
  group_.control_.confirm_closed(id_, key);
}

void NeighbourLink::denied(std::uint64_t key) {
  leave(key);
  if (there_ == There::asked && key == key_) end_access(FI_EKEYREJECTED, kOpen);
}

void NeighbourLink::close_asked(std::uint64_t key) {
  leave(key);
  group_.control_.confirm_closed(id_, key);
  if (there_ == There::open && key == key_) end_access(FI_EKEYREJECTED, kOpen);
  group_.owner_.may_retry(peer_);
}

void NeighbourLink::lost(int code, const std::string& text) {
  group_.links_.erase(id_);
  id_ = group_.next_link_++;  // what is still told of the old one is not of the next
  group_.links_[id_] = this;
  state_ = State::idle;
  idle_since_ = now_ns();
  if (there_ == There::open || there_ == There::asked) end_access(code, kOpen);
  cut_off();
  lane_.reset();
  bell_ = Fd();
  group_.owner_.may_retry(peer_);
  if (!std::exchange(lost_told_, true)) group_.owner_.news.lost(peer_, code, text);
}

Posted NeighbourLink::post_fragment(std::uint64_t, const std::shared_ptr<OutgoingMessage>& message) {
  if (!is_ready()) return {.kind = Posted::Kind::full};
  const FragmentHeader header = next_header(*message, group_.sender_);
  const auto payload = next_payload(*message);
  const auto bytes = std::span(reinterpret_cast<const std::byte*>(&header), sizeof header);
  if (!lane_->push_fragment(bytes, payload)) return {.kind = Posted::Kind::full};
  message->offset += payload.size();
  pushed_ = true;
  return {.kind = Posted::Kind::finished};
}

void NeighbourLink::flush(bool more) {
  if (!lane_) return;
  if (std::exchange(pushed_, false)) {
    lane_->publish();
    unrung_ = true;
  }
  if (!unrung_) return;
  if (lane_->must_wake(more)) Neighbours::ring(bell_);
  unrung_ = more;
}

std::uint64_t NeighbourLink::new_key() {
  const std::uint64_t key = random_key();
  group_.granted_[key] = this;
  return key;
}

// ---- all of them ---------------------------------------------------------------------------------------------------

Neighbours::Neighbours(std::string name, Wire wire, Addressing addressing, const Place& place, Owner owner)
    : owner_(std::move(owner)),
      name_(std::move(name)),
      addressing_(addressing),
      sender_(place.sender),
      news_(*this),
      control_(wire, place.control, place.bell, place.silence_ns, news_) {}

std::uint64_t Neighbours::dial_again(std::uint64_t now) {
  std::uint64_t next = 0;
  for (auto& [id, link] : links_) {
    const std::uint64_t at = link->dial_again(now);
    if (at > 0) next = next == 0 ? at : std::min(next, at);
  }
  return next;
}

void Neighbours::lie_down() {
  for (auto& [id, in] : incoming_) in.lane->lie_down();
}

bool Neighbours::may_sleep() {
  return std::ranges::none_of(incoming_, [this](const auto& each) { return has_news(each.second); });
}

void Neighbours::get_up() {
  for (auto& [id, in] : incoming_) in.lane->get_up();
}

void Neighbours::ring(const Fd& bell) {
  const std::uint64_t one = 1;
  // It is an eventfd of somebody else: a full one is readable already.
  [[maybe_unused]] const auto written = ::write(bell.get(), &one, sizeof one);
}

void Neighbours::end_lanes() {
  for (const std::uint64_t id : std::exchange(broken_, {})) {
    incoming_.erase(id);
    lane_ended(id);
    control_.drop_lane(id);
  }
  std::erase_if(leaving_, [this](std::uint64_t id) {
    const auto found = incoming_.find(id);
    if (found != incoming_.end() && has_news(found->second)) return false;
    lane_ended(id);
    incoming_.erase(id);
    return true;
  });
}

void Neighbours::with_link(std::uint64_t link, std::function<void(NeighbourLink&)> act) {
  owner_.news.queue([this, link, act = std::move(act)] {
    const auto found = links_.find(link);
    if (found != links_.end()) act(*found->second);
  });
}

// ---- news: on the control thread -----------------------------------------------------------------------------------

void Neighbours::News::linked(std::uint64_t link, Process there, Fd bell) {
  const auto held = std::make_shared<std::pair<Process, Fd>>(std::move(there), std::move(bell));
  group_.with_link(link, [held](NeighbourLink& to) { to.linked(std::move(held->first), std::move(held->second)); });
}

void Neighbours::News::opened(std::uint64_t link, std::uint64_t key, Fd memory, std::uint64_t told) {
  const auto held = std::make_shared<Fd>(std::move(memory));
  group_.with_link(link, [key, held, told](NeighbourLink& to) { to.opened(key, std::move(*held), told); });
}

void Neighbours::News::denied(std::uint64_t link, std::uint64_t key) {
  group_.with_link(link, [key](NeighbourLink& to) { to.denied(key); });
}

void Neighbours::News::close_asked(std::uint64_t link, std::uint64_t key) {
  group_.with_link(link, [key](NeighbourLink& to) { to.close_asked(key); });
}

void Neighbours::News::silent(std::uint64_t link) {
  group_.with_link(link, [this](NeighbourLink& to) { group_.owner_.news.silent(to.peer()); });
}

void Neighbours::News::heard(std::uint64_t link) {
  group_.with_link(link, [this](NeighbourLink& to) { group_.owner_.news.heard(to.peer()); });
}

void Neighbours::News::lost(std::uint64_t link, int code, const std::string& text) {
  group_.with_link(link, [code, text](NeighbourLink& to) { to.lost(code, text); });
}

void Neighbours::News::lane_came(std::uint64_t lane, std::shared_ptr<InLane> in, Fd bell) {
  const auto held = std::make_shared<Fd>(std::move(bell));
  group_.owner_.news.queue([this, lane, in = std::move(in), held] {
    group_.incoming_.insert_or_assign(lane, Incoming{.lane = in, .bell = std::move(*held)});
  });
}

void Neighbours::News::lane_left(std::uint64_t lane) {
  group_.owner_.news.queue([this, lane] {
    group_.leaving_.push_back(lane);
    const auto found = group_.incoming_.find(lane);
    if (found != group_.incoming_.end()) found->second.lane->cut_off();  // a process that lives could go on for ever
  });
}

void Neighbours::News::open_asked(std::uint64_t lane, std::uint64_t key, std::uint64_t told, pid_t process) {
  group_.owner_.news.queue([this, lane, key, told, process] { group_.open_asked(lane, key, told, process); });
}

void Neighbours::News::access_ended(std::uint64_t key) {
  group_.owner_.news.queue([this, key] {
    const auto found = group_.granted_.extract(key);
    if (found) found.mapped()->access_ended(key);
  });
}

}  // namespace headrace::fabric
