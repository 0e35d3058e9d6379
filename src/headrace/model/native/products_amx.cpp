// Products by AMX tiles: 16 rows by 32 inputs times 32 inputs by 16 columns in one instruction. A tile always has all
// its rows: computing them costs less than reading the weights does, and no configuration changes in between.
//
// Compiled for CPUs that have it: so this file uses no inline function that another file may use too.
#include <immintrin.h>

#include "products.h"

namespace headrace::model {
namespace {

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

constexpr TileConfig kConfig;  // not on the stack: gcc 12 believes that only its first 8 bytes are read

void begin() { _tile_loadconfig(&kConfig); }

void end() { _tile_release(); }

constexpr long kStep = kInputStep * kPanel;  // elements of a panel that one step takes: 2 KiB
constexpr long kAhead = 4096;                // bytes; weights come from memory in one stream

inline void prefetch(const Bf16* step) {
  const char* line = reinterpret_cast<const char*>(step) + kAhead;
  for (long i = 0; i < kStep * 2; i += 64) _mm_prefetch(line + i, _MM_HINT_T0);
}

void panel_16(const Bf16* a, long stride, const Bf16* w, long num_inputs, float* c) {
  _tile_zero(0);
  _tile_zero(1);
  for (long k = 0; k < num_inputs; k += kInputStep, w += kStep) {
    prefetch(w);
    _tile_loadd(4, a + k, stride * 2);
    _tile_loadd(6, w, kPanel * 4);
    _tile_loadd(7, w + kPanel, kPanel * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, c, kPanel * 4);
  _tile_stored(1, c + 16, kPanel * 4);
}

void panel(const Bf16* a, long stride, long rows, const Bf16* w, long num_inputs, float* c) {
  if (rows <= 16) return panel_16(a, stride, w, num_inputs, c);
  const Bf16* below = a + 16 * stride;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long k = 0; k < num_inputs; k += kInputStep, w += kStep) {
    _tile_loadd(4, a + k, stride * 2);
    _tile_loadd(6, w, kPanel * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + kPanel, kPanel * 4);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, below + k, stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, kPanel * 4);
  _tile_stored(1, c + 16, kPanel * 4);
  _tile_stored(2, c + 16 * kPanel, kPanel * 4);
  _tile_stored(3, c + 16 * kPanel + 16, kPanel * 4);
}

void scores(const Bf16* keys, const Bf16* more_keys, const Bf16* queries, long dim, float* s) {
  _tile_zero(0);
  _tile_zero(1);
  for (long d = 0; d < dim; d += 32) {
    _tile_loadd(6, queries + d * kQueries, kQueries * 4);
    _tile_loadd(4, keys + d, dim * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, more_keys + d, dim * 2);
    _tile_dpbf16ps(1, 5, 6);
  }
  _tile_stored(0, s, kQueries * 4);
  _tile_stored(1, s + 16 * kQueries, kQueries * 4);
}

void values(const Bf16* p, long, const Bf16* v, long num_tokens, long width, float* o) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long t = 0; t < num_tokens; t += 32, p += 32 * kQueries, v += 32 * width) {
    _tile_loadd(4, p, 64);
    _tile_loadd(5, v, width * 4);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, v + 32, width * 4);
    _tile_dpbf16ps(1, 4, 6);
    if (width == 32) continue;
    _tile_loadd(5, v + 64, width * 4);
    _tile_dpbf16ps(2, 4, 5);
    _tile_loadd(6, v + 96, width * 4);
    _tile_dpbf16ps(3, 4, 6);
  }
  _tile_stored(0, o, width * 4);
  _tile_stored(1, o + 16, width * 4);
  if (width == 32) return;
  _tile_stored(2, o + 32, width * 4);
  _tile_stored(3, o + 48, width * 4);
}

}  // namespace

const Products kAmxProducts = {"amx_bf16", 32, true, begin, end, panel, scores, values};

}  // namespace headrace::model
