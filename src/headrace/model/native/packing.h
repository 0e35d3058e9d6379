// The form that weights are read in: panels of 32 outputs, in each the pairs of inputs one after another.
//
//     [ceil(N / 32)] panels of [K / 2][32][2] bf16      K filled up to whole 32 with zeros, N too
//
// 128 bytes are two inputs of 32 outputs: what two dot-product instructions take, and what a row of two AMX tiles is.
// One form for all instruction sets, so processes with different ones could share it. A decode step reads all panels
// from the first byte to the last. Gate and up lie in one panel, 16 outputs of each.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headrace::model {

using Bf16 = std::uint16_t;

constexpr long kPanel = 32;      // outputs
constexpr long kInputStep = 32;  // inputs that an AMX tile takes

constexpr long round_up(long value, long step) { return (value + step - 1) / step * step; }
constexpr long padded_inputs(long num_inputs) { return round_up(num_inputs, kInputStep); }
constexpr long num_panels(long num_outputs) { return (num_outputs + kPanel - 1) / kPanel; }
constexpr long panel_elements(long num_inputs) { return padded_inputs(num_inputs) * kPanel; }

// Rows of `weight` `[num_outputs, num_inputs]`, placed at `first_output`; what is not written stays as it is.
void pack(Bf16* packed, const Bf16* weight, long first_output, long num_outputs, long num_inputs);

// Output i of gate and of up at columns i % 16 and 16 + i % 16 of panel i / 16.
void pack_gated(Bf16* packed, const Bf16* gate, const Bf16* up, long num_outputs, long num_inputs);

}  // namespace headrace::model
