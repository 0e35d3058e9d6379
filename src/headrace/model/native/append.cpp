#include "attention.h"
#include "lanes.h"
#include "norms.h"

namespace headrace::model {
namespace {

constexpr long kTokensWorthThreads = 16;

// Dimension i with dimension i + D / 2, by the token's angles.
void turn(const float* x, const float* cos, const float* sin, long half, Bf16* out) {
  for (long i = 0; i < half; i += 16) {
    const __mmask16 lanes = lanes_of(half - i);
    const __m512 a = _mm512_maskz_loadu_ps(lanes, x + i), b = _mm512_maskz_loadu_ps(lanes, x + half + i);
    const __m512 c = _mm512_maskz_loadu_ps(lanes, cos + i), s = _mm512_maskz_loadu_ps(lanes, sin + i);
    store_bf16(out + i, _mm512_fnmadd_ps(b, s, _mm512_mul_ps(a, c)), lanes);
    store_bf16(out + half + i, _mm512_fmadd_ps(a, s, _mm512_mul_ps(b, c)), lanes);
  }
}

const float* normed(const float* x, const float* weight, long dim, float eps, float* to) {
  if (!weight) return x;
  const __m512 scale = _mm512_set1_ps(rms_scale(x, dim, eps));
  for (long i = 0; i < dim; i += 16) {
    const __mmask16 lanes = lanes_of(dim - i);
    const __m512 scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, x + i), scale);
    _mm512_mask_storeu_ps(to + i, lanes, _mm512_mul_ps(scaled, _mm512_maskz_loadu_ps(lanes, weight + i)));
  }
  return to;
}

void append_token(const StepView& step, long token, const float* qkv, Bf16* view, Bf16* q, const HeadNorm& norm) {
  const long dim = step.dim, half = dim / 2, num_heads = step.num_heads, num_kv_heads = step.num_kv_heads;
  const float *cos = step.cos + token * half, *sin = step.sin + token * half;
  const float* x = qkv + token * (num_heads + 2 * num_kv_heads) * dim;
  float scaled[kMostDims];
  for (long head = 0; head < num_heads; head++, x += dim)
    turn(normed(x, norm.q, dim, norm.eps, scaled), cos, sin, half, q + (token * num_heads + head) * dim);
  const long page = step.slots[token] / step.page_size, offset = step.slots[token] % step.page_size;
  Bf16* entry = view + page * step.page_elements() + offset * dim;
  for (long head = 0; head < num_kv_heads; head++, x += dim, entry += step.head_elements()) {
    turn(normed(x, norm.k, dim, norm.eps, scaled), cos, sin, half, entry);
    const float* v = x + num_kv_heads * dim;
    for (long i = 0; i < dim; i += 16) {
      const __mmask16 lanes = lanes_of(dim - i);
      store_bf16(entry + step.page_size * dim + i, _mm512_maskz_loadu_ps(lanes, v + i), lanes);
    }
  }
}

}  // namespace

void append(const Context& context, const StepView& step, const float* qkv, Bf16* view, Bf16* q, const HeadNorm& norm) {
  const auto tokens = [&](Part part) {
    for (long token = part.begin; token < part.end; token++) append_token(step, token, qkv, view, q, norm);
  };
  if (step.num_tokens < kTokensWorthThreads) return tokens({0, step.num_tokens});
  context.threads.run([&](int index) { tokens(part_of(step.num_tokens, index, context.threads.size())); });
}

}  // namespace headrace::model
