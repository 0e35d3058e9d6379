// Fragments of messages, from several senders: joined or dropped. What is told is what one sender sent, whole; what is
// half received stays within its bounds.
//
//     pieces: u8 sender and how; a fragment as it should be, with some of it changed, or bytes as they are
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "fuzzed.h"
#include "messages.h"

namespace {

using headrace::fabric::cut_fragment;
using headrace::fabric::FragmentHeader;
using headrace::fabric::kFragment;
using headrace::fabric::kMaxMessage;
using headrace::fabric::kPayload;
using headrace::fabric::MessageAssembler;
using headrace::fabric::OutgoingMessage;

constexpr std::size_t kLongest = 5 * kPayload;

struct Sender {
  OutgoingMessage message;
  bool is_sound = true;           // nothing of this message was left out, nor anything else said in its name
  std::uint64_t num_dropped = 0;  // by the assembler when it was begun
};

class Scene {
 public:
  explicit Scene(Fuzzed fuzzed) : fuzzed_(fuzzed) {}

  void run() {
    while (!fuzzed_.empty()) {
      const auto how = fuzzed_.take<std::uint8_t>();
      Sender& sender = senders_[how % 4];
      switch (how / 4 % 8) {
        case 0:
          begin(sender);
          break;
        case 1:
          skip(sender);
          break;
        case 2:
          send_changed(how % 4, sender);
          break;
        case 3:
          send_anything(fuzzed_.bytes(fuzzed_.take<std::uint16_t>() % (kFragment + 1)));
          break;
        default:
          send(how % 4, sender);
      }
    }
  }

 private:
  void begin(Sender& sender) {
    sender = {};
    sender.num_dropped = assembler_.num_dropped;
    sender.message.number = next_++;
    sender.message.bytes.assign(1 + fuzzed_.take<std::uint16_t>() % kLongest, static_cast<char>(next_));
  }

  void skip(Sender& sender) {
    if (sender.message.posted()) return;
    sender.is_sound = false;
    sender.message.offset += next_payload(sender.message).size();
  }

  void send(std::uint64_t id, Sender& sender) {
    OutgoingMessage& message = sender.message;
    if (message.posted()) return;
    const std::size_t length = cut_fragment(message, id, buffer_.data());
    message.offset += length - sizeof(FragmentHeader);
    const auto told = join(std::span(buffer_).first(length));
    if (told) require(message.posted() && *told == message.bytes);
    if (!sender.is_sound) return;
    // One that is not told at its end was given up for others, which is counted.
    require(!message.posted() || told || assembler_.num_dropped > sender.num_dropped);
  }

  void send_anything(std::span<const std::byte> fragment) {
    FragmentHeader header{};
    std::memcpy(&header, fragment.data(), std::min(fragment.size(), sizeof header));
    if (const auto named = senders_.find(header.sender); named != senders_.end()) named->second.is_sound = false;
    join(fragment);
  }

  // Like a sender that is none of ours: of an id of its own, so that nobody's message is broken off by it.
  void send_changed(std::uint64_t id, const Sender& sender) {
    if (sender.message.posted()) return;
    const std::size_t length = cut_fragment(sender.message, id + 100, buffer_.data());
    const auto changes = fuzzed_.bytes(fuzzed_.take<std::uint8_t>() % (sizeof(FragmentHeader) + 1));
    for (std::size_t i = 0; i < changes.size(); ++i)
      if (i / 8 != 1) buffer_[i] ^= changes[i];  // but for its id
    const std::size_t cut = fuzzed_.take<std::uint8_t>() % 2 == 0 ? length : fuzzed_.take<std::uint16_t>();
    join(std::span(buffer_).first(std::min(cut, kFragment)));
  }

  std::optional<std::string> join(std::span<const std::byte> fragment) {
    const std::vector<std::byte> exact(fragment.begin(), fragment.end());  // its end is watched
    auto told = assembler_.join(exact);
    if (told) require(!told->empty() && told->size() <= kMaxMessage);
    return told;
  }

  Fuzzed fuzzed_;
  MessageAssembler assembler_;
  std::map<std::uint64_t, Sender> senders_;
  std::vector<std::byte> buffer_ = std::vector<std::byte>(kFragment);
  std::uint64_t next_ = 1;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Scene(Fuzzed(data, size)).run();
  return 0;
}
