// Messages cut into fragments and joined again. Owns the framing and what is half received; knows no libfabric.
// Owner thread only.
//
// A fragment is a header and up to kPayload bytes: small enough for every provider's eager path, so that no message
// needs the receiver's help to be sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>

namespace headrace::fabric {

struct FragmentHeader {
  std::uint32_t magic;
  std::uint32_t length;  // of the whole message
  std::uint64_t sender;  // random, one per endpoint
  std::uint64_t number;  // of the message
  std::uint32_t offset;  // of this fragment's payload
  std::uint32_t reserved;
};
static_assert(sizeof(FragmentHeader) == 32);

constexpr std::size_t kFragment = 8192;
constexpr std::size_t kPayload = kFragment - sizeof(FragmentHeader);
constexpr std::size_t kMaxMessage = std::size_t{16} << 20;

struct OutgoingMessage {
  std::string bytes;
  std::uint64_t number = 0;
  std::size_t offset = 0;           // what was posted
  std::size_t num_outstanding = 0;  // fragments
  bool failed = false;

  bool posted() const { return offset == bytes.size(); }
  std::size_t cost() const { return sizeof *this + bytes.size(); }
};

// The next fragment of `message`; its place moves when it was posted.
FragmentHeader next_header(const OutgoingMessage& message, std::uint64_t sender);
std::span<const std::byte> next_payload(const OutgoingMessage& message);
// Both, written to `fragment`; returns its size.
std::size_t cut_fragment(const OutgoingMessage& message, std::uint64_t sender, std::byte* fragment);

class MessageAssembler {
 public:
  // The whole message when `fragment` was the last missing piece. Fragments of one sender come in order.
  std::optional<std::string> join(std::span<const std::byte> fragment);

  std::uint64_t num_dropped = 0;  // malformed fragments, and messages given up half received

 private:
  struct Partial {
    std::uint64_t number;
    std::uint64_t age;
    std::size_t length;
    std::string bytes;
  };

  void make_room(std::size_t length);

  // Senders that vanish in the middle must not fill our memory: one message each, the oldest goes first.
  static constexpr std::size_t kMaxPartialBytes = 4 * kMaxMessage;
  std::unordered_map<std::uint64_t, Partial> partials_;
  std::size_t num_partial_bytes_ = 0;
  std::uint64_t clock_ = 0;
};

}  // namespace headrace::fabric
