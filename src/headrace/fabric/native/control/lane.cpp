#include "control/lane.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "errors.h"

namespace headrace::fabric {
namespace {

constexpr std::size_t kImmsAt = 4096;
constexpr std::size_t kBytesAt = kImmsAt + Lane::kImms * sizeof(std::uint32_t);
constexpr std::uint64_t kUnit = 8;  // a fragment is a word with its length, its bytes, and room up to the next word
static_assert(sizeof(LaneHead) <= kImmsAt);

std::uint64_t framed(std::uint64_t length) { return kUnit + (length + kUnit - 1) / kUnit * kUnit; }

[[noreturn]] void broken(const char* what) { throw FabricError("lane", EPROTO, what); }

int make() {
  const int fd = ::memfd_create("headrace-lane", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw FabricError("memfd_create", errno, std::strerror(errno));
  // A lane that its maker could shorten would answer the reader with SIGBUS.
  if (::ftruncate(fd, Lane::kLength) != 0 || ::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const int code = errno;
    ::close(fd);
    throw FabricError("ftruncate(lane)", code, std::strerror(code));
  }
  return fd;
}

void copy_in(std::byte* ring, std::uint64_t at, const std::byte* from, std::size_t length) {
  const std::size_t place = at % Lane::kBytes;
  const std::size_t first = std::min<std::size_t>(length, Lane::kBytes - place);
  std::memcpy(ring + place, from, first);
  std::memcpy(ring, from + first, length - first);
}

void copy_back(std::byte* to, const std::byte* ring, std::uint64_t at, std::size_t length) {
  const std::size_t place = at % Lane::kBytes;
  const std::size_t first = std::min<std::size_t>(length, Lane::kBytes - place);
  std::memcpy(to, ring + place, first);
  std::memcpy(to + first, ring, length - first);
}

}  // namespace

Lane::Lane() : fd_(make()) {
  map();
  new (memory_) LaneHead{};
}

Lane::Lane(int fd) : fd_(fd) {
  struct stat status{};
  const int seals = ::fcntl(fd, F_GET_SEALS);
  const bool is_lane = ::fstat(fd, &status) == 0 && status.st_size == static_cast<off_t>(kLength) && seals >= 0 &&
                       (seals & F_SEAL_SHRINK) != 0;
  if (!is_lane) {
    ::close(fd);
    broken("not a sealed file of a lane's length");
  }
  map();
}

void Lane::map() {
  void* mapped = ::mmap(nullptr, kLength, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (mapped == MAP_FAILED) {
    const int code = errno;
    ::close(fd_);
    throw FabricError("mmap(lane)", code, std::strerror(code));
  }
  memory_ = mapped;
}

Lane::~Lane() {
  ::munmap(memory_, kLength);
  ::close(fd_);
}

std::uint32_t* Lane::imms() const {
  return reinterpret_cast<std::uint32_t*>(static_cast<std::byte*>(memory_) + kImmsAt);
}

std::byte* Lane::bytes() const { return static_cast<std::byte*>(memory_) + kBytesAt; }

template <class Full>
bool OutLane::no_room(Full full) {
  if (!full()) return false;
  head().writer_waits.store(1);
  return full();
}

bool OutLane::push_imm(std::uint32_t imm) {
  if (imm_tail_ - imm_head_seen_ >= kImms) {
    const auto full = [this] { return imm_tail_ - (imm_head_seen_ = head().imm_head.load()) >= kImms; };
    if (no_room(full)) return false;
  }
  imms_waiting_.push_back(imm);
  ++imm_tail_;
  return true;
}

bool OutLane::push_fragment(std::span<const std::byte> header, std::span<const std::byte> payload) {
  const std::uint64_t length = header.size() + payload.size();
  if (no_room([&] { return byte_tail_ - head().byte_head.load() + framed(length) > kBytes; })) return false;
  copy_in(bytes(), byte_tail_, reinterpret_cast<const std::byte*>(&length), sizeof length);
  copy_in(bytes(), byte_tail_ + kUnit, header.data(), header.size());
  copy_in(bytes(), byte_tail_ + kUnit + header.size(), payload.data(), payload.size());
  byte_tail_ += framed(length);
  return true;
}

void OutLane::publish() {
  std::uint64_t place = imm_tail_ - imms_waiting_.size();
  for (const std::uint32_t imm : imms_waiting_) imms()[place++ % kImms] = imm;
  imms_waiting_.clear();
  head().imm_tail.store(imm_tail_);
  head().byte_tail.store(byte_tail_);
}

bool OutLane::must_wake(bool may_wait) {
  if (head().reader_sleeps.load() == 0) return false;
  const bool little = imm_tail_ - head().imm_head.load() < kImms / 2 && byte_tail_ == head().byte_head.load();
  if (may_wait && little) return false;
  return head().reader_sleeps.exchange(0) != 0;
}

std::span<const std::uint32_t> InLane::peek_imms(std::size_t limit) {
  const std::uint64_t come = tails().imms - imm_head_;
  if (come > kImms) broken("more imms than it has room for");
  const std::uint64_t place = imm_head_ % kImms;
  return {imms() + place, std::min({come, kImms - place, std::uint64_t{limit}})};
}

void InLane::pop_imms(std::size_t count) {
  imm_head_ += count;
  head().imm_head.store(imm_head_);
}

std::size_t InLane::pop_fragment(std::span<std::byte> buffer) {
  const std::uint64_t come = tails().bytes - byte_head_;
  if (come == 0) return 0;
  std::uint64_t length = 0;
  if (come > kBytes || come < kUnit) broken("more bytes than it has room for");
  copy_back(reinterpret_cast<std::byte*>(&length), bytes(), byte_head_, sizeof length);
  if (length == 0 || length > buffer.size() || framed(length) > come) broken("a fragment of impossible length");
  copy_back(buffer.data(), bytes(), byte_head_ + kUnit, length);
  byte_head_ += framed(length);
  head().byte_head.store(byte_head_);
  return length;
}

bool InLane::has_news() const {
  const Tails shown = tails();
  return shown.imms != imm_head_ || shown.bytes != byte_head_;
}

void InLane::cut_off() { end_ = tails(); }

bool InLane::made_room() { return head().writer_waits.load() != 0 && head().writer_waits.exchange(0) != 0; }

bool OutLane::leave(bool for_reader) {
  if (for_reader) head().visits.store(++visits_);
  head().inside.store(0);
  return head().answers.load() != visits_;
}

bool OutLane::may_hear() const { return head().answers.load() != heard_ && head().inside.load() == 0; }

bool InLane::try_enter() {
  if (!enter()) return false;
  visited_ = head().visits.load();
  return true;
}

void InLane::leave() {
  head().answers.store(visited_);
  head().inside.store(0);
}

bool InLane::may_visit() const { return head().visits.load() != visited_ && head().inside.load() == 0; }

}  // namespace headrace::fabric
