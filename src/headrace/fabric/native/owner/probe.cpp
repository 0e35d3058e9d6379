// Round trips between two owners, with no Python in them: what the transport itself costs. Owner thread only.
#include <algorithm>
#include <chrono>
#include <future>
#include <utility>

#include "clock.h"
#include "errors.h"
#include "owner/owner.h"

namespace headrace::fabric {
namespace {

constexpr std::uint64_t kProbeBytes = 8;
constexpr std::chrono::seconds kLongest{60};

}  // namespace

void Owner::echo(std::uint64_t peer, std::uint32_t imm, std::uint32_t reply) {
  ask([this, peer, imm, reply] { echoes_[imm] = Echo{.ball = serve(peer, reply)}; });
}

std::vector<std::uint64_t> Owner::round_trips(std::uint64_t peer, std::uint32_t imm, std::uint32_t reply,
                                              std::uint64_t count, std::uint64_t pause_ns) {
  auto done = std::make_shared<std::promise<std::vector<std::uint64_t>>>();
  auto times = done->get_future();
  call([=, this] {
    if (rally_) throw InputError("peer", "another measurement is running");
    rally_ =
        Rally{.ball = serve(peer, imm), .reply = reply, .left = count, .pause = pause_ns, .done = done, .times = {}};
    rally_->next_at = now_ns();
  });
  if (times.wait_for(kLongest) == std::future_status::ready) return times.get();
  call([this] { rally_.reset(); });
  throw FabricError("round trip", FI_ETIMEDOUT, "the peer does not answer");
}

// The write that goes back and forth: the first bytes of one memory to the same place in the other.
Owner::Ball Owner::serve(std::uint64_t peer, std::uint32_t imm) {
  const Peer& to = peer_of(peer);
  if (!to.target || to.target->length < kProbeBytes || memory_.length() < kProbeBytes)
    throw InputError("peer", "must be connected, with memory of at least 8 bytes on both sides");
  auto transfer = std::make_shared<Transfer>();
  transfer->peer = peer;
  transfer->imm = imm;
  transfer->told = true;  // nobody waits for its end
  Write write;
  write.transfer = transfer.get();
  write.length = kProbeBytes;
  return {std::move(transfer), write};
}

// True where the arrival is a measurement's, and nobody else's.
bool Owner::probed(std::uint32_t imm, std::uint64_t now) {
  if (rally_ && rally_->reply == imm && rally_->sent_at > 0) {
    rally_->times.push_back(now - std::exchange(rally_->sent_at, 0));
    if (--rally_->left == 0) {
      rally_->done->set_value(std::move(rally_->times));
      rally_.reset();
    } else {
      rally_->next_at = now + rally_->pause;
    }
    return true;
  }
  const auto found = echoes_.find(imm);
  if (found == echoes_.end()) return false;
  ++found->second.owed;
  return true;
}

bool Owner::play() {
  bool busy = false;
  for (auto& [imm, echo] : echoes_)
    for (; echo.owed > 0 && hit(echo.ball); --echo.owed) busy = true;
  if (!rally_ || rally_->sent_at > 0) return busy;
  const std::uint64_t now = now_ns();
  if (now < rally_->next_at || !hit(rally_->ball)) return busy;
  rally_->sent_at = now;
  return true;
}

bool Owner::hit(const Ball& ball) {
  const auto found = peers_.find(ball.transfer->peer);
  if (found == peers_.end()) return false;
  Peer& peer = found->second;
  const Posted post = peer.link->post_write(found->first, memory_.data(), ball.write);
  peer.link->flush(false);
  const bool under_way = post.kind == Posted::Kind::under_way;
  if (!under_way && post.kind != Posted::Kind::finished) return false;
  peer.num_writes_outstanding += under_way;
  ball.transfer->num_outstanding += under_way;
  return true;
}

}  // namespace headrace::fabric
