#include "near/copy.h"

#include <atomic>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace::fabric {
namespace {

#if defined(__x86_64__)

// Below this the reader's next look hits a cache, and a store past it would cost more than it saves.
constexpr std::size_t kLeast = 2048;
constexpr std::size_t kLine = 64;
constexpr std::size_t kStride = 4 * kLine;

// `to` is aligned to a line, `length` a multiple of kStride.
__attribute__((target("avx512f"))) void stream_512(std::byte* to, const std::byte* from, std::size_t length) {
  for (std::size_t at = 0; at < length; at += kStride) {
    const __m512i a = _mm512_loadu_si512(from + at);
    const __m512i b = _mm512_loadu_si512(from + at + kLine);
    const __m512i c = _mm512_loadu_si512(from + at + 2 * kLine);
    const __m512i d = _mm512_loadu_si512(from + at + 3 * kLine);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at + kLine), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at + 2 * kLine), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at + 3 * kLine), d);
  }
}

__attribute__((target("avx2"))) void stream_256(std::byte* to, const std::byte* from, std::size_t length) {
  for (std::size_t at = 0; at < length; at += kLine) {
    const auto* source = reinterpret_cast<const __m256i*>(from + at);
    auto* target = reinterpret_cast<__m256i*>(to + at);
    const __m256i a = _mm256_loadu_si256(source);
    const __m256i b = _mm256_loadu_si256(source + 1);
    _mm256_stream_si256(target, a);
    _mm256_stream_si256(target + 1, b);
  }
}

using Stream = void (*)(std::byte*, const std::byte*, std::size_t);

Stream choose() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return stream_512;
  if (__builtin_cpu_supports("avx2")) return stream_256;
  return nullptr;
}

const Stream stream = choose();

#endif

}  // namespace

void copy_out(std::byte* to, const std::byte* from, std::size_t length) {
#if defined(__x86_64__)
  if (stream != nullptr && length >= kLeast) {
    const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
    const std::size_t body = (length - head) / kStride * kStride;
    if (head > 0) std::memcpy(to, from, head);
    stream(to + head, from + head, body);
    const std::size_t done = head + body;
    if (done < length) std::memcpy(to + done, from + done, length - done);
    return;
  }
#endif
  std::memcpy(to, from, length);
}

void copy_fence() {
#if defined(__x86_64__)
  _mm_sfence();  // streamed stores are ordered by nothing else
#else
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

}  // namespace headrace::fabric
