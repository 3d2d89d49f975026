// The second product of LoRA by AMX's tiles, for bf16: up to 16 tokens by 64 columns, 32 ranks at
// once. Packed columns of B lie as tiles are read: pairs of ranks by 16 columns.
#pragma once

#include "lora_expand.h"
#include "tiles.h"

#if defined(__AMX_BF16__)

namespace loadout {
namespace {

class TileExpand {
  using Vector = Axpy<bf16>::Vector;

 public:
  static constexpr int ROWS = TILE_ROWS;
  static constexpr int ROWS_UNPACKED = 2;

  // See VectorExpand.
  template <typename W, typename Out>
  void add(const Outputs<bf16>* outputs, int count, Out* const* out, const bf16* y, int step,
           float factor, const Columns<bf16, W>& columns, const Columns<bf16, W>& next,
           const Vector (*packed)[VECTORS], int n) {
    if (count == 1) multiply_few<1>(y, step, columns, next, n);
    else if (count == 2) multiply_few<2>(y, step, columns, next, n);
    else multiply(count, y, step, columns, next, packed, n);
    const VF scale = vset1(factor);
    for (int m = 0; m < count; ++m) {
      VF sums[VECTORS];
      LOADOUT_UNROLL for (int v = 0; v < VECTORS; ++v) sums[v] = vload(&sums_[m][v * VF_WIDTH]);
      if (outputs) add_sums<bf16, true>(out[m], sums, scale, n, outputs);
      else add_sums<bf16, false>(out[m], sums, scale, n, outputs);
    }
  }

 private:
  // The same sums of few tokens, whose B would take longer to pack than to multiply by vectors, in
  // the order of tiles and without denormals, as they are.
  template <int M, typename W>
  void multiply_few(const bf16* y, int step, const Columns<bf16, W>& columns,
                    const Columns<bf16, W>& next, int n) {
    VF sums[M][VECTORS] = {};
    for (int first = 0; first < columns.rank; first += TILE_INPUTS) {
      const int end = std::min(first + TILE_INPUTS, columns.rank);
      VF evens[M][VECTORS] = {}, odds[M][VECTORS] = {};
      for (int r = first; r < end; r += 2) {
        Vector b[VECTORS];
        columns.load(r, n, b);
        next.prefetch(r);
        LOADOUT_UNROLL for (int m = 0; m < M; ++m) {
          const VF x = vset1(to_float(y[m * step + r])), z = vset1(to_float(y[m * step + r + 1]));
          LOADOUT_UNROLL for (int v = 0; v < VECTORS; ++v) {
            evens[m][v] = vfma(x, even(b[v]), evens[m][v]);
            odds[m][v] = vfma(z, odd(b[v]), odds[m][v]);
          }
        }
      }
      LOADOUT_UNROLL for (int m = 0; m < M; ++m)
        LOADOUT_UNROLL for (int v = 0; v < VECTORS; ++v)
          sums[m][v] = vadd(sums[m][v], vadd(evens[m][v], odds[m][v]));
    }
    LOADOUT_UNROLL for (int m = 0; m < M; ++m)
      LOADOUT_UNROLL for (int v = 0; v < VECTORS; ++v) vstore(&sums_[m][v * VF_WIDTH], sums[m][v]);
  }

  static constexpr int MAX_PAIRS = MAX_PACKED_RANK / 2;
  static constexpr int STEP_PAIRS = TILE_INPUTS / 2;
  static constexpr int LAST = 1;  // operands LEFT + LAST and RIGHT + LAST have the last inputs
  static_assert(VECTORS == 4 && VF_WIDTH == TILE_COLUMNS);

  template <typename W>
  void multiply(int count, const bf16* y, int step, const Columns<bf16, W>& columns,
                const Columns<bf16, W>& next, const Vector (*packed)[VECTORS], int n) {
    const int pairs = (columns.rank + 1) / 2;
    shape(count, pairs % STEP_PAIRS);
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    for (int first = 0; first < pairs; first += MAX_PAIRS) {
      const int size = std::min(pairs - first, MAX_PAIRS);
      if (packed == nullptr)
        for (int p = 0; p < size; ++p) {
          columns.load(2 * (first + p), n, packed_[p]);
          next.prefetch(2 * (first + p));
        }
      multiply_ranks(y + 2 * first, step, packed ? packed : packed_, size);
    }
    constexpr int64_t ROW_BYTES = sizeof sums_[0];
    tile_store<0>(sums_[0], ROW_BYTES), tile_store<1>(sums_[0] + TILE_COLUMNS, ROW_BYTES);
    tile_store<2>(sums_[0] + 2 * TILE_COLUMNS, ROW_BYTES);
    tile_store<3>(sums_[0] + 3 * TILE_COLUMNS, ROW_BYTES);
  }

  static void multiply_ranks(const bf16* y, int step, const Vector (*b)[VECTORS], int pairs) {
    const int64_t y_bytes = step * static_cast<int64_t>(sizeof(bf16));
    int p = 0;
    for (; p + STEP_PAIRS <= pairs; p += STEP_PAIRS) {
      tile_load<LEFT>(y + 2 * p, y_bytes);
      multiply_columns<0>(b[p]);
    }
    if (p == pairs) return;
    tile_load<LEFT + LAST>(y + 2 * p, y_bytes);
    multiply_columns<LAST>(b[p]);
  }

  template <int OPERAND>
  static void multiply_columns(const Vector* b) {
    constexpr int L = LEFT + OPERAND, R = RIGHT + OPERAND;
    constexpr int64_t ROW_BYTES = VECTORS * sizeof(Vector);
    tile_load<R>(b, ROW_BYTES), tile_dot<float, 0, L, R>();
    tile_load<R>(b + 1, ROW_BYTES), tile_dot<float, 1, L, R>();
    tile_load<R>(b + 2, ROW_BYTES), tile_dot<float, 2, L, R>();
    tile_load<R>(b + 3, ROW_BYTES), tile_dot<float, 3, L, R>();
  }

  void shape(int rows, int last_pairs) {
    tiles_.shape(rows * TILE_ROWS + last_pairs, [&](TileLayout& layout) {
      for (int v = 0; v < VECTORS; ++v) layout.set(v, rows, TILE_BYTES);
      layout.set(LEFT, rows, TILE_BYTES);
      layout.set(RIGHT, STEP_PAIRS, TILE_BYTES);
      layout.set(LEFT + LAST, last_pairs ? rows : 0, last_pairs * PAIR_BYTES);
      layout.set(RIGHT + LAST, last_pairs, TILE_BYTES);
    });
  }

  Tiles tiles_;
  const NoDenormals no_denormals_;
  alignas(64) float sums_[TILE_ROWS][VECTORS * TILE_COLUMNS];
  alignas(64) Vector packed_[MAX_PAIRS][VECTORS];
};

}  // namespace
}  // namespace loadout

#endif
