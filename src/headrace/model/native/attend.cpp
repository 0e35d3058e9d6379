#include <atomic>
#include <cstring>

#include "attention.h"
#include "lanes.h"

namespace headrace::model {
namespace {

constexpr long kHalf = kTokens / 2;  // keys of one product of scores

// ---- the pages of one row and head ----------------------------------------------------------------------------------

struct HeadPages {
  const Bf16* view;  // of the head, in page 0
  const std::int64_t* pages;
  long page_elements, page_size, dim, kv_len;

  HeadPages(const StepView& step, const Bf16* all, long row, long kv_head)
      : view(all + kv_head * step.head_elements()),
        pages(step.page_indices + step.page_indptr[row]),
        page_elements(step.page_elements()),
        page_size(step.page_size),
        dim(step.dim),
        kv_len(step.kv_len(row)) {}

  const Bf16* key(long token) const {
    return view + pages[token / page_size] * page_elements + token % page_size * dim;
  }
  const Bf16* value(long token) const { return key(token) + page_size * dim; }
};

// 16 keys from `token` on: where they lie, or copied where they lie in several pages. Those behind the end are whatever
// is there; nobody sees them.
const Bf16* keys_at(const HeadPages& head, long token, Bf16* copies) {
  if (head.page_size % kHalf == 0) return head.key(token);
  for (long i = 0; i < kHalf; i++) {
    const long from = token + i < head.kv_len ? token + i : head.kv_len - 1;
    std::memcpy(copies + i * head.dim, head.key(from), static_cast<std::size_t>(head.dim) * sizeof(Bf16));
  }
  return copies;
}

// 32 values from `token` on, dimensions [dim, dim + width), in pairs of tokens: `[16][width][2]`. Behind the end zeros:
// there may be NaN in a page.
void pair_values(const HeadPages& head, long token, long dim, long width, Bf16* to) {
  const __m256i none = _mm256_setzero_si256();
  for (long i = 0; i < kTokens; i += 2, to += 2 * width) {
    const Bf16* even = token + i < head.kv_len ? head.value(token + i) + dim : nullptr;
    const Bf16* odd = token + i + 1 < head.kv_len ? head.value(token + i + 1) + dim : nullptr;
    for (long d = 0; d < width; d += 16) {
      const __m256i a = even ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + d)) : none;
      const __m256i b = odd ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd + d)) : none;
      const __m512i low = _mm512_cvtepu16_epi32(a), high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16);
      _mm512_storeu_si512(to + 2 * d, _mm512_or_si512(low, high));
    }
  }
}

long width_at(long dim, long all) { return all - dim < kWidth ? all - dim : kWidth; }

// The values of a row and head in pairs, all dimensions: one group of 64 after another, each `[tokens / 2][width][2]`
// from the row's first key on.
void pair_all_values(const HeadPages& head, long first, Part tiles, Bf16* to) {
  const long num_tokens = round_up(head.kv_len - first, kTokens);
  for (long dim = 0; dim < head.dim; dim += kWidth) {
    const long width = width_at(dim, head.dim);
    for (long tile = tiles.begin; tile < tiles.end; tile++)
      pair_values(head, first + tile * kTokens, dim, width, to + dim * num_tokens + tile * kTokens * width);
  }
}

void prefetch_rows(const Bf16* rows, long num_rows, long dim) {
  const char* line = reinterpret_cast<const char*>(rows);
  for (long i = 0; i < num_rows * dim * 2; i += 64) _mm_prefetch(line + i, _MM_HINT_T0);
}

// ---- one block of queries ------------------------------------------------------------------------------------------

// What a thread needs for a block, in its scratch.
struct Room {
  Bf16* queries;  // [dim / 2][16][2]
  Bf16* copies;   // [32][dim]
  Bf16* pairs;    // [num_keys / 2][64][2]
  float* out;     // [16][64]
  float* scores;  // [num_keys][16]
  Bf16* powers;   // [num_keys / 32][16][32]

  static std::size_t bytes_for(long num_keys, long dim) {
    const long elements = dim * kQueries + dim * kTokens + num_keys * kWidth + kQueries * num_keys;
    return static_cast<std::size_t>(elements) * sizeof(Bf16) +
           static_cast<std::size_t>(kQueries * (kWidth + num_keys)) * sizeof(float);
  }
  Room(void* memory, long num_keys, long dim) {
    scores = static_cast<float*>(memory);
    out = scores + num_keys * kQueries;
    queries = reinterpret_cast<Bf16*>(out + kQueries * kWidth);
    copies = queries + dim * kQueries;
    pairs = copies + dim * kTokens;
    powers = pairs + num_keys * kWidth;
  }
};

void pack_queries(const StepView& step, const QueryBlock& block, long num_queries, const Bf16* q, Bf16* to) {
  std::memset(to, 0, static_cast<std::size_t>(step.dim * kQueries) * sizeof(Bf16));
  for (long i = 0; i < num_queries; i++) {
    const long column = block.column + i, token = step.qo_indptr[block.row] + column / step.group();
    const long head = block.kv_head * step.group() + column % step.group();
    const Bf16* from = q + (token * step.num_heads + head) * step.dim;
    for (long d = 0; d < step.dim; d += 2) std::memcpy(to + d * kQueries + 2 * i, from + d, 2 * sizeof(Bf16));
  }
}

// Keys that each query sees: [first, last]. A lane without a query sees what the last query sees; nobody reads it.
struct Seen {
  __m512i first, last;
  std::int32_t latest_first, earliest_last;

  Seen(const StepView& step, const QueryBlock& block, long num_queries) {
    alignas(64) std::int32_t firsts[16], lasts[16];
    for (long i = 0; i < 16; i++) {
      const long column = block.column + (i < num_queries ? i : num_queries - 1);
      const long position = step.positions[step.qo_indptr[block.row] + column / step.group()];
      lasts[i] = static_cast<std::int32_t>(position);
      firsts[i] = static_cast<std::int32_t>(step.window && step.window <= position ? position - step.window + 1 : 0);
    }
    first = _mm512_load_si512(firsts);
    last = _mm512_load_si512(lasts);
    latest_first = firsts[15];
    earliest_last = lasts[0];
  }

  // Whether all queries see all of [begin, begin + count): most tiles of a long prompt.
  bool all(long begin, long count) const { return latest_first <= begin && begin + count - 1 <= earliest_last; }

  __mmask16 at(long key) const {
    const __m512i here = _mm512_set1_epi32(static_cast<std::int32_t>(key));
    return _mm512_cmple_epi32_mask(here, last) & _mm512_cmple_epi32_mask(first, here);
  }
};

// -> the largest score of each query. Scores of keys [first, end), both on tile edges.
__m512 score(const Products& products, const HeadPages& head, const Seen& seen, long first, long end,
             const Room& room) {
  __m512 largest = _mm512_set1_ps(-__builtin_inff());
  for (long token = first; token < end; token += kTokens) {
    float* s = room.scores + (token - first) * kQueries;
    const long more = token + kHalf < head.kv_len ? token + kHalf : token;  // nobody sees what is behind the end
    for (long ahead = token + kTokens; ahead < token + 2 * kTokens && ahead < head.kv_len; ahead += kHalf)
      prefetch_rows(head.key(ahead), kHalf, head.dim);
    const Bf16* keys = keys_at(head, token, room.copies);
    const Bf16* more_keys = keys_at(head, more, room.copies + kHalf * head.dim);
    products.scores(keys, more_keys, room.queries, head.dim, s);
    const bool all = seen.all(token, kTokens);
    for (long i = 0; i < kTokens; i++) {
      const __mmask16 lanes = all ? 0xffff : seen.at(token + i);
      largest = _mm512_mask_max_ps(largest, lanes, largest, _mm512_loadu_ps(s + i * kQueries));
    }
  }
  return largest;
}

// 16 rows of 16 numbers of 32 bits, in place.
inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Scores -> powers, bf16, in tiles with a row for each query. -> their sum for each query.
__m512 power(const Seen& seen, __m512 largest, float scale, long first, long end, const Room& room) {
  const __m512 factor = _mm512_set1_ps(scale * 1.442695041f), most = _mm512_mul_ps(largest, factor);
  const __m512i in_pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                            21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  __m512 sum = _mm512_setzero_ps();
  for (long token = first; token < end; token += kTokens) {
    const float* s = room.scores + (token - first) * kQueries;
    __m512i pairs[16];  // of tokens, a lane for each query
    const bool all = seen.all(token, kTokens);
    for (long i = 0; i < 16; i++, s += 2 * kQueries) {
      __m512 e[2];
      for (long j = 0; j < 2; j++) {
        e[j] = exp2(_mm512_fmsub_ps(_mm512_loadu_ps(s + j * kQueries), factor, most));
        if (!all) e[j] = _mm512_maskz_mov_ps(seen.at(token + 2 * i + j), e[j]);
        sum = _mm512_add_ps(sum, e[j]);
      }
      pairs[i] = _mm512_permutexvar_epi16(in_pairs, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(e[1], e[0])));
    }
    transpose(pairs);
    for (long i = 0; i < 16; i++) _mm512_storeu_si512(room.powers + (token - first) * kQueries + i * kTokens, pairs[i]);
  }
  return sum;
}

void store_block(const StepView& step, const QueryBlock& block, long num_queries, const float* inverse, Part dims,
                 const Room& room, Bf16* out) {
  const long width = dims.end - dims.begin;
  for (long i = 0; i < num_queries; i++) {
    const long column = block.column + i, token = step.qo_indptr[block.row] + column / step.group();
    const long head = block.kv_head * step.group() + column % step.group();
    Bf16* to = out + (token * step.num_heads + head) * step.dim + dims.begin;
    const __m512 factor = _mm512_set1_ps(inverse[i]);
    for (long d = 0; d < width; d += 16)
      store_bf16(to + d, _mm512_mul_ps(_mm512_loadu_ps(room.out + i * width + d), factor), 0xffff);
  }
}

class Attending {
 public:
  Attending(const Context& context, const StepView& step, const Bf16* q, const Bf16* view, Bf16* out)
      : context_(context), step_(step), q_(q), view_(view), out_(out) {}

  void run() {
    prepare_values();
    long most_keys = 0;
    for (long row = 0; row < step_.num_rows; row++) {
      const long keys = round_up(step_.kv_len(row), kTokens) - step_.first_key(step_.qo_indptr[row]);
      most_keys = keys > most_keys ? keys : most_keys;
    }
    for (int index = 0; index < context_.threads.size(); index++)
      context_.own[index].bytes(Room::bytes_for(most_keys, step_.dim));
    std::atomic<long> next{0};
    const auto blocks = [&](int index) {
      const Room room(context_.own[index].bytes(0), most_keys, step_.dim);
      context_.products.begin();
      for (long i; (i = next.fetch_add(1, std::memory_order_relaxed)) < step_.num_blocks;)
        attend(step_.blocks[i], room);
      context_.products.end();
    };
    if (step_.num_blocks == 1) return blocks(0);
    context_.threads.run(blocks);
  }

 private:
  // Rows of several blocks have their values paired once, not once for each block.
  bool is_prepared(long row) const { return step_.num_columns(row) > kQueries; }

  long prepared_elements(long row) const {
    const long first = step_.first_key(step_.qo_indptr[row]);
    return step_.num_kv_heads * round_up(step_.kv_len(row) - first, kTokens) * step_.dim;
  }

  void prepare_values() {
    long all = 0;
    for (long row = 0; row < step_.num_rows; row++) all += is_prepared(row) ? prepared_elements(row) : 0;
    if (!all) return;
    prepared_ = static_cast<Bf16*>(context_.prepared.bytes(static_cast<std::size_t>(all) * sizeof(Bf16)));
    context_.threads.run([&](int index) {
      Bf16* to = prepared_;
      for (long row = 0; row < step_.num_rows; row++) {
        if (!is_prepared(row)) continue;
        const long first = step_.first_key(step_.qo_indptr[row]),
                   per_head = prepared_elements(row) / step_.num_kv_heads;
        const Part tiles = part_of(per_head / step_.dim / kTokens, index, context_.threads.size());
        for (long kv_head = 0; kv_head < step_.num_kv_heads; kv_head++, to += per_head)
          pair_all_values(HeadPages(step_, view_, row, kv_head), first, tiles, to);
      }
    });
  }

  const Bf16* prepared_at(long row, long kv_head) const {
    const Bf16* at = prepared_;
    for (long before = 0; before < row; before++) at += is_prepared(before) ? prepared_elements(before) : 0;
    return at + prepared_elements(row) / step_.num_kv_heads * kv_head;
  }

  void attend(const QueryBlock& block, const Room& room) const {
    const HeadPages head(step_, view_, block.row, block.kv_head);
    const long left = step_.num_columns(block.row) - block.column, num_queries = left < kQueries ? left : kQueries;
    const long begin = step_.qo_indptr[block.row];
    const long first = step_.first_key(begin + block.column / step_.group());
    const long last = step_.positions[begin + (block.column + num_queries - 1) / step_.group()];
    const long end = round_up(last + 1, kTokens);
    pack_queries(step_, block, num_queries, q_, room.queries);
    const Seen seen(step_, block, num_queries);
    const __m512 largest = score(context_.products, head, seen, first, end, room);
    const __m512 sum = power(seen, largest, step_.scale, first, end, room);
    alignas(64) float inverse[16];
    _mm512_store_ps(inverse, _mm512_div_ps(_mm512_set1_ps(1.f), sum));
    for (long dim = 0; dim < step_.dim; dim += kWidth) {
      const long width = width_at(dim, step_.dim);
      if (is_prepared(block.row))
        prepared_values(block, {dim, dim + width}, first, end, num_queries, room);
      else
        paged_values(head, {dim, dim + width}, first, end, num_queries, room);
      store_block(step_, block, num_queries, inverse, {dim, dim + width}, room, out_);
    }
  }

  void prepared_values(const QueryBlock& block, Part dims, long first, long end, long num_queries,
                       const Room& room) const {
    const long from = step_.first_key(step_.qo_indptr[block.row]), width = dims.end - dims.begin;
    const long num_tokens = round_up(step_.kv_len(block.row) - from, kTokens);
    const Bf16* v = prepared_at(block.row, block.kv_head) + dims.begin * num_tokens + (first - from) * width;
    context_.products.values(room.powers, num_queries, v, end - first, width, room.out);
  }

  void paged_values(const HeadPages& head, Part dims, long first, long end, long num_queries, const Room& room) const {
    const long width = dims.end - dims.begin;
    for (long token = first; token < end; token += kTokens) {
      for (long ahead = token + kTokens; ahead < token + 2 * kTokens && ahead < head.kv_len; ahead += kHalf)
        prefetch_rows(head.value(ahead), kHalf, head.dim);
      pair_values(head, token, dims.begin, width, room.pairs + (token - first) * width);
    }
    context_.products.values(room.powers, num_queries, room.pairs, end - first, width, room.out);
  }

  const Context& context_;
  const StepView& step_;
  const Bf16* q_;
  const Bf16* view_;
  Bf16* out_;
  Bf16* prepared_ = nullptr;
};

}  // namespace

void attend(const Context& context, const StepView& step, const Bf16* q, const Bf16* view, Bf16* out) {
  Attending(context, step, q, view, out).run();
}

}  // namespace headrace::model
