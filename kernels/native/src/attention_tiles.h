// The two products of attention by AMX's tiles, for bf16; see attention_products.h.
//
// Keys lie as tiles are read: pairs of dimensions by 16 cells. Values do too, pairs of cells by 16
// dimensions, of which one product takes 32 cells: always those that begin at a multiple of 32, so
// that a query's bits do not depend on its neighbours.
#pragma once

#include "attention_products.h"
#include "tiles.h"

#if defined(__AMX_BF16__)

namespace loadout {
namespace {

class TileProducts {
 public:
  static constexpr int ROWS = TILE_ROWS, CELLS = TILE_INPUTS;

  // See VectorProducts. `q` has rows of whole tiles of cells, zeros beyond the head's dimensions.
  void score(float* s, const bf16* q, int64_t width, int rows, const Cells<bf16>& cells,
             int64_t num_tiles) {
    shape(rows);
    with_constant<1, BLOCK_TILES>(static_cast<int>(num_tiles), [&](auto n) {
      score_tiles<decltype(n)::value>(s, q, width, cells);
    });
  }

  void weigh(float* out, int64_t width, int rows, const float* factor, const bf16* p,
             const Cells<bf16>& cells, int64_t num_tiles) {
    shape(rows);
    for (int i = 0; i < rows; ++i) {
      if (factor[i] == 1.0f) continue;
      const VF scale = vset1(factor[i]);
      float* row = out + i * width;
      for (int64_t d = 0; d < width; d += VF_WIDTH) vstore(row + d, vmul(vload(row + d), scale));
    }
    constexpr int64_t STEP = MAX_SUMS * TILE_COLUMNS;
    for (int64_t d = 0; d < width; d += STEP) {
      const int64_t count = std::min(width - d, STEP) / TILE_COLUMNS;
      with_constant<1, MAX_SUMS>(static_cast<int>(count), [&](auto n) {
        weigh_tiles<decltype(n)::value>(out + d, width, p, cells, num_tiles, d);
      });
    }
  }

 private:
  static constexpr int MAX_SUMS = 4;
  static constexpr int HALF = 1;  // operands LEFT + HALF and RIGHT + HALF have half of the inputs
  static_assert(TILE == TILE_COLUMNS && 2 * TILE == TILE_INPUTS && BLOCK_TILES == MAX_SUMS);

  void shape(int rows) {
    tiles_.shape(rows, [&](TileLayout& layout) {
      for (int sum = 0; sum < MAX_SUMS; ++sum) layout.set(sum, rows, TILE_BYTES);
      layout.set(LEFT, rows, TILE_BYTES);
      layout.set(RIGHT, TILE_ROWS, TILE_BYTES);
      layout.set(LEFT + HALF, rows, TILE_BYTES / 2);
      layout.set(RIGHT + HALF, TILE_ROWS / 2, TILE_BYTES);
    });
  }

  // Scores of N tiles of cells.
  template <int N>
  static void score_tiles(float* s, const bf16* q, int64_t width, const Cells<bf16>& cells) {
    const int64_t q_bytes = width * static_cast<int64_t>(sizeof(bf16));
    const int64_t key_bytes = cells.key_stride * static_cast<int64_t>(sizeof(bf16));
    each_sum<N>([](auto j) { tile_zero<decltype(j)::value>(); });
    int64_t d = 0;
    for (; d + TILE_INPUTS <= width; d += TILE_INPUTS) {
      tile_load<LEFT>(q + d, q_bytes);
      each_sum<N>([&](auto j) {
        constexpr int J = decltype(j)::value;
        tile_load<RIGHT>(cells.keys[J] + d / 2 * cells.key_stride, key_bytes);
        tile_dot<float, J, LEFT, RIGHT>();
      });
    }
    if (d < width) {
      tile_load<LEFT + HALF>(q + d, q_bytes);
      each_sum<N>([&](auto j) {
        constexpr int J = decltype(j)::value;
        tile_load<RIGHT + HALF>(cells.keys[J] + d / 2 * cells.key_stride, key_bytes);
        tile_dot<float, J, LEFT + HALF, RIGHT + HALF>();
      });
    }
    each_sum<N>([&](auto j) {
      constexpr int J = decltype(j)::value;
      tile_store<J>(s + J * TILE_COLUMNS, BLOCK * sizeof(float));
    });
  }

  // N tiles of dimensions, from `first_dim` on.
  template <int N>
  static void weigh_tiles(float* out, int64_t width, const bf16* p, const Cells<bf16>& cells,
                          int64_t num_tiles, int64_t first_dim) {
    constexpr int64_t P_BYTES = BLOCK * sizeof(bf16);
    const int64_t out_bytes = width * static_cast<int64_t>(sizeof(float));
    const int64_t value_bytes = cells.value_stride * static_cast<int64_t>(sizeof(bf16));
    each_sum<N>([&](auto j) {
      constexpr int J = decltype(j)::value;
      tile_load<J>(out + J * TILE_COLUMNS, out_bytes);
    });
    for (int64_t tile = 0; tile < num_tiles; tile += 2) {
      const bf16* v = cells.values[tile] + 2 * first_dim;
      const bool is_half = tile + 1 == num_tiles;
      if (is_half)
        tile_load<LEFT + HALF>(p + tile * TILE, P_BYTES);
      else
        tile_load<LEFT>(p + tile * TILE, P_BYTES);
      each_sum<N>([&](auto j) {
        constexpr int J = decltype(j)::value;
        if (is_half) {
          tile_load<RIGHT + HALF>(v + J * 2 * TILE_COLUMNS, value_bytes);
          tile_dot<float, J, LEFT + HALF, RIGHT + HALF>();
        } else {
          tile_load<RIGHT>(v + J * 2 * TILE_COLUMNS, value_bytes);
          tile_dot<float, J, LEFT, RIGHT>();
        }
      });
    }
    each_sum<N>([&](auto j) {
      constexpr int J = decltype(j)::value;
      tile_store<J>(out + J * TILE_COLUMNS, out_bytes);
    });
  }

  // body(Constant<j>) for j < N: registers are named when the code is compiled.
  template <int N, typename Body>
  static void each_sum(Body body) {
    body(Constant<0>{});
    if constexpr (N > 1) body(Constant<1>{});
    if constexpr (N > 2) body(Constant<2>{});
    if constexpr (N > 3) body(Constant<3>{});
  }

  Tiles tiles_;
};

template <>
struct ProductsOf<bf16> {
  using Type = TileProducts;
};

}  // namespace
}  // namespace loadout

#endif
