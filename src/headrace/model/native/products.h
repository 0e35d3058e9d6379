// The three products that everything else is made of, once per instruction set. Each result is a sum over pairs of
// inputs in ascending order, begun at zero: it does not depend on how many rows or columns are computed beside it.
//
// Plain functions over plain memory. A table of them is chosen at run time; `begin` and `end` stand around a thread's
// work, for sets that must be configured.
#pragma once

#include "packing.h"

namespace headrace::model {

constexpr long kQueries = 16;  // columns of a block of queries
constexpr long kTokens = 32;   // keys and values that are taken together; their places are multiples of it
constexpr long kWidth = 64;    // dimensions of V that are summed together

struct Products {
  const char* name;
  long most_rows;   // of `panel`
  bool whole_rows;  // `panel` reads rows up to a multiple of 16, though it computes them for nothing

  void (*begin)();
  void (*end)();

  // `rows` rows of a `[.., inputs_stride]`, times one panel -> c `[rows][32]`. `num_inputs` is a multiple of 32.
  void (*panel)(const Bf16* a, long inputs_stride, long rows, const Bf16* panel, long num_inputs, float* c);

  // 32 keys, two times `[16, dim]`, times the queries `[dim / 2][16][2]` -> s `[32 keys][16 queries]`. `dim`: a
  // multiple of 32.
  void (*scores)(const Bf16* keys, const Bf16* more_keys, const Bf16* queries, long dim, float* s);

  // p, tiles of 32 tokens `[num_tokens / 32][16][32]`, times v `[num_tokens / 2][width][2]` -> o `[16][width]`, at
  // least the first `num_queries` rows of it. `num_tokens`: a multiple of 32; `width`: 32 or 64.
  void (*values)(const Bf16* p, long num_queries, const Bf16* v, long num_tokens, long width, float* o);
};

extern const Products kAmxProducts, kAvx512Products;

}  // namespace headrace::model
