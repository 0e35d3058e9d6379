#include "mapped.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "clock.h"
#include "copy.h"
#include "errors.h"
#include "keys.h"

namespace headrace::fabric {
namespace {

constexpr std::uint64_t kSlice = std::uint64_t{1} << 20;  // of a long write in one turn: about 60 us
// ns after a connection was lost or refused: where something is to be sent, and where its end is to be seen
constexpr std::uint64_t kRedial = 50'000'000;
constexpr std::uint64_t kIdleRedial = 1'000'000'000;

constexpr const char* kMap = "map the peer's memory";
constexpr const char* kUnsealed = "the peer's memory file can shrink, it must be sealed with F_SEAL_SHRINK";

Posted failed(int code, const char* call) { return {.kind = Posted::Kind::failed, .code = code, .call = call}; }

// Memory that its owner could shorten would answer whoever writes there with SIGBUS.
bool can_shrink(int memory_fd) {
  const int seals = ::fcntl(memory_fd, F_GET_SEALS);
  return seals < 0 || (seals & F_SEAL_SHRINK) == 0;
}

int sealed(int memory_fd) {
  if (can_shrink(memory_fd) && ::fcntl(memory_fd, F_ADD_SEALS, F_SEAL_SHRINK) != 0)
    throw InputError("memory_fd",
                     "must be a memfd that can be sealed (MFD_ALLOW_SEALING), for peers of this host map it and it "
                     "must not shrink; fcntl(F_SEAL_SHRINK) says: " +
                         std::string(std::strerror(errno)));
  return memory_fd;
}

}  // namespace

// ---- a link --------------------------------------------------------------------------------------------------------

MappedLink::MappedLink(Mapped& transport, std::uint64_t peer, std::string control)
    : transport_(transport), id_(transport.next_link_++), peer_(peer), control_(std::move(control)) {
  dial();  // though there is nothing to say yet: its end is to be seen
  transport_.links_[id_] = this;
}

MappedLink::~MappedLink() {
  withdraw();
  std::erase_if(transport_.granted_, [this](const auto& each) { return each.second == this; });
  transport_.links_.erase(id_);
  memory_ = Mapping();  // before the other side is told
  if (state_ != State::idle) transport_.control_.hang_up(id_);
}

const std::string& MappedLink::transport() const { return transport_.name_; }

void MappedLink::connect(const Descriptor& descriptor) {
  const bool on_device = descriptor.addressing == Addressing::cuda;
  if (!on_device && descriptor.addressing != Addressing::mapped)
    throw InputError("descriptor.addressing", "this peer is of our host: its memory is mapped");
  if (on_device && !transport_.owner_.device)
    throw InputError("descriptor.addressing", "is CUDA memory, which memory of a CUDA device alone can be copied to");
  const bool was_open = there_ == There::open;
  const std::uint64_t old = std::exchange(key_, descriptor.keys.at(0));
  length_ = descriptor.length;
  on_device_ = on_device;
  // Never asked for twice: the second answer would be confirmed as closed while the first one is mapped.
  if (there_ == There::asked && key_ == old) return;
  unmap(There::asked);
  if (was_open) transport_.control_.confirm_closed(id_, old);
  if (is_ready()) transport_.control_.open(id_, key_);
}

bool MappedLink::is_ready() {
  if (state_ == State::idle && now_ns() >= idle_since_ + kRedial) try_dial();
  return state_ == State::ready;
}

std::uint64_t MappedLink::dial_again(std::uint64_t now) {
  if (state_ == State::idle && now >= idle_since_ + kIdleRedial) try_dial();
  return state_ == State::idle ? idle_since_ + kIdleRedial : 0;
}

void MappedLink::try_dial() {
  try {
    dial();
  } catch (const FabricError&) {  // no memory or file for a lane: there may be some later
    idle_since_ = now_ns();
  }
}

void MappedLink::dial() {
  auto made = std::make_unique<OutLane>();
  Fd lane(::fcntl(made->fd(), F_DUPFD_CLOEXEC, 0));
  if (!lane) throw FabricError("fcntl(F_DUPFD_CLOEXEC)", errno, "no file for the peer's end of a lane");
  lane_ = std::move(made);
  state_ = State::dialling;
  transport_.control_.dial(id_, control_, std::move(lane));
}

void MappedLink::linked(Fd bell) {
  bell_ = std::move(bell);
  state_ = State::ready;
  lost_told_ = false;
  if (there_ == There::asked) transport_.control_.open(id_, key_);
  transport_.owner_.may_retry(peer_);
}

void MappedLink::opened(std::uint64_t key, Fd memory, std::uint64_t length) {
  if (there_ != There::asked || key != key_) return transport_.control_.confirm_closed(id_, key);
  const bool unsealed = !on_device_ && can_shrink(memory.get());
  try {
    if (unsealed || length < length_) throw InputError("memory", "is not what its descriptor says");
    memory_ = Mapping(memory.get(), length_, on_device_ ? transport_.owner_.device : nullptr);
    ::madvise(memory_.data(), length_, MADV_DONTFORK);
    there_ = There::open;
  } catch (const std::exception&) {
    end_access(unsealed ? EPERM : FI_EKEYREJECTED, unsealed ? kUnsealed : kMap);
    transport_.control_.confirm_closed(id_, key);
  }
  transport_.owner_.may_retry(peer_);
}

void MappedLink::denied(std::uint64_t key) {
  if (there_ != There::asked || key != key_) return;
  end_access(FI_EKEYREJECTED, kMap);
  transport_.owner_.may_retry(peer_);
}

void MappedLink::close_asked(std::uint64_t key) {
  if (there_ == There::open && key == key_) end_access(FI_EKEYREJECTED, kMap);
  transport_.control_.confirm_closed(id_, key);
  transport_.owner_.may_retry(peer_);
}

void MappedLink::lost(int code, const std::string& text) {
  transport_.links_.erase(id_);
  id_ = transport_.next_link_++;  // what is still told of the old one is not of the next
  transport_.links_[id_] = this;
  state_ = State::idle;
  idle_since_ = now_ns();
  lane_.reset();
  bell_ = Fd();
  if (there_ == There::open || there_ == There::asked) end_access(code, kMap);
  transport_.owner_.may_retry(peer_);
  if (!std::exchange(lost_told_, true)) transport_.owner_.news.lost(peer_, code, text);
}

void MappedLink::unmap(There now) {
  memory_ = Mapping();
  there_ = now;
}

void MappedLink::end_access(int code, const char* call) {
  unmap(There::over);
  code_ = code;
  call_ = call;
}

Posted MappedLink::post_write(std::uint64_t, const std::byte* from, const Write& write) {
  if (there_ == There::over) return failed(code_, call_);
  if (there_ != There::open) return is_ready(), Posted{.kind = Posted::Kind::full};
  std::uint64_t done = write.done;
  const std::uint64_t slice = std::min(write.length - done, kSlice);
  if (slice > 0) {
    copy(memory_.data() + write.dst + done, from + done, slice);
    fence_ = true;
    done += slice;
  }
  if (done < write.length) return {.kind = Posted::Kind::partly, .done = done};
  if (!lane_->push_imm(write.transfer->imm)) return {.kind = Posted::Kind::full, .done = done};
  pushed_ = true;
  return {.kind = Posted::Kind::finished};
}

void MappedLink::copy(std::byte* to, const std::byte* from, std::size_t length) {
  if (transport_.owner_.device) {
    transport_.owner_.device->copy(to, from, length);
  } else {
    copy_out(to, from, length);
  }
}

void MappedLink::fence() {
  if (transport_.owner_.device) {
    transport_.owner_.device->wait();
  } else {
    copy_fence();
  }
}

Posted MappedLink::post_fragment(std::uint64_t, const std::shared_ptr<OutgoingMessage>& message) {
  if (!is_ready()) return {.kind = Posted::Kind::full};
  const FragmentHeader header = next_header(*message, transport_.sender_);
  const auto payload = next_payload(*message);
  const auto bytes = std::span(reinterpret_cast<const std::byte*>(&header), sizeof header);
  if (!lane_->push_fragment(bytes, payload)) return {.kind = Posted::Kind::full};
  message->offset += payload.size();
  pushed_ = true;
  return {.kind = Posted::Kind::finished};
}

void MappedLink::flush(bool more) {
  // Though nothing is published: no copy may outlast its turn, for a transfer given up after it has said what can land.
  if (std::exchange(fence_, false)) fence();
  if (!lane_) return;
  if (std::exchange(pushed_, false)) {
    lane_->publish();
    unrung_ = true;
  }
  if (!unrung_) return;
  if (lane_->must_wake(more)) Mapped::ring(bell_);
  unrung_ = more;
}

Descriptor MappedLink::grant(std::uint32_t generation) {
  withdraw();
  told_ = false;
  const std::uint64_t key = random_key();
  granted_ = key;
  transport_.granted_[key] = this;
  transport_.control_.allow(key, transport_.memory_fd_, transport_.length_);
  return {.addressing = transport_.owner_.device ? Addressing::cuda : Addressing::mapped,
          .base = 0,
          .length = transport_.length_,
          .keys = {key},
          .generation = generation};
}

bool MappedLink::withdraw() {
  if (granted_) {
    ending_.insert(*granted_);
    transport_.control_.withdraw(*granted_);
    granted_.reset();
  }
  told_ = !ending_.empty();
  return ending_.empty();
}

void MappedLink::access_ended(std::uint64_t key) {
  ending_.erase(key);
  if (ending_.empty() && std::exchange(told_, false)) transport_.owner_.revoked(peer_);
}

// ---- all of them ---------------------------------------------------------------------------------------------------

Mapped::Mapped(std::string name, int bell, int memory_fd, std::size_t length, std::uint64_t sender,
               std::uint64_t silence_ns, Owner owner)
    : memory_fd_(owner.device ? memory_fd : sealed(memory_fd)),  // a handle of a device has no length to change
      length_(length),
      sender_(sender),
      owner_(std::move(owner)),
      news_(*this),
      control_(Wire::local, name, bell, silence_ns, news_) {}

std::unique_ptr<Link> Mapped::link(std::uint64_t peer, const std::string& control) {
  return std::make_unique<MappedLink>(*this, peer, control);
}

std::uint64_t Mapped::dial_again(std::uint64_t now) {
  std::uint64_t next = 0;
  for (auto& [id, link] : links_) {
    const std::uint64_t at = link->dial_again(now);
    if (at > 0) next = next == 0 ? at : std::min(next, at);
  }
  return next;
}

bool Mapped::has_news() const {
  return std::ranges::any_of(incoming_, [](const auto& each) { return each.second.lane->has_news(); });
}

void Mapped::lie_down() {
  for (auto& [id, in] : incoming_) in.lane->lie_down();
}

void Mapped::get_up() {
  for (auto& [id, in] : incoming_) in.lane->get_up();
}

void Mapped::ring(const Fd& bell) {
  const std::uint64_t one = 1;
  // It is an eventfd of somebody else: a full one is readable already.
  [[maybe_unused]] const auto written = ::write(bell.get(), &one, sizeof one);
}

void Mapped::end_lanes() {
  for (const std::uint64_t id : std::exchange(broken_, {})) {
    incoming_.erase(id);
    control_.drop_lane(id);
  }
  std::erase_if(leaving_, [this](std::uint64_t id) {
    const auto found = incoming_.find(id);
    if (found != incoming_.end() && found->second.lane->has_news()) return false;
    incoming_.erase(id);
    return true;
  });
}

void Mapped::with_link(std::uint64_t link, std::function<void(MappedLink&)> act) {
  owner_.news.queue([this, link, act = std::move(act)] {
    const auto found = links_.find(link);
    if (found != links_.end()) act(*found->second);
  });
}

// ---- news: on the control thread -----------------------------------------------------------------------------------

void Mapped::News::linked(std::uint64_t link, Fd bell) {
  const auto held = std::make_shared<Fd>(std::move(bell));
  mapped_.with_link(link, [held](MappedLink& to) { to.linked(std::move(*held)); });
}

void Mapped::News::opened(std::uint64_t link, std::uint64_t key, Fd memory, std::uint64_t length) {
  const auto held = std::make_shared<Fd>(std::move(memory));
  mapped_.with_link(link, [key, held, length](MappedLink& to) { to.opened(key, std::move(*held), length); });
}

void Mapped::News::denied(std::uint64_t link, std::uint64_t key) {
  mapped_.with_link(link, [key](MappedLink& to) { to.denied(key); });
}

void Mapped::News::close_asked(std::uint64_t link, std::uint64_t key) {
  mapped_.with_link(link, [key](MappedLink& to) { to.close_asked(key); });
}

void Mapped::News::silent(std::uint64_t link) {
  mapped_.with_link(link, [this](MappedLink& to) { mapped_.owner_.news.silent(to.peer()); });
}

void Mapped::News::heard(std::uint64_t link) {
  mapped_.with_link(link, [this](MappedLink& to) { mapped_.owner_.news.heard(to.peer()); });
}

void Mapped::News::lost(std::uint64_t link, int code, const std::string& text) {
  mapped_.with_link(link, [code, text](MappedLink& to) { to.lost(code, text); });
}

void Mapped::News::lane_came(std::uint64_t lane, std::shared_ptr<InLane> in, Fd bell) {
  const auto held = std::make_shared<Fd>(std::move(bell));
  mapped_.owner_.news.queue([this, lane, in = std::move(in), held] {
    mapped_.incoming_.insert_or_assign(lane, Incoming{.lane = in, .bell = std::move(*held)});
  });
}

void Mapped::News::lane_left(std::uint64_t lane) {
  mapped_.owner_.news.queue([this, lane] {
    mapped_.leaving_.push_back(lane);
    const auto found = mapped_.incoming_.find(lane);
    if (found != mapped_.incoming_.end()) found->second.lane->cut_off();  // a process that lives could go on for ever
  });
}

void Mapped::News::access_ended(std::uint64_t key) {
  mapped_.owner_.news.queue([this, key] {
    const auto found = mapped_.granted_.extract(key);
    if (found) found.mapped()->access_ended(key);
  });
}

}  // namespace headrace::fabric
