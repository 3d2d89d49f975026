// Products with weights that were packed once: out = x @ W^T + bias.
//
// W lies in panels of PANEL outputs, each contiguous and streamed once: fp32 as [K][PANEL], bf16 as
// [ceil(K / 2)][PANEL][2], two neighbours in K side by side as the bf16 dot product wants them; what
// is beyond K or the last output is 0. Every output is one sum in the order of K, whatever the
// number of tokens: a row alone gives the bits that it gives in any batch.
#include "linear.h"

#include <algorithm>

#include "simd.h"
#include "slice.h"

namespace loadout {

namespace {

constexpr int LINE_BYTES = 64;

// x rows that stay in L2 while the panels pass by.
constexpr int64_t ROW_BLOCK_BYTES = 384 * 1024;

// Lines of the panel that comes next, fetched while this one is computed with.
struct Prefetch {
  const char* next;
  template <int LINES>
  void advance() {
    for (int i = 0; i < LINES; ++i) _mm_prefetch(next + i * LINE_BYTES, _MM_HINT_T1);
    next += LINES * LINE_BYTES;
  }
};

#if defined(__AVX512F__)
constexpr int MAX_ROWS = 14;  // 28 sums, 2 weights, 1 or 2 values of x: 32 registers
#else
constexpr int MAX_ROWS = 6;  // 12 sums, 2 weights, 1 value of x: 16 registers
#endif
constexpr int TILE_VECTORS = 2;
constexpr int TILE = TILE_VECTORS * VF_WIDTH;
static_assert(PANEL % TILE == 0);

// The sums of ROWS rows and TILE outputs over all of K.
template <int ROWS>
struct Sums {
  VF value[ROWS][TILE_VECTORS];
};

template <typename T>
constexpr int64_t step() {
  return sizeof(T) == 2 ? 2 : 1;
}

#if defined(__AVX512BF16__)

inline __m512bh pair_of(uint32_t bits) { return (__m512bh)_mm512_set1_epi32(static_cast<int>(bits)); }

// One step of two in K. `pairs` are x's values of it, one per row.
template <int ROWS, typename Pair>
inline __attribute__((always_inline)) void multiply(Sums<ROWS>& sums, const bf16* w, Pair pair) {
  const __m512bh w0 = (__m512bh)_mm512_load_si512(w);
  const __m512bh w1 = (__m512bh)_mm512_load_si512(w + 32);
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    const __m512bh x = pair_of(pair(r));
    sums.value[r][0] = _mm512_dpbf16_ps(sums.value[r][0], x, w0);
    sums.value[r][1] = _mm512_dpbf16_ps(sums.value[r][1], x, w1);
  }
}

#else

inline VF low_half(const bf16* w) {
#if defined(__AVX512F__)
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_load_si512(w), 16));
#else
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_load_si256((const __m256i*)w), 16));
#endif
}

inline VF high_half(const bf16* w) {
#if defined(__AVX512F__)
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_load_si512(w), mask));
#else
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_load_si256((const __m256i*)w), mask));
#endif
}

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <int ROWS, typename Pair>
inline __attribute__((always_inline)) void multiply(Sums<ROWS>& sums, const bf16* w, Pair pair) {
  const VF even0 = low_half(w), even1 = low_half(w + 2 * VF_WIDTH);
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    const VF x = vset1(bits_to_float(pair(r) << 16));
    sums.value[r][0] = vfma(x, even0, sums.value[r][0]);
    sums.value[r][1] = vfma(x, even1, sums.value[r][1]);
  }
  const VF odd0 = high_half(w), odd1 = high_half(w + 2 * VF_WIDTH);
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    const VF x = vset1(bits_to_float(pair(r) & 0xffff0000));
    sums.value[r][0] = vfma(x, odd0, sums.value[r][0]);
    sums.value[r][1] = vfma(x, odd1, sums.value[r][1]);
  }
}

#endif

template <int ROWS, int LINES>
inline void accumulate(Sums<ROWS>& sums, const bf16* x, int64_t x_stride, const bf16* w, int64_t k,
                       Prefetch& prefetch) {
  int64_t i = 0;
#pragma GCC unroll 2
  for (; i + 1 < k; i += 2) {
    multiply(sums, w + i * PANEL, [&](int r) {
      uint32_t bits;
      std::memcpy(&bits, x + r * x_stride + i, sizeof bits);
      return bits;
    });
    prefetch.advance<LINES>();
  }
  if (i < k)
    multiply(sums, w + i * PANEL, [&](int r) { return uint32_t{x[r * x_stride + i].bits}; });
}

template <int ROWS, int LINES>
inline void accumulate(Sums<ROWS>& sums, const float* x, int64_t x_stride, const float* w,
                       int64_t k, Prefetch& prefetch) {
#pragma GCC unroll 2
  for (int64_t i = 0; i < k; ++i) {
    const VF w0 = vload(w + i * PANEL), w1 = vload(w + i * PANEL + VF_WIDTH);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const VF xr = vset1(x[r * x_stride + i]);
      sums.value[r][0] = vfma(xr, w0, sums.value[r][0]);
      sums.value[r][1] = vfma(xr, w1, sums.value[r][1]);
    }
    prefetch.advance<LINES>();
  }
}

// ROWS rows by one tile of a panel. `n`: how many of its outputs exist.
template <typename T, typename Out, int ROWS, int LINES>
void tile(const LinearArgs& args, int64_t row, int64_t column, const T* w, Prefetch& prefetch) {
  Sums<ROWS> sums;
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < TILE_VECTORS; ++v) sums.value[r][v] = vzero();
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
  accumulate<ROWS, LINES>(sums, x, args.x_stride, w, args.in_features, prefetch);
  Out* out = static_cast<Out*>(args.out) + row * args.out_stride + column;
#pragma GCC unroll 2
  for (int v = 0; v < TILE_VECTORS; ++v) {
    const int64_t left = args.out_features - column - v * VF_WIDTH;
    if (left <= 0) return;
    const int n = static_cast<int>(std::min<int64_t>(left, VF_WIDTH));
    const VF bias = args.bias ? vload(args.bias + column + v * VF_WIDTH, n) : vzero();
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const VF sum = vadd(sums.value[r][v], bias);
      Out* to = out + r * args.out_stride + v * VF_WIDTH;
      if (n == VF_WIDTH)
        vstore(to, sum);
      else
        vstore(to, sum, n);
    }
  }
}

template <typename T, typename Out>
using Tile = void (*)(const LinearArgs&, int64_t, int64_t, const T*, Prefetch&);

template <typename T, typename Out, int LINES, int ROWS = MAX_ROWS>
Tile<T, Out> tile_of(int rows) {
  if constexpr (ROWS == 1)
    return tile<T, Out, 1, LINES>;
  else
    return rows == ROWS ? tile<T, Out, ROWS, LINES> : tile_of<T, Out, LINES, ROWS - 1>(rows);
}

// Rows [first, last) by one panel, in tiles of nearly equal height.
template <typename T, typename Out>
void panel(const LinearArgs& args, int64_t first, int64_t last, int64_t panel, int64_t next) {
  const int64_t size = panel_elements<T>(args.in_features);
  const T* weights = static_cast<const T*>(args.weights);
  const T* w = weights + panel * size;
  Prefetch prefetch{reinterpret_cast<const char*>(weights + next * size)};
  const int64_t tiles = (last - first + MAX_ROWS - 1) / MAX_ROWS;
  constexpr int LINES = PANEL * step<T>() * sizeof(T) / LINE_BYTES;  // per step in K
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t row = first + (last - first) * i / tiles;
    const int rows = static_cast<int>(first + (last - first) * (i + 1) / tiles - row);
    for (int part = 0; part < PANEL; part += TILE) {
      const int64_t column = panel * PANEL + part;
      const T* from = w + part * step<T>();
      if (i * TILE_VECTORS >= LINES || next < 0)
        tile_of<T, Out, 0>(rows)(args, row, column, from, prefetch);
      else if (tiles == 1)
        tile_of<T, Out, LINES * TILE / PANEL>(rows)(args, row, column, from, prefetch);
      else
        tile_of<T, Out, 1>(rows)(args, row, column, from, prefetch);
    }
  }
}

}  // namespace

template <typename T, typename Out>
void linear(const LinearArgs& args, const Slice& slice) {
  const int64_t tokens = *args.num_tokens;
  const int64_t row_bytes = args.in_features * static_cast<int64_t>(sizeof(T));
  const int64_t most = std::max<int64_t>(MAX_ROWS, ROW_BLOCK_BYTES / row_bytes);
  const int64_t blocks = (tokens + most - 1) / most;
  const int64_t panels = (args.out_features + PANEL - 1) / PANEL;
  const int64_t items = blocks * panels;
  for (int64_t item = slice.take(), next; item < items; item = next) {
    next = slice.take();
    const int64_t block = item / panels;
    panel<T, Out>(args, tokens * block / blocks, tokens * (block + 1) / blocks, item % panels,
                  next < items ? next % panels : -1);
  }
}

}  // namespace loadout

LOADOUT_EXPORT(linear_float, loadout::LinearArgs, (loadout::linear<float, float>))
LOADOUT_EXPORT(linear_bf16, loadout::LinearArgs, (loadout::linear<loadout::bf16, loadout::bf16>))
LOADOUT_EXPORT(linear_bf16_float, loadout::LinearArgs, (loadout::linear<loadout::bf16, float>))
