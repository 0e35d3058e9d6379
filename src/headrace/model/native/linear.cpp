#include "linear.h"

#include <cstring>

#include "lanes.h"

namespace headrace::model {
namespace {

constexpr long kRowsInCache = 384;  // of inputs, that stay in the second cache while all panels pass by

// Blocks of rows as the products read them: whole inputs, and whole rows where they want them.
class Blocks {
 public:
  Blocks(const Context& context, const Bf16* inputs, long num_rows, long num_inputs)
      : rows_(inputs), stride_(num_inputs), num_rows_(num_rows) {
    const Products& products = context.products;
    const long num_blocks = (num_rows + products.most_rows - 1) / products.most_rows;
    step_ = products.whole_rows ? products.most_rows : (num_rows + num_blocks - 1) / num_blocks;
    const long padded = padded_inputs(num_inputs);
    const bool is_ragged = products.whole_rows && num_rows % 16;
    tail_begin_ = padded != num_inputs ? 0 : is_ragged ? num_rows / step_ * step_ : num_rows;
    if (tail_begin_ < num_rows) copy_tail(context.prepared, padded);
  }

  long step() const { return step_; }
  long rows_at(long row) const { return num_rows_ - row < step_ ? num_rows_ - row : step_; }
  const Bf16* at(long row) const {
    return row < tail_begin_ ? rows_ + row * stride_ : tail_ + (row - tail_begin_) * tail_stride_;
  }
  long stride_at(long row) const { return row < tail_begin_ ? stride_ : tail_stride_; }

 private:
  void copy_tail(Scratch& scratch, long padded) {
    const long count = num_rows_ - tail_begin_, whole = round_up(count, 32);
    Bf16* tail = static_cast<Bf16*>(scratch.bytes(static_cast<std::size_t>(whole * padded) * sizeof(Bf16)));
    std::memset(tail, 0, static_cast<std::size_t>(whole * padded) * sizeof(Bf16));
    for (long i = 0; i < count; i++)
      std::memcpy(tail + i * padded, rows_ + (tail_begin_ + i) * stride_,
                  static_cast<std::size_t>(stride_) * sizeof(Bf16));
    tail_ = tail;
    tail_stride_ = padded;
  }

  const Bf16* rows_;
  const Bf16* tail_ = nullptr;
  long stride_, tail_stride_ = 0, num_rows_, step_ = 0, tail_begin_ = 0;
};

// Calls after(c, row, num_rows, panel) with the sums `[num_rows][32]` of each block and panel.
template <class After>
void multiply(const Context& context, const PackedWeight& weight, long panels, const Bf16* inputs, long num_rows,
              After after) {
  if (!num_rows) return;
  const Blocks blocks(context, inputs, num_rows, weight.num_inputs);
  const long padded = padded_inputs(weight.num_inputs), per_panel = panel_elements(weight.num_inputs);
  const long cached = kRowsInCache / blocks.step() * blocks.step();
  context.threads.run([&](int index) {
    alignas(64) float c[32 * kPanel];
    const Part part = part_of(panels, index, context.threads.size());
    context.products.begin();
    for (long first = 0; first < num_rows; first += cached) {
      const long last = num_rows - first < cached ? num_rows : first + cached;
      for (long panel = part.begin; panel < part.end; panel++)
        for (long row = first; row < last; row += blocks.step()) {
          const long count = blocks.rows_at(row);
          context.products.panel(blocks.at(row), blocks.stride_at(row), count, weight.panels + panel * per_panel,
                                 padded, c);
          after(c, row, count, panel);
        }
    }
    context.products.end();
  });
}

inline __m512 activate(Activation activation, __m512 x) {
  __m512 u = x;  // both are x / (1 + exp(-u))
  if (activation == Activation::kGeluTanh) {
    const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    u = _mm512_mul_ps(_mm512_set1_ps(2 * 0.7978845608f), _mm512_fmadd_ps(_mm512_set1_ps(0.044715f), cube, x));
  }
  const __m512 e = exp2(_mm512_mul_ps(u, _mm512_set1_ps(-1.442695041f)));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.f), e));
}

}  // namespace

void linear(const Context& context, const PackedWeight& weight, const Bf16* inputs, long num_rows, float* out,
            bool add) {
  const long width = weight.num_outputs;
  multiply(context, weight, num_panels(width), inputs, num_rows, [&](const float* c, long row, long count, long panel) {
    for (long column = panel * kPanel; column < width && column < (panel + 1) * kPanel; column += 16) {
      const __mmask16 lanes = lanes_of(width - column);
      const float* sums = c + column % kPanel;
      const __m512 bias = weight.bias ? _mm512_maskz_loadu_ps(lanes, weight.bias + column) : _mm512_setzero_ps();
      for (long i = 0; i < count; i++) {
        float* to = out + (row + i) * width + column;
        __m512 value = _mm512_add_ps(_mm512_load_ps(sums + i * kPanel), bias);
        if (add) value = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, to), value);
        _mm512_mask_storeu_ps(to, lanes, value);
      }
    }
  });
}

void gated_linear(const Context& context, const PackedWeight& weight, Activation activation, const Bf16* inputs,
                  long num_rows, Bf16* out) {
  const long width = weight.num_outputs;
  multiply(context, weight, num_panels(2 * width), inputs, num_rows,
           [&](const float* c, long row, long count, long panel) {
             const long column = panel * kPanel / 2;
             const __mmask16 lanes = lanes_of(width - column);
             for (long i = 0; i < count; i++) {
               const __m512 gate = _mm512_load_ps(c + i * kPanel), up = _mm512_load_ps(c + i * kPanel + 16);
               store_bf16(out + (row + i) * width + column, _mm512_mul_ps(activate(activation, gate), up), lanes);
             }
           });
}

}  // namespace headrace::model
