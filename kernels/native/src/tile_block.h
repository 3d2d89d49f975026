// A block of products by AMX's tiles: up to 32 rows by a panel, two tiles high and two wide.
//
// A panel is read as it lies: words of four bytes (two inputs of bf16, four of int8) of its outputs,
// side by side. 16 words by 16 outputs are a tile, and so are 64 bytes of 16 rows of x.
#pragma once

#include <algorithm>
#include <cstring>

#include "linear.h"
#include "tiles.h"

#if defined(__AMX_BF16__)

namespace loadout {

class TileBlock {
 public:
  static constexpr int ROWS = 2 * TILE_ROWS;

  // Returns sums of x * w, [rows, PANEL]: of bf16 as floats; of signed bytes of x and unsigned ones
  // of w as int32. x: `rows` rows of `row_bytes`, `stride` bytes apart; w: the words of as many
  // inputs. Calls each_step() for every 64 bytes of a row.
  template <typename Sum, typename EachStep>
  const Sum* multiply(const void* x, int64_t stride, int rows, const void* w, int64_t row_bytes,
                      EachStep each_step) {
    // Few inputs are half a tile.
    const int step = row_bytes <= TILE_BYTES / 2 ? TILE_BYTES / 2 : TILE_BYTES;
    shape(rows, step);
    const char* left = static_cast<const char*>(x);
    const char* right = static_cast<const char*>(w);
    if (rows > TILE_ROWS)
      multiply_rows<Sum, true>(left, stride, rows, right, row_bytes, step, each_step);
    else
      multiply_rows<Sum, false>(left, stride, rows, right, row_bytes, step, each_step);
    return reinterpret_cast<const Sum*>(sums_);
  }

 private:
  static constexpr int WORD_BYTES = 4;
  static constexpr int64_t WORDS_BYTES = PANEL * WORD_BYTES;  // a word of every output
  static constexpr int64_t SUMS_BYTES = PANEL * sizeof(float);
  static_assert(PANEL == 2 * TILE_COLUMNS);

  // Sum (i, j) of the block lies in register 2 * i + j: products of LEFT + i and RIGHT + j.
  void shape(int rows, int step) {
    tiles_.shape(rows * (TILE_BYTES + 1) + step, [&](TileLayout& layout) {
      for (int i = 0; i < 2; ++i) {
        const int height = std::clamp(rows - i * TILE_ROWS, 0, TILE_ROWS);
        layout.set(2 * i, height, TILE_BYTES);
        layout.set(2 * i + 1, height, TILE_BYTES);
        layout.set(LEFT + i, height, step);
        layout.set(RIGHT + i, step / WORD_BYTES, TILE_BYTES);
      }
    });
  }

  // `IS_HIGH`: there are lower tiles.
  template <typename Sum, bool IS_HIGH, typename EachStep>
  void multiply_rows(const char* x, int64_t stride, int rows, const char* w, int64_t row_bytes,
                     int step, EachStep each_step) {
    tile_zero<0>(), tile_zero<1>();
    if constexpr (IS_HIGH) tile_zero<2>(), tile_zero<3>();
    int64_t i = 0;
    for (; i + step <= row_bytes; i += step) {
      multiply_step<Sum, IS_HIGH>(x + i, stride, w + i / WORD_BYTES * WORDS_BYTES);
      each_step();
    }
    if (i < row_bytes) {
      copy_last(x + i, stride, rows, w + i / WORD_BYTES * WORDS_BYTES, row_bytes - i);
      multiply_step<Sum, IS_HIGH>(last_x_, TILE_BYTES, last_w_);
      each_step();
    }
    tile_store<0>(sums_[0], SUMS_BYTES);
    tile_store<1>(sums_[0] + TILE_COLUMNS, SUMS_BYTES);
    if constexpr (IS_HIGH) {
      tile_store<2>(sums_[TILE_ROWS], SUMS_BYTES);
      tile_store<3>(sums_[TILE_ROWS] + TILE_COLUMNS, SUMS_BYTES);
    }
  }

  template <typename Sum, bool IS_HIGH>
  static void multiply_step(const char* x, int64_t stride, const char* w) {
    tile_load<RIGHT>(w, WORDS_BYTES);
    tile_stream<LEFT>(x, stride);
    tile_load<RIGHT + 1>(w + WORDS_BYTES / 2, WORDS_BYTES);
    tile_dot<Sum, 0, LEFT, RIGHT>();
    tile_dot<Sum, 1, LEFT, RIGHT + 1>();
    keep_vectors_on();
    if constexpr (IS_HIGH) {
      tile_stream<LEFT + 1>(x + TILE_ROWS * stride, stride);
      tile_dot<Sum, 2, LEFT + 1, RIGHT>();
      tile_dot<Sum, 3, LEFT + 1, RIGHT + 1>();
    }
  }

  // The last inputs, fewer than a step has: zeros stand for the rest.
  void copy_last(const char* x, int64_t stride, int rows, const char* w, int64_t bytes) {
    std::memset(last_x_, 0, sizeof last_x_);
    for (int r = 0; r < rows; ++r) std::memcpy(last_x_ + r * TILE_BYTES, x + r * stride, bytes);
    const int64_t words_bytes = (bytes + WORD_BYTES - 1) / WORD_BYTES * WORDS_BYTES;
    std::memcpy(last_w_, w, words_bytes);
    std::memset(last_w_ + words_bytes, 0, sizeof last_w_ - words_bytes);
  }

  Tiles tiles_;
  alignas(64) float sums_[ROWS][PANEL];  // or int32
  alignas(64) char last_x_[ROWS * TILE_BYTES];
  alignas(64) char last_w_[TILE_ROWS * WORDS_BYTES];
};

}  // namespace loadout

#endif
