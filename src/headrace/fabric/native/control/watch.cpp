#include "control/watch.h"

#include <algorithm>
#include <utility>

#include "clock.h"

namespace headrace::fabric {
namespace {

constexpr std::uint64_t kRedial = 1'000'000'000;  // ns after a connection was lost or refused
constexpr int kNoBell = -1;                       // nobody there writes into memory of ours

}  // namespace

Watch::Watch(std::string& name, std::uint64_t silence_ns, PeerNews news)
    : owner_(std::move(news)), news_(*this), control_(Wire::tcp, name, kNoBell, silence_ns, news_) {}

void Watch::begin(std::uint64_t peer, const std::string& name) {
  Watched& watched = peers_[peer];
  watched.name = name;
  dial(peer, watched);
}

void Watch::dial(std::uint64_t peer, Watched& watched) {
  watched.link = next_link_++;
  watched.dial_at = 0;
  links_[watched.link] = peer;
  control_.dial(watched.link, watched.name, Fd());
}

void Watch::end(std::uint64_t peer) {
  const auto found = peers_.find(peer);
  if (found == peers_.end()) return;
  links_.erase(found->second.link);
  control_.hang_up(found->second.link);
  peers_.erase(found);
}

std::uint64_t Watch::dial_again(std::uint64_t now) {
  std::uint64_t next = 0;
  for (auto& [peer, watched] : peers_) {
    if (watched.dial_at == 0) continue;
    if (watched.dial_at <= now) {
      dial(peer, watched);
    } else {
      next = next == 0 ? watched.dial_at : std::min(next, watched.dial_at);
    }
  }
  return next;
}

void Watch::News::with_peer(std::uint64_t link, std::function<void(std::uint64_t, Watched&)> act) {
  watch_.owner_.queue([this, link, act = std::move(act)] {
    const auto found = watch_.links_.find(link);
    if (found != watch_.links_.end()) act(found->second, watch_.peers_.at(found->second));
  });
}

void Watch::News::linked(std::uint64_t link, Process, Fd) {
  with_peer(link, [this](std::uint64_t peer, Watched& watched) {
    if (std::exchange(watched.lost, false)) watch_.owner_.heard(peer);
  });
}

void Watch::News::silent(std::uint64_t link) {
  with_peer(link, [this](std::uint64_t peer, Watched&) { watch_.owner_.silent(peer); });
}

void Watch::News::heard(std::uint64_t link) {
  with_peer(link, [this](std::uint64_t peer, Watched&) { watch_.owner_.heard(peer); });
}

void Watch::News::lost(std::uint64_t link, int code, const std::string& text) {
  with_peer(link, [this, link, code, text](std::uint64_t peer, Watched& watched) {
    watch_.links_.erase(link);
    watched.dial_at = now_ns() + kRedial;
    if (!std::exchange(watched.lost, true)) watch_.owner_.lost(peer, code, text);
  });
}

}  // namespace headrace::fabric
