// Products with packed weights; see linear.cpp.
#pragma once

#include <cstdint>

namespace loadout {

constexpr int PANEL = 32;

// Elements of one panel: K in whole steps, PANEL outputs.
template <typename T>
constexpr int64_t panel_elements(int64_t in_features) {
  const int64_t step = sizeof(T) == 2 ? 2 : 1;
  return (in_features + step - 1) / step * step * PANEL;
}

// out[t] = x[t] @ W^T + bias, summed in fp32, rounded once.
struct LinearArgs {
  const void* x;        // [T, in_features], rows x_stride elements apart
  const void* weights;  // packed, on 64 bytes
  const float* bias;    // [out_features], or null
  void* out;            // [T, out_features], rows out_stride elements apart
  const int32_t* num_tokens;
  int64_t x_stride;
  int64_t out_stride;
  int64_t in_features;
  int64_t out_features;
};

// The same of rows in the order of experts, each with the weights of its expert: experts lie one
// behind the other, each in panels of its own.
struct ExpertsLinearArgs {
  LinearArgs linear;      // without num_tokens; weights and bias are those of the first expert
  const int32_t* starts;  // [num_experts + 1]: the first row of each, and how many there are
  int64_t num_experts;
};

}  // namespace loadout
