// Attention over the paged KV of one layer, `[P, G, 2, S, D] bf16`. Knows no Python; `module.cpp` holds and checks the
// steps.
//
// One way for decode rows and chunks. The queries of a row that share a KV head (its tokens times H / G heads) are cut
// into blocks of 16; a block reads its keys from the first that it sees:
//
//     scores   keys times queries, 16 keys by 16 queries, straight from the pages; a query is a lane
//     softmax  the largest score of each lane, then powers and their sum in ascending order of keys
//     values   powers (bf16) times V in pairs of tokens, in ascending order
//
// What a query does not see has power zero and adds zero, so its result does not depend on where its block ends, as
// long as the values of later tokens of its chunk are finite.
#pragma once

#include <cstdint>

#include "context.h"

namespace headrace::model {

constexpr long kMostDims = 512;  // head_dim

// One block of queries: columns [column, column + 16) of the row's tokens times heads of `kv_head`.
struct QueryBlock {
  long row, kv_head, column;
};

struct StepView {
  long num_heads, num_kv_heads, dim;
  long page_size;
  float scale;
  long window;  // 0: none
  long num_tokens, num_rows;
  const std::int64_t* positions;     // [num_tokens]
  const std::int64_t* slots;         // [num_tokens]
  const std::int64_t* qo_indptr;     // [num_rows + 1]
  const std::int64_t* page_indptr;   // [num_rows + 1]
  const std::int64_t* page_indices;  // [..]
  const float* cos;                  // [num_tokens, D / 2]
  const float* sin;
  const QueryBlock* blocks;
  long num_blocks;

  long group() const { return num_heads / num_kv_heads; }
  long head_elements() const { return 2 * page_size * dim; }
  long page_elements() const { return num_kv_heads * head_elements(); }
  long num_columns(long row) const { return (qo_indptr[row + 1] - qo_indptr[row]) * group(); }
  long kv_len(long row) const { return positions[qo_indptr[row + 1] - 1] + 1; }
  // The first key that any query of the row from `token` on sees, on a tile's edge.
  long first_key(long token) const {
    const long first = window ? positions[token] - window + 1 : 0;
    return first < 0 ? 0 : first / kTokens * kTokens;
  }
};

struct HeadNorm {
  const float* q;  // [D], null: none
  const float* k;
  float eps;
};

// qkv `[num_tokens, H + 2G, D] fp32`: turned q -> `[num_tokens, H, D] bf16`, turned k and v -> their slots.
void append(const Context& context, const StepView& step, const float* qkv, Bf16* view, Bf16* q, const HeadNorm& norm);

// q `[num_tokens, H, D] bf16` -> out, the same shape.
void attend(const Context& context, const StepView& step, const Bf16* q, const Bf16* view, Bf16* out);

}  // namespace headrace::model
