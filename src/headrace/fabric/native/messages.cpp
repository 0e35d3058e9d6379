#include "messages.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace headrace::fabric {
namespace {

constexpr std::uint32_t kMagic = 0x48524d31;  // "HRM1"

}  // namespace

FragmentHeader next_header(const OutgoingMessage& message, std::uint64_t sender) {
  return {.magic = kMagic,
          .length = static_cast<std::uint32_t>(message.bytes.size()),
          .sender = sender,
          .number = message.number,
          .offset = static_cast<std::uint32_t>(message.offset),
          .reserved = 0};
}

std::span<const std::byte> next_payload(const OutgoingMessage& message) {
  const auto rest = std::as_bytes(std::span(message.bytes)).subspan(message.offset);
  return rest.first(std::min(kPayload, rest.size()));
}

std::size_t cut_fragment(const OutgoingMessage& message, std::uint64_t sender, std::byte* fragment) {
  const FragmentHeader header = next_header(message, sender);
  const auto payload = next_payload(message);
  std::memcpy(fragment, &header, sizeof header);
  std::memcpy(fragment + sizeof header, payload.data(), payload.size());
  return sizeof header + payload.size();
}

std::optional<std::string> MessageAssembler::join(std::span<const std::byte> fragment) {
  FragmentHeader header{};
  if (fragment.size() <= sizeof header) return ++num_dropped, std::nullopt;
  std::memcpy(&header, fragment.data(), sizeof header);
  const auto payload = fragment.subspan(sizeof header);
  // All fragments but the last are full: what a half received message costs beside its bytes is bounded with them.
  const bool sound = header.magic == kMagic && header.length > 0 && header.length <= kMaxMessage &&
                     header.offset < header.length &&
                     payload.size() == std::min<std::size_t>(kPayload, header.length - header.offset);
  if (!sound) return ++num_dropped, std::nullopt;
  const auto* text = reinterpret_cast<const char*>(payload.data());
  auto partial = partials_.find(header.sender);
  if (header.offset == 0) {
    if (partial != partials_.end()) {
      num_partial_bytes_ -= partial->second.length;
      partials_.erase(partial);
      ++num_dropped;
    }
    if (payload.size() == header.length) return std::string(text, payload.size());
    make_room(header.length);
    Partial begun{.number = header.number, .age = ++clock_, .length = header.length, .bytes = {}};
    begun.bytes.assign(text, payload.size());
    num_partial_bytes_ += header.length;
    partials_.emplace(header.sender, std::move(begun));
    return std::nullopt;
  }
  const bool next = partial != partials_.end() && partial->second.number == header.number &&
                    partial->second.length == header.length && partial->second.bytes.size() == header.offset;
  if (!next) return ++num_dropped, std::nullopt;
  partial->second.bytes.append(text, payload.size());
  if (partial->second.bytes.size() < header.length) return std::nullopt;
  std::string message = std::move(partial->second.bytes);
  num_partial_bytes_ -= partial->second.length;
  partials_.erase(partial);
  return message;
}

void MessageAssembler::make_room(std::size_t length) {
  while (!partials_.empty() && num_partial_bytes_ + length > kMaxPartialBytes) {
    const auto oldest = std::min_element(partials_.begin(), partials_.end(), [](const auto& one, const auto& other) {
      return one.second.age < other.second.age;
    });
    num_partial_bytes_ -= oldest->second.length;
    partials_.erase(oldest);
    ++num_dropped;
  }
}

}  // namespace headrace::fabric
