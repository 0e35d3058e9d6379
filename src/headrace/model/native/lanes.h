// Sixteen fp32 numbers at a time: what the element-wise kernels share. For files that are compiled for avx512 only, so
// everything here is internal to each of them.
#pragma once

#include <immintrin.h>

#include "packing.h"

namespace headrace::model {
namespace {

[[maybe_unused]] inline __mmask16 lanes_of(long count) {  // the first `count` lanes, all when there are more
  return static_cast<__mmask16>(count >= 16 ? 0xffff : (1u << count) - 1);
}

[[maybe_unused]] inline void store_bf16(Bf16* to, __m512 values, __mmask16 lanes) {
  _mm256_mask_storeu_epi16(to, lanes, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values)));
}

// 2^t with a relative error of 1e-7; exactly 1 at 0, 0 far below, infinite far above. Coefficients:
// minimax of degree 5 on [-1/2, 1/2] with the constant held at 1.
[[maybe_unused]] inline __m512 exp2(__m512 t) {
  const __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(t, whole);
  __m512 p = _mm512_set1_ps(1.326472690e-3f);
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(9.671512661e-3f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(5.550733744e-2f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(2.402224208e-1f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(6.931469776e-1f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(p, whole);
}

}  // namespace
}  // namespace headrace::model
