#include "norms.h"

#include "lanes.h"

namespace headrace::model {
namespace {

constexpr long kRowsWorthThreads = 32;  // of fewer, waking others costs more than it saves

template <class Row>
void each_row(const Context& context, long num_rows, Row row) {
  if (num_rows < kRowsWorthThreads) {
    for (long i = 0; i < num_rows; i++) row(i);
    return;
  }
  context.threads.run([&](int index) {
    const Part part = part_of(num_rows, index, context.threads.size());
    for (long i = part.begin; i < part.end; i++) row(i);
  });
}

}  // namespace

float rms_scale(const float* row, long size, float eps) {
  __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
  for (long i = 0; i < size; i += 16) {
    const __m512 x = _mm512_maskz_loadu_ps(lanes_of(size - i), row + i);
    sums[i / 16 % 4] = _mm512_fmadd_ps(x, x, sums[i / 16 % 4]);
  }
  const __m512 sum = _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3]));
  return 1.f / __builtin_sqrtf(_mm512_reduce_add_ps(sum) / static_cast<float>(size) + eps);
}

void rms_norm(const Context& context, const float* x, const float* weight, long num_rows, long size, float eps,
              Bf16* out) {
  each_row(context, num_rows, [&](long row) {
    const float* from = x + row * size;
    const __m512 scale = _mm512_set1_ps(rms_scale(from, size, eps));
    for (long i = 0; i < size; i += 16) {
      const __mmask16 lanes = lanes_of(size - i);
      const __m512 scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, from + i), scale);
      store_bf16(out + row * size + i, _mm512_mul_ps(scaled, _mm512_maskz_loadu_ps(lanes, weight + i)), lanes);
    }
  });
}

void add_rms_norm(const Context& context, float* x, const float* values, const float* weight, long num_rows, long size,
                  float eps) {
  each_row(context, num_rows, [&](long row) {
    const float* from = values + row * size;
    float* to = x + row * size;
    const __m512 scale = _mm512_set1_ps(rms_scale(from, size, eps));
    for (long i = 0; i < size; i += 16) {
      const __mmask16 lanes = lanes_of(size - i);
      const __m512 scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, from + i), scale);
      const __m512 normed = _mm512_mul_ps(scaled, _mm512_maskz_loadu_ps(lanes, weight + i));
      _mm512_mask_storeu_ps(to + i, lanes, _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, to + i), normed));
    }
  });
}

}  // namespace headrace::model
