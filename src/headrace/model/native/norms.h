// Rms-norms of rows. Knows no Python.
#pragma once

#include "context.h"

namespace headrace::model {

// x `[num_rows, size] fp32`, scaled to a mean square of one and times weight `[size]` -> out bf16.
void rms_norm(const Context& context, const float* x, const float* weight, long num_rows, long size, float eps,
              Bf16* out);

// The same of `values`, added to x.
void add_rms_norm(const Context& context, float* x, const float* values, const float* weight, long num_rows, long size,
                  float eps);

// What one row is multiplied with.
float rms_scale(const float* row, long size, float eps);

}  // namespace headrace::model
