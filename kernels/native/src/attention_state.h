// The memory of attention: what a work item has computed so far, and what a thread works in.
#pragma once

#include <algorithm>

#include "attention.h"

namespace loadout {
namespace {

// The softmax of some rows so far: sums of weighted values, of weights (by lane), and the largest
// score, on which all weights are relative.
struct State {
  float* out;      // [rows, width]
  float* weights;  // [rows, VF_WIDTH]
  float* largest;  // [rows]
  int64_t width;

  static int64_t size(int64_t rows, int64_t width) {
    return rows * (width + VF_WIDTH) + round_up(rows, VF_WIDTH);
  }
  State(float* memory, int64_t rows, int64_t width)
      : out(memory), weights(out + rows * width), largest(weights + rows * VF_WIDTH), width(width) {}

  void clear(int64_t rows) {
    std::fill_n(out, rows * width, 0.0f);
    std::fill_n(weights, rows * VF_WIDTH, 0.0f);
    std::fill_n(largest, rows, NOTHING_SEEN);
  }

  // What came after this.
  void merge(const State& later, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) {
      const float top = std::max(largest[r], later.largest[r]);
      const VF mine = vexp2(vset1(largest[r] - top)), its = vexp2(vset1(later.largest[r] - top));
      largest[r] = top;
      add(weights + r * VF_WIDTH, mine, later.weights + r * VF_WIDTH, its, VF_WIDTH);
      add(out + r * width, mine, later.out + r * width, its, width);
    }
  }

  static void add(float* a, VF scale_a, const float* b, VF scale_b, int64_t count) {
    for (int64_t i = 0; i < count; i += VF_WIDTH) {
      vstore(a + i, vfma(vload(b + i), scale_b, vmul(vload(a + i), scale_a)));
    }
  }
};

// One thread's memory, for products of up to `ROWS` rows.
template <typename T, int ROWS>
struct Scratch {
  T* q;                 // [block_rows, width]
  T* p;                 // [ROWS, BLOCK]
  float* s;             // [ROWS, BLOCK]
  T* keys;              // [width / P, BLOCK, P]
  T* values;            // [BLOCK / P, width, P]
  float* key_scales;    // [BLOCK]
  float* value_scales;  // [BLOCK]
  State total, part;

  Scratch(char* memory, int64_t rows, int64_t width)
      : q(carve<T>(memory, rows * width)),
        p(carve<T>(memory, ROWS * BLOCK)),
        s(carve<float>(memory, ROWS * BLOCK)),
        keys(carve<T>(memory, BLOCK * width)),
        values(carve<T>(memory, BLOCK * width)),
        key_scales(carve<float>(memory, BLOCK)),
        value_scales(carve<float>(memory, BLOCK)),
        total(carve<float>(memory, State::size(rows, width)), rows, width),
        part(carve<float>(memory, State::size(rows, width)), rows, width) {}

  template <typename U>
  static U* carve(char*& memory, int64_t count) {
    char* start = memory;
    memory += round_up(count * sizeof(U), 64);
    return reinterpret_cast<U*>(start);
  }
};

}  // namespace
}  // namespace loadout
