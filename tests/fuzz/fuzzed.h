// A fuzzer's bytes, taken one number after another: zeros once they are used up.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>

class Fuzzed {
 public:
  Fuzzed(const std::uint8_t* data, std::size_t size) : rest_(reinterpret_cast<const std::byte*>(data), size) {}

  bool empty() const { return rest_.empty(); }

  template <class T>
  T take() {
    T value{};
    const auto part = bytes(sizeof value);
    if (!part.empty()) std::memcpy(&value, part.data(), part.size());
    return value;
  }

  // At most `count`.
  std::span<const std::byte> bytes(std::size_t count) {
    const auto part = rest_.first(std::min(count, rest_.size()));
    rest_ = rest_.subspan(part.size());
    return part;
  }

 private:
  std::span<const std::byte> rest_;
};

// What must hold whatever the bytes are.
inline void require(bool holds) {
  if (!holds) std::abort();
}
