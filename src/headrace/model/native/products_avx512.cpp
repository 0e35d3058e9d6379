// Products by the dot-product instruction of avx512_bf16: 16 columns times one pair of inputs. Rows are held in
// registers, up to twelve of two columns each, so that a panel is read once for all of them.
//
// Compiled for CPUs that have it: so this file uses no inline function that another file may use too.
#include <immintrin.h>

#include <cstring>

#include "products.h"

namespace headrace::model {
namespace {

constexpr long kMostRows = 12;
constexpr long kAhead = 4096;  // bytes; weights come from memory in one stream

inline __m512bh load(const Bf16* from) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(from)); }

inline __m512bh broadcast_pair(const Bf16* from) {
  int pair;
  std::memcpy(&pair, from, sizeof pair);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
}

void nothing() {}

template <int M>
void panel_of(const Bf16* a, long stride, const Bf16* w, long num_inputs, float* c) {
  __m512 left[M], right[M];
  for (int i = 0; i < M; i++) left[i] = right[i] = _mm512_setzero_ps();
  for (long k = 0; k < num_inputs; k += 2, w += 2 * kPanel) {
    _mm_prefetch(reinterpret_cast<const char*>(w) + kAhead, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(w) + kAhead + 64, _MM_HINT_T0);
    const __m512bh w0 = load(w), w1 = load(w + kPanel);
    for (int i = 0; i < M; i++) {
      const __m512bh x = broadcast_pair(a + i * stride + k);
      left[i] = _mm512_dpbf16_ps(left[i], w0, x);
      right[i] = _mm512_dpbf16_ps(right[i], w1, x);
    }
  }
  for (int i = 0; i < M; i++) {
    _mm512_storeu_ps(c + i * kPanel, left[i]);
    _mm512_storeu_ps(c + i * kPanel + 16, right[i]);
  }
}

using PanelOf = void (*)(const Bf16*, long, const Bf16*, long, float*);
constexpr PanelOf kPanelOf[kMostRows] = {panel_of<1>, panel_of<2>,  panel_of<3>,  panel_of<4>,
                                         panel_of<5>, panel_of<6>,  panel_of<7>,  panel_of<8>,
                                         panel_of<9>, panel_of<10>, panel_of<11>, panel_of<12>};

void panel(const Bf16* a, long stride, long rows, const Bf16* w, long num_inputs, float* c) {
  kPanelOf[rows - 1](a, stride, w, num_inputs, c);
}

void scores_16(const Bf16* keys, const Bf16* queries, long dim, float* s) {
  __m512 of[16];
  for (int i = 0; i < 16; i++) of[i] = _mm512_setzero_ps();
  for (long d = 0; d < dim; d += 2) {
    const __m512bh q = load(queries + d * kQueries);
    for (int i = 0; i < 16; i++) of[i] = _mm512_dpbf16_ps(of[i], q, broadcast_pair(keys + i * dim + d));
  }
  for (int i = 0; i < 16; i++) _mm512_storeu_ps(s + i * kQueries, of[i]);
}

void scores(const Bf16* keys, const Bf16* more_keys, const Bf16* queries, long dim, float* s) {
  scores_16(keys, queries, dim, s);
  scores_16(more_keys, queries, dim, s + 16 * kQueries);
}

// M queries from `p` on, W columns of 16 dimensions.
template <int M, int W>
void values_of(const Bf16* p, const Bf16* v, long num_tokens, float* o) {
  __m512 of[M][W];
  for (int i = 0; i < M; i++)
    for (int j = 0; j < W; j++) of[i][j] = _mm512_setzero_ps();
  for (long t = 0; t < num_tokens; t += 2, v += 32 * W) {
    __m512bh column[W];
    for (int j = 0; j < W; j++) column[j] = load(v + 32 * j);
    const Bf16* pair = p + t / kTokens * (kTokens * kQueries) + t % kTokens;
    for (int i = 0; i < M; i++) {
      const __m512bh x = broadcast_pair(pair + i * kTokens);
      for (int j = 0; j < W; j++) of[i][j] = _mm512_dpbf16_ps(of[i][j], column[j], x);
    }
  }
  for (int i = 0; i < M; i++)
    for (int j = 0; j < W; j++) _mm512_storeu_ps(o + i * 16 * W + 16 * j, of[i][j]);
}

template <int W>
void values_wide(const Bf16* p, long num_queries, const Bf16* v, long num_tokens, float* o) {
  for (; num_queries >= 4; num_queries -= 4, p += 4 * kTokens, o += 4 * 16 * W) values_of<4, W>(p, v, num_tokens, o);
  if (num_queries == 3) values_of<3, W>(p, v, num_tokens, o);
  if (num_queries == 2) values_of<2, W>(p, v, num_tokens, o);
  if (num_queries == 1) values_of<1, W>(p, v, num_tokens, o);
}

void values(const Bf16* p, long num_queries, const Bf16* v, long num_tokens, long width, float* o) {
  if (width == 32) values_wide<2>(p, num_queries, v, num_tokens, o);
  if (width == 64) values_wide<4>(p, num_queries, v, num_tokens, o);
}

}  // namespace

const Products kAvx512Products = {"avx512_bf16", kMostRows, false, nothing, nothing, panel, scores, values};

}  // namespace headrace::model
