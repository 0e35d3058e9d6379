#include "packing.h"

#include <algorithm>
#include <cstring>

namespace headrace::model {
namespace {

// One column of a panel. `row` may end at an odd place.
void place(Bf16* panel, long column, const Bf16* row, long num_inputs) {
  Bf16* to = panel + 2 * column;
  for (long k = 0; k + 1 < num_inputs; k += 2) std::memcpy(to + k * kPanel, row + k, 2 * sizeof(Bf16));
  if (num_inputs % 2) to[(num_inputs - 1) * kPanel] = row[num_inputs - 1];
}

constexpr long kBlock = 64;  // inputs at a time, so that the lines written to stay in the first cache

void place_rows(Bf16* panel, const Bf16* const* rows, const long* columns, long num_rows, long num_inputs) {
  for (long k = 0; k < num_inputs; k += kBlock)
    for (long i = 0; i < num_rows; i++)
      place(panel + k * kPanel, columns[i], rows[i] + k, std::min(kBlock, num_inputs - k));
}

}  // namespace

void pack(Bf16* packed, const Bf16* weight, long first_output, long num_outputs, long num_inputs) {
  const Bf16* rows[kPanel];
  long columns[kPanel];
  for (long n = 0; n < num_outputs;) {
    const long panel = (first_output + n) / kPanel;
    long count = 0;
    for (; n < num_outputs && (first_output + n) / kPanel == panel; n++, count++) {
      rows[count] = weight + n * num_inputs;
      columns[count] = (first_output + n) % kPanel;
    }
    place_rows(packed + panel * panel_elements(num_inputs), rows, columns, count, num_inputs);
  }
}

void pack_gated(Bf16* packed, const Bf16* gate, const Bf16* up, long num_outputs, long num_inputs) {
  constexpr long half = kPanel / 2;
  const Bf16* rows[kPanel];
  long columns[kPanel];
  for (long n = 0; n < num_outputs; n += half) {
    const long width = std::min(half, num_outputs - n);
    for (long i = 0; i < width; i++) {
      rows[2 * i] = gate + (n + i) * num_inputs;
      columns[2 * i] = i;
      rows[2 * i + 1] = up + (n + i) * num_inputs;
      columns[2 * i + 1] = half + i;
    }
    place_rows(packed + n / half * panel_elements(num_inputs), rows, columns, 2 * width, num_inputs);
  }
}

}  // namespace headrace::model
