// Products with decoded weights by AMX's tiles, for bf16: see quantised.cpp.
#pragma once

#include <algorithm>

#include "linear.h"
#include "tiles.h"

#if defined(__AMX_BF16__)

namespace loadout {

// The products of a chunk, by up to 32 rows.
class ChunkTiles {
 public:
  static constexpr int ROWS = 2 * TILE_ROWS;

  // Returns sums of x * weight, [rows, PANEL], over `size` inputs. `decoded`: pairs of inputs by
  // PANEL outputs, with room for whole steps; what lies beyond the last pair is overwritten.
  const float* multiply(const bf16* x, int64_t stride, int rows, float* decoded, int64_t size) {
    // Short chunks are half a step each.
    const int inputs = size <= TILE_INPUTS / 2 ? TILE_INPUTS / 2 : TILE_INPUTS;
    shape(rows, inputs);
    if (rows > TILE_ROWS) multiply_rows<true>(x, stride, rows, decoded, size, inputs);
    else multiply_rows<false>(x, stride, rows, decoded, size, inputs);
    return sums_;
  }

 private:
  static constexpr int64_t WEIGHT_BYTES = PANEL * sizeof(float), SUM_BYTES = PANEL * sizeof(float);

  // As in PanelTiles, over so many inputs at once.
  void shape(int rows, int inputs) {
    tiles_.shape(rows * (TILE_INPUTS + 1) + inputs, [&](TileLayout& layout) {
      for (int i = 0; i < 2; ++i) {
        const int height = std::clamp(rows - i * TILE_ROWS, 0, TILE_ROWS);
        layout.set(2 * i, height, TILE_BYTES);
        layout.set(2 * i + 1, height, TILE_BYTES);
        layout.set(LEFT + i, height, inputs / 2 * PAIR_BYTES);
        layout.set(RIGHT + i, inputs / 2, TILE_BYTES);
      }
    });
  }

  template <bool IS_HIGH>
  void multiply_rows(const bf16* x, int64_t stride, int rows, float* decoded, int64_t size,
                     int inputs) {
    tile_zero<0>(), tile_zero<1>();
    if constexpr (IS_HIGH) tile_zero<2>(), tile_zero<3>();
    int64_t i = 0;
    for (; i + inputs <= size; i += inputs)
      multiply_step<IS_HIGH>(x + i, stride, decoded + i / 2 * PANEL);
    if (i < size) {
      const int64_t count = size - i, pairs = (count + 1) / 2;
      float* last = decoded + i / 2 * PANEL;
      std::memset(last + pairs * PANEL, 0, (inputs / 2 - pairs) * WEIGHT_BYTES);
      std::memset(last_x_, 0, sizeof last_x_);
      for (int r = 0; r < rows; ++r)
        std::memcpy(last_x_ + r * TILE_INPUTS, x + r * stride + i, count * sizeof(bf16));
      multiply_step<IS_HIGH>(last_x_, TILE_INPUTS, last);
    }
    tile_store<0>(sums_, SUM_BYTES), tile_store<1>(sums_ + TILE_COLUMNS, SUM_BYTES);
    if constexpr (IS_HIGH) {
      float* lower = sums_ + TILE_ROWS * PANEL;
      tile_store<2>(lower, SUM_BYTES), tile_store<3>(lower + TILE_COLUMNS, SUM_BYTES);
    }
  }

  template <bool IS_HIGH>
  static void multiply_step(const bf16* x, int64_t stride, const float* weights) {
    const int64_t row_bytes = stride * static_cast<int64_t>(sizeof(bf16));
    tile_load<RIGHT>(weights, WEIGHT_BYTES);
    tile_load<LEFT>(x, row_bytes);
    tile_load<RIGHT + 1>(weights + TILE_COLUMNS, WEIGHT_BYTES);
    tile_dot<0, LEFT, RIGHT>();
    tile_dot<1, LEFT, RIGHT + 1>();
    if constexpr (IS_HIGH) {
      tile_load<LEFT + 1>(x + TILE_ROWS * stride, row_bytes);
      tile_dot<2, LEFT + 1, RIGHT>();
      tile_dot<3, LEFT + 1, RIGHT + 1>();
    }
  }

  Tiles tiles_;
  alignas(64) float sums_[ROWS * PANEL];
  alignas(64) bf16 last_x_[ROWS * TILE_INPUTS];
};

}  // namespace loadout

#endif
