#include "copies.h"

#include <cstdint>
#include <cstring>

#include "errors.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace::fabric::limits {
namespace {

void copy_plain(std::byte* to, const std::byte* from, std::size_t length) { std::memcpy(to, from, length); }

#if defined(__x86_64__)

// Four lines a turn keep enough loads under way to hide the memory behind them.
constexpr std::size_t kLine = 64;
constexpr std::size_t kBlock = 4 * kLine;

__attribute__((target("avx512f"))) void stream_avx512(std::byte* to, const std::byte* from, std::size_t num_blocks) {
  for (; num_blocks > 0; --num_blocks, to += kBlock, from += kBlock) {
    auto* lines = reinterpret_cast<__m512i*>(to);
    const __m512i a = _mm512_loadu_si512(from);
    const __m512i b = _mm512_loadu_si512(from + kLine);
    const __m512i c = _mm512_loadu_si512(from + 2 * kLine);
    const __m512i d = _mm512_loadu_si512(from + 3 * kLine);
    _mm512_stream_si512(lines, a);
    _mm512_stream_si512(lines + 1, b);
    _mm512_stream_si512(lines + 2, c);
    _mm512_stream_si512(lines + 3, d);
  }
}

__attribute__((target("avx2"))) void stream_avx2(std::byte* to, const std::byte* from, std::size_t num_blocks) {
  auto* halves = reinterpret_cast<__m256i*>(to);
  const auto* source = reinterpret_cast<const __m256i*>(from);
  for (; num_blocks > 0; --num_blocks, halves += 8, source += 8) {
    __m256i loaded[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) loaded[i] = _mm256_loadu_si256(source + i);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) _mm256_stream_si256(halves + i, loaded[i]);
  }
}

// Every x86-64 has these.
void stream_sse2(std::byte* to, const std::byte* from, std::size_t num_blocks) {
  auto* quarters = reinterpret_cast<__m128i*>(to);
  const auto* source = reinterpret_cast<const __m128i*>(from);
  for (std::size_t left = 2 * num_blocks; left > 0; --left, quarters += 8, source += 8) {
    __m128i loaded[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) loaded[i] = _mm_loadu_si128(source + i);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) _mm_stream_si128(quarters + i, loaded[i]);
  }
}

// Non-temporal stores want aligned lines: what lies before and after whole blocks of them is copied plainly. The fence
// is part of the page: streamed stores are ordered by nothing else, and a page counts once it can be seen.
template <void (*stream)(std::byte*, const std::byte*, std::size_t)>
void copy_streamed(std::byte* to, const std::byte* from, std::size_t length) {
  const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
  if (length < head + kBlock) return copy_plain(to, from, length);
  const std::size_t num_blocks = (length - head) / kBlock;
  const std::size_t done = head + num_blocks * kBlock;
  if (head > 0) std::memcpy(to, from, head);
  stream(to + head, from + head, num_blocks);
  if (done < length) std::memcpy(to + done, from + done, length - done);
  _mm_sfence();
}

#endif

std::vector<CopyMethod> find_methods() {
  std::vector<CopyMethod> found;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) found.push_back({"avx512", copy_streamed<stream_avx512>});
  if (__builtin_cpu_supports("avx2")) found.push_back({"avx2", copy_streamed<stream_avx2>});
  found.push_back({"sse2", copy_streamed<stream_sse2>});
#endif
  found.push_back({"memcpy", copy_plain});
  return found;
}

const CopyMethod& method_of(const std::string& name) {
  std::string known;
  for (const CopyMethod& method : copy_methods()) {
    if (name == method.name) return method;
    known += (known.empty() ? "" : ", ") + std::string(method.name);
  }
  throw InputError("method", "must be one that this CPU has (" + known + "), is '" + name + "'");
}

}  // namespace

const std::vector<CopyMethod>& copy_methods() {
  static const std::vector<CopyMethod> found = find_methods();
  return found;
}

Spent CopyLoop::copy(std::span<const std::int64_t> src_offsets, std::span<const std::int64_t> dst_offsets,
                     std::size_t page_bytes, const std::string& method) const {
  const Offsets src = to_offsets("src_offsets", src_offsets, page_bytes, src_.length());
  const Offsets dst = to_offsets("dst_offsets", dst_offsets, page_bytes, dst_.length());
  if (src.size() != dst.size()) throw InputError("dst_offsets", "must be as many as src_offsets");
  const auto copy = method_of(method).copy;
  const Stopwatch watch;
  for (std::size_t i = 0; i < src.size(); ++i) copy(dst_.data() + dst[i], src_.data() + src[i], page_bytes);
  return watch.read();
}

}  // namespace headrace::fabric::limits
