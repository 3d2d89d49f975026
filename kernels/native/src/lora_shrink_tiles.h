// The first product of LoRA by AMX's tiles, for bf16: up to 64 ranks by 16 tokens, 32 inputs at
// once. Rows of A are left operands as they lie. Tokens are right operands: pairs of inputs by
// tokens, which is how one token lies; several are transposed.
#pragma once

#include <algorithm>
#include <type_traits>

#include "e4m3.h"
#include "lora.h"
#include "pairs.h"
#include "tiles.h"

#if defined(__AMX_BF16__)

namespace loadout {
namespace {

// Row i of the result is column i: 16 rows of 16 lanes.
inline void transpose(__m512i (&rows)[16]) {
  __m512i other[16];
  LOADOUT_UNROLL for (int i = 0; i < 16; i += 2) {
    other[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    other[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  LOADOUT_UNROLL for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(other[i], other[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(other[i], other[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(other[i + 1], other[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(other[i + 1], other[i + 3]);
  }
  LOADOUT_UNROLL for (int i = 0; i < 4; ++i) {
    other[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    other[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    other[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    other[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
  }
  LOADOUT_UNROLL for (int i = 0; i < 4; ++i) {
    rows[i] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0xdd);
    rows[i + 4] = _mm512_shuffle_i32x4(other[i + 4], other[i + 12], 0x88);
    rows[i + 12] = _mm512_shuffle_i32x4(other[i + 4], other[i + 12], 0xdd);
  }
}

class TileShrink {
 public:
  // y[t][r] = x[t] . a[r] for ranks [begin, end) and all tokens of an item; `next`: what is wanted
  // soon of A.
  template <typename W>
  void run(const LoraArgs& args, const LoraItem& item, const W* a, int64_t begin, int64_t end,
           bf16* y, int step, const W* next) {
    const int64_t in = args.in_features;
    const int32_t* tokens = args.plan.tokens + item.first;
    // One token is read as it lies, and a tile of ranks comes while the one before it is computed
    // with; several are transposed for as many ranks as possible.
    const int64_t most = item.count == 1 ? TILE_ROWS : MAX_RANKS;
    for (int64_t r = begin; r < end; r += most) {
      const int ranks = static_cast<int>(std::min(end - r, most));
      const W* soon = r + most < end ? a + (r + most) * in : next;
      for (int t = 0; t < item.count; t += TILE_COLUMNS) {
        const int count = std::min(item.count - t, TILE_COLUMNS);
        for (int i = 0; i < count; ++i)
          x_[i] = static_cast<const bf16*>(args.x) + tokens[t + i] * args.x_stride;
        multiply(a + r * in, ranks, count, in, t == 0 ? soon : nullptr);
        store(y + int64_t{t} * step + r, ranks, count, step);
      }
    }
  }

 private:
  static constexpr int MAX_TILES = 4;
  static constexpr int MAX_RANKS = MAX_TILES * TILE_ROWS;
  static constexpr int LAST = 1;  // LEFT + LAST has the last ranks, of which a tile may have few

  template <typename W>
  void multiply(const W* a, int ranks, int count, int64_t in, const W* next) {
    shape(ranks, count);
    const auto each_tile = [&](auto whole, auto last) {
      const int num_whole = (ranks - 1) / TILE_ROWS;
      if (num_whole > 0) whole(Constant<0>{});
      if (num_whole > 1) whole(Constant<1>{});
      if (num_whole > 2) whole(Constant<2>{});
      if (num_whole == 0) last(Constant<0>{});
      if (num_whole == 1) last(Constant<1>{});
      if (num_whole == 2) last(Constant<2>{});
      if (num_whole == 3) last(Constant<3>{});
    };
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    for (int64_t i = 0; i < in; i += TILE_INPUTS) {
      const int size = static_cast<int>(std::min<int64_t>(in - i, TILE_INPUTS));
      load_tokens(count, i, size);
      each_tile(
          [&](auto tile) {
            constexpr int J = decltype(tile)::value;
            load_ranks<LEFT>(a + J * TILE_ROWS * in + i, in, TILE_ROWS, size);
            tile_dot<float, J, LEFT, RIGHT>();
          },
          [&](auto tile) {
            constexpr int J = decltype(tile)::value;
            const int rows = ranks - J * TILE_ROWS;
            load_ranks<LEFT + LAST>(a + J * TILE_ROWS * in + i, in, rows, size);
            tile_dot<float, J, LEFT + LAST, RIGHT>();
          });
      keep_vectors_on();
      if (next && i * static_cast<int64_t>(sizeof(W)) % LINE_BYTES == 0)
        for (int r = 0; r < ranks; ++r) _mm_prefetch(next + r * in + i, _MM_HINT_T1);
    }
    // Of one token, sums of all ranks lie side by side.
    const int64_t row_bytes = count * PAIR_BYTES;
    const auto at = [&](int tile) { return sums_ + tile * TILE_ROWS * count; };
    const auto store = [&](auto tile) {
      tile_store<decltype(tile)::value>(at(decltype(tile)::value), row_bytes);
    };
    each_tile(store, store);
  }

  void shape(int ranks, int count) {
    tiles_.shape(ranks * (TILE_COLUMNS + 1) + count, [&](TileLayout& layout) {
      const int num_tiles = (ranks + TILE_ROWS - 1) / TILE_ROWS;
      const int last_rows = ranks - (num_tiles - 1) * TILE_ROWS;
      for (int i = 0; i < MAX_TILES; ++i) {
        const int rows = i + 1 < num_tiles ? TILE_ROWS : last_rows;
        layout.set(i, rows, count * PAIR_BYTES);
      }
      layout.set(LEFT, TILE_ROWS, TILE_BYTES);
      layout.set(LEFT + LAST, last_rows, TILE_BYTES);
      layout.set(RIGHT, TILE_INPUTS / 2, count * PAIR_BYTES);
    });
  }

  // Inputs [i, i + size) of all tokens; zeros stand for what a tile lacks.
  void load_tokens(int count, int64_t i, int size) {
    if (count == 1 && size == TILE_INPUTS) return tile_load<RIGHT>(x_[0] + i, PAIR_BYTES);
    __m512i rows[TILE_COLUMNS];
    const __mmask32 lanes = size == TILE_INPUTS ? ~__mmask32{0} : (__mmask32{1} << size) - 1;
    LOADOUT_UNROLL for (int t = 0; t < TILE_COLUMNS; ++t)
      rows[t] = _mm512_maskz_loadu_epi16(lanes, x_[std::min(t, count - 1)] + i);
    transpose(rows);
    LOADOUT_UNROLL for (int p = 0; p < TILE_INPUTS / 2; ++p)
      _mm512_store_si512(tokens_ + p * TILE_INPUTS, rows[p]);
    tile_load<RIGHT>(tokens_, TILE_BYTES);
  }

  // Inputs of `count` rows of A, `in` apart.
  template <int OPERAND, typename W>
  void load_ranks(const W* a, int64_t in, int count, int size) {
    if constexpr (std::is_same_v<W, bf16>) {
      if (size == TILE_INPUTS)
        return tile_load<OPERAND>(a, in * static_cast<int64_t>(sizeof(bf16)));
    }
    for (int r = 0; r < count; ++r) {
      W last[TILE_INPUTS] = {};
      const W* row = a + r * in;
      if (size < TILE_INPUTS) {
        std::memcpy(last, row, size * sizeof(W));
        row = last;
      }
      _mm512_store_si512(ranks_ + r * TILE_INPUTS, load_bf16(row));
    }
    tile_load<OPERAND>(ranks_, TILE_BYTES);
  }

  // Sums lie by ranks, y by tokens.
  void store(bf16* y, int ranks, int count, int step) {
    for (int r = 0; r < ranks; r += TILE_ROWS) {
      const int n = std::min(ranks - r, TILE_ROWS);
      const float* sums = sums_ + r * count;
      if (count == 1) {
        vstore(y + r, vload(sums), n);
        continue;
      }
      __m512i rows[TILE_ROWS];
      const __mmask16 lanes = first(count);
      LOADOUT_UNROLL for (int i = 0; i < TILE_ROWS; ++i)
        rows[i] = _mm512_maskz_loadu_epi32(lanes, sums + std::min(i, n - 1) * count);
      transpose(rows);
      for (int t = 0; t < count; ++t) {
        bf16* to = y + int64_t{t} * step + r;
        const VF values = _mm512_castsi512_ps(rows[t]);
        if (n == TILE_ROWS) vstore(to, values);
        else vstore(to, values, n);
      }
    }
  }

  Tiles tiles_;
  const bf16* x_[TILE_COLUMNS];
  alignas(64) float sums_[MAX_RANKS * TILE_COLUMNS];
  alignas(64) bf16 tokens_[TILE_INPUTS / 2 * TILE_INPUTS];
  alignas(64) bf16 ranks_[TILE_ROWS * TILE_INPUTS];
};

}  // namespace
}  // namespace loadout

#endif
