// A lane whose other end stores whatever it likes, while ours goes on: no index leaves the rings, nothing is told that
// is longer than it may be, and what makes no sense is refused by FabricError.
//
//     pieces: u8 what, then its numbers
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "control/lane.h"
#include "errors.h"
#include "fuzzed.h"
#include "messages.h"

namespace {

using headrace::fabric::FabricError;
using headrace::fabric::InLane;
using headrace::fabric::kFragment;
using headrace::fabric::Lane;
using headrace::fabric::LaneHead;
using headrace::fabric::OutLane;

constexpr std::size_t kImmsAt = 4096;
constexpr std::size_t kBytesAt = kImmsAt + Lane::kImms * sizeof(std::uint32_t);

// The writer's file as somebody else has it mapped.
class Memory {
 public:
  explicit Memory(int fd)
      : at_(static_cast<std::byte*>(::mmap(nullptr, Lane::kLength, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0))) {
    require(at_ != MAP_FAILED);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { ::munmap(at_, Lane::kLength); }

  LaneHead& head() const { return *reinterpret_cast<LaneHead*>(at_); }
  std::byte* at(std::size_t place) const { return at_ + place % Lane::kLength; }
  const std::byte* imms() const { return at_ + kImmsAt; }

 private:
  std::byte* at_;
};

// Near where they are: numbers drawn freely would be refused at once.
void move(std::atomic<std::uint64_t>& count, Fuzzed& fuzzed) {
  const auto by = fuzzed.take<std::int32_t>();
  count.store(fuzzed.take<std::uint8_t>() % 8 == 0 ? fuzzed.take<std::uint64_t>()
                                                   : count.load() + static_cast<std::uint64_t>(std::int64_t{by}));
}

void store(const Memory& memory, Fuzzed& fuzzed) {
  const std::size_t place = fuzzed.take<std::uint32_t>();
  for (std::size_t i = place; const std::byte each : fuzzed.bytes(fuzzed.take<std::uint8_t>())) *memory.at(i++) = each;
}

void read_imms(InLane& lane, std::size_t limit) {
  const auto imms = lane.peek_imms(limit);
  require(imms.size() <= limit && imms.size() <= Lane::kImms);
  std::uint32_t sum = 0;
  for (const std::uint32_t imm : imms) sum += imm;
  [[maybe_unused]] volatile std::uint32_t kept = sum;
  lane.pop_imms(imms.size());
}

void read_fragment(InLane& lane) {
  const auto buffer = std::make_unique<std::array<std::byte, kFragment>>();  // on the heap: its ends are watched
  require(lane.pop_fragment(*buffer) <= kFragment);
}

void write_fragment(OutLane& lane, Fuzzed& fuzzed) {
  const std::vector<std::byte> bytes(1 + fuzzed.take<std::uint16_t>() % kFragment, std::byte{7});
  const std::size_t cut = fuzzed.take<std::uint16_t>() % (bytes.size() + 1);
  lane.push_fragment(std::span(bytes).first(cut), std::span(bytes).subspan(cut));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Fuzzed fuzzed(data, size);
  OutLane out;
  InLane in(::fcntl(out.fd(), F_DUPFD_CLOEXEC, 0));
  const Memory memory(out.fd());
  try {
    while (!fuzzed.empty()) {
      switch (fuzzed.take<std::uint8_t>() % 12) {
        case 0:
          move(memory.head().imm_tail, fuzzed);
          break;
        case 1:
          move(memory.head().byte_tail, fuzzed);
          break;
        case 2:
          move(memory.head().imm_head, fuzzed);
          break;
        case 3:
          move(memory.head().byte_head, fuzzed);
          break;
        case 4:
          store(memory, fuzzed);
          break;
        case 5:
          read_imms(in, fuzzed.take<std::uint16_t>());
          break;
        case 6:
          read_fragment(in);
          break;
        case 7:
          for (int i = fuzzed.take<std::uint16_t>(); i > 0; --i) out.push_imm(static_cast<std::uint32_t>(i));
          break;
        case 8:
          write_fragment(out, fuzzed);
          break;
        case 9:
          out.publish();
          break;
        case 10:
          out.must_wake(fuzzed.take<std::uint8_t>() % 2 != 0);
          break;
        default:
          in.has_news();
          in.made_room();
          in.lie_down();
      }
    }
  } catch (const FabricError&) {
  }
  return 0;
}
