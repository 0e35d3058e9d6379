// Rows times a packed weight, with what comes after it. Knows no Python; `module.cpp` holds the weights.
#pragma once

#include "context.h"
#include "packing.h"

namespace headrace::model {

enum class Activation { kSilu, kGeluTanh };

struct PackedWeight {
  const Bf16* panels;
  long num_outputs;
  long num_inputs;
  const float* bias;  // [num_outputs], null: none
};

// `[num_rows, K] bf16` -> `[num_rows, N] fp32`, stored or added.
void linear(const Context& context, const PackedWeight& weight, const Bf16* inputs, long num_rows, float* out,
            bool add);

// Gate and up in one weight: `[num_rows, K] bf16` -> activation(gate) x up, `[num_rows, N] bf16`.
void gated_linear(const Context& context, const PackedWeight& weight, Activation activation, const Bf16* inputs,
                  long num_rows, Bf16* out);

}  // namespace headrace::model
