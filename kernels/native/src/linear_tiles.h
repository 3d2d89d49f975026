// Products with packed weights of bf16 by AMX's tiles; see linear.cpp.
//
// A panel is read as it lies: 16 pairs of inputs by 16 outputs are a tile. So are 16 rows of x. Up to
// 32 rows are multiplied at once, and a panel that many of them share comes from the second cache.
#pragma once

#include "panels.h"
#include "tiles.h"

#if defined(__AMX_BF16__)

namespace loadout {

// A panel that is wanted soon, fetched into the second cache bit by bit.
class PanelFetch {
 public:
  // In `steps` steps; a null panel is none.
  PanelFetch(const bf16* panel, int64_t elements, int64_t steps)
      : at_(reinterpret_cast<const char*>(panel)),
        end_(panel ? at_ + elements * static_cast<int64_t>(sizeof(bf16)) : at_),
        lines_((end_ - at_ + LINE_BYTES * steps - 1) / (LINE_BYTES * steps)) {}

  void step() {
    for (int64_t i = 0; i < lines_ && at_ < end_; ++i, at_ += LINE_BYTES)
      _mm_prefetch(at_, _MM_HINT_T1);
  }

 private:
  const char* at_;
  const char* end_;
  int64_t lines_;
};

class PanelTiles {
 public:
  static constexpr int64_t ROW_BLOCK_BYTES = 1280 * 1024;
  static constexpr int MAX_ROWS = 2 * TILE_ROWS;

  // Rows [first, last) by one panel; `next`: null, or the panel that this thread takes next.
  template <typename Out>
  void multiply(const LinearArgs& args, int64_t first, int64_t last, int64_t panel,
                const bf16* next) {
    const int64_t elements = panel_elements<bf16>(args.in_features);
    const bf16* w = static_cast<const bf16*>(args.weights) + panel * elements;
    const int64_t blocks = (last - first + MAX_ROWS - 1) / MAX_ROWS;
    const int64_t steps = (args.in_features + TILE_INPUTS - 1) / TILE_INPUTS;
    PanelFetch fetch(next, elements, blocks * steps);
    for (int64_t row = first; row < last; row += MAX_ROWS) {
      const int rows = static_cast<int>(std::min<int64_t>(last - row, MAX_ROWS));
      const bf16* x = static_cast<const bf16*>(args.x) + row * args.x_stride;
      shape(rows);
      if (rows > TILE_ROWS)
        multiply_rows<true>(x, rows, args.x_stride, w, args.in_features, fetch);
      else
        multiply_rows<false>(x, rows, args.x_stride, w, args.in_features, fetch);
      store_panel<Out>(args, sums_, row, rows, panel * PANEL);
    }
  }

 private:
  // Sums are a block, two tiles high and two wide: tile (i, j) lies in register 2 * i + j, and adds
  // up the products of LEFT + i and RIGHT + j.
  void shape(int rows) {
    tiles_.shape(rows, [&](TileLayout& layout) {
      for (int i = 0; i < 2; ++i) {
        const int height = std::clamp(rows - i * TILE_ROWS, 0, TILE_ROWS);
        layout.set(2 * i, height, TILE_BYTES);
        layout.set(2 * i + 1, height, TILE_BYTES);
        layout.set(LEFT + i, height, TILE_BYTES);
        layout.set(RIGHT + i, TILE_ROWS, TILE_BYTES);
      }
    });
  }

  static constexpr int64_t STEP_BYTES = PANEL * 4;  // a pair of inputs of all outputs

  // `IS_HIGH`: there are lower tiles.
  template <bool IS_HIGH>
  void multiply_rows(const bf16* x, int rows, int64_t stride, const bf16* w, int64_t k,
                     PanelFetch& fetch) {
    tile_zero<0>(), tile_zero<1>();
    if constexpr (IS_HIGH) tile_zero<2>(), tile_zero<3>();
    int64_t i = 0;
    for (; i + TILE_INPUTS <= k; i += TILE_INPUTS) {
      multiply_step<IS_HIGH>(x + i, stride, w + i * PANEL);
      fetch.step();
    }
    if (i < k) {
      copy_last(x + i, rows, stride, w + i * PANEL, static_cast<int>(k - i));
      multiply_step<IS_HIGH>(last_x_, TILE_INPUTS, last_w_);
      fetch.step();
    }
    constexpr int64_t row_bytes = PANEL * sizeof(float);
    tile_store<0>(sums_, row_bytes), tile_store<1>(sums_ + TILE_COLUMNS, row_bytes);
    if constexpr (IS_HIGH) {
      float* lower = sums_ + TILE_ROWS * PANEL;
      tile_store<2>(lower, row_bytes), tile_store<3>(lower + TILE_COLUMNS, row_bytes);
    }
  }

  template <bool IS_HIGH>
  static void multiply_step(const bf16* x, int64_t stride, const bf16* w) {
    const int64_t row_bytes = stride * static_cast<int64_t>(sizeof(bf16));
    tile_load<RIGHT>(w, STEP_BYTES);
    tile_stream<LEFT>(x, row_bytes);
    tile_load<RIGHT + 1>(w + 2 * TILE_COLUMNS, STEP_BYTES);
    tile_dot<0, LEFT, RIGHT>();
    tile_dot<1, LEFT, RIGHT + 1>();
    keep_vectors_on();
    if constexpr (IS_HIGH) {
      tile_stream<LEFT + 1>(x + TILE_ROWS * stride, row_bytes);
      tile_dot<2, LEFT + 1, RIGHT>();
      tile_dot<3, LEFT + 1, RIGHT + 1>();
    }
  }

  // The last inputs, fewer than a product has: zeros stand for the rest.
  void copy_last(const bf16* x, int rows, int64_t stride, const bf16* w, int count) {
    std::memset(last_x_, 0, sizeof last_x_);
    for (int r = 0; r < rows; ++r)
      std::memcpy(last_x_ + r * TILE_INPUTS, x + r * stride, count * sizeof(bf16));
    const size_t bytes = (count + 1) / 2 * STEP_BYTES;
    std::memcpy(last_w_, w, bytes);
    std::memset(reinterpret_cast<char*>(last_w_) + bytes, 0, sizeof last_w_ - bytes);
  }

  Tiles tiles_;
  alignas(64) float sums_[MAX_ROWS * PANEL];
  alignas(64) bf16 last_x_[MAX_ROWS * TILE_INPUTS];
  alignas(64) bf16 last_w_[TILE_INPUTS * PANEL];
};

}  // namespace loadout

#endif
