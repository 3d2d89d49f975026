// Products with weights that were packed once: out = x @ W^T + bias.
//
// W lies in panels of PANEL outputs, each contiguous and streamed once: fp32 as [K][PANEL], bf16 as
// [ceil(K / 2)][PANEL][2], two neighbours in K side by side as the bf16 dot product wants them; what
// is beyond K or the last output is 0. Every output is one sum in the order of K, whatever the
// number of tokens: a row alone gives the bits that it gives in any batch.
#include "linear.h"

#include <algorithm>

#include "linear_tiles.h"
#include "panels.h"
#include "simd.h"
#include "slice.h"

namespace loadout {

namespace {

template <typename T>
constexpr int STEP = sizeof(T) == 2 ? 2 : 1;

#if defined(__AVX512BF16__)

// One step of two in K; pair(r) is row r's two values.
template <int ROWS, typename Pair>
inline __attribute__((always_inline)) void multiply(Sums<ROWS>& sums, const bf16* w, Pair pair) {
  constexpr int VECTORS = tile_vectors(ROWS);
  __m512bh weights[VECTORS];
  for (int v = 0; v < VECTORS; ++v) weights[v] = (__m512bh)_mm512_load_si512(w + v * 2 * VF_WIDTH);
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    const __m512bh x = (__m512bh)_mm512_set1_epi32(static_cast<int>(pair(r)));
    for (int v = 0; v < VECTORS; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], x, weights[v]);
  }
}

#else

// Half a step: of every pair what `half` (even or odd) makes of it.
template <int ROWS, typename Pair, typename Half>
inline __attribute__((always_inline)) void multiply_half(Sums<ROWS>& sums, const bf16* w,
                                                         Pair pair, Half half) {
  constexpr int VECTORS = tile_vectors(ROWS);
  VF weights[VECTORS];
  for (int v = 0; v < VECTORS; ++v) weights[v] = half(vbits(w + v * 2 * VF_WIDTH));
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    const VF x = half(vbits(pair(r)));
    for (int v = 0; v < VECTORS; ++v) sums[r][v] = vfma(x, weights[v], sums[r][v]);
  }
}

template <int ROWS, typename Pair>
inline __attribute__((always_inline)) void multiply(Sums<ROWS>& sums, const bf16* w, Pair pair) {
  multiply_half<ROWS>(sums, w, pair, [](VI x) { return even(x); });
  asm volatile("" ::: "memory");  // loads again rather than hold the pairs in registers
  multiply_half<ROWS>(sums, w, pair, [](VI x) { return odd(x); });
}

#endif

template <int ROWS, int LINES>
inline void multiply_all(Sums<ROWS>& sums, const bf16* x, int64_t stride, const bf16* w, int64_t k,
                         const char* next) {
  int64_t i = 0;
#pragma GCC unroll 2
  for (; i + 1 < k; i += 2) {
    multiply<ROWS>(sums, w + i * PANEL, [&](int r) {
      uint32_t bits;
      std::memcpy(&bits, x + r * stride + i, sizeof bits);
      return bits;
    });
    fetch<LINES>(next, i / 2);
  }
  if (i < k)
    multiply<ROWS>(sums, w + i * PANEL, [&](int r) { return uint32_t{x[r * stride + i].bits}; });
}

template <int ROWS, int LINES>
inline void multiply_all(Sums<ROWS>& sums, const float* x, int64_t stride, const float* w,
                         int64_t k, const char* next) {
  constexpr int VECTORS = tile_vectors(ROWS);
#pragma GCC unroll 2
  for (int64_t i = 0; i < k; ++i) {
    VF weights[VECTORS];
    for (int v = 0; v < VECTORS; ++v) weights[v] = vload(w + i * PANEL + v * VF_WIDTH);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const VF xr = vset1(x[r * stride + i]);
      for (int v = 0; v < VECTORS; ++v) sums[r][v] = vfma(xr, weights[v], sums[r][v]);
    }
    fetch<LINES>(next, i);
  }
}

// The sums of ROWS rows of x, `stride` apart, and the outputs at w, over all k inputs.
template <typename T, int ROWS, int LINES>
void multiply_tile(float* out, const T* x, int64_t stride, const T* w, int64_t k,
                   const char* next) {
  constexpr int VECTORS = tile_vectors(ROWS);
  Sums<ROWS> sums;
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) sums[r][v] = vzero();
  multiply_all<ROWS, LINES>(sums, x, stride, w, k, next);
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) vstore(out + r * PANEL + v * VF_WIDTH, sums[r][v]);
}

template <typename T>
using MultiplyTile = void (*)(float*, const T*, int64_t, const T*, int64_t, const char*);

template <typename T, int ROWS = MAX_ROWS>
MultiplyTile<T> multiply_tile_of(int rows, int lines) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return multiply_tile_of<T, ROWS - 1>(rows, lines);
  if constexpr (ROWS >= MAX_ROWS_UNFETCHED) {
    if (lines == 2) return multiply_tile<T, ROWS, 2>;
    if (lines == 1) return multiply_tile<T, ROWS, 1>;
  }
  return multiply_tile<T, ROWS, 0>;
}

// Multiplies by vectors; keeps nothing.
template <typename T>
struct PanelVectors {
  static int64_t most_rows(int64_t row_bytes) {
    return std::max<int64_t>(MAX_ROWS, ROW_BLOCK_BYTES / row_bytes);
  }

  // Rows [first, last) by one panel, in tiles of nearly equal height. `next` is null or the panel
  // that this thread takes next: it is fetched while this one is computed with, by one tile if
  // there is no other, else by the first two, half of it each, so that memory never is what they
  // wait for.
  template <typename Out>
  void multiply(const LinearArgs& args, int64_t first, int64_t last, int64_t panel,
                const T* next) {
    alignas(64) float sums[MAX_ROWS * PANEL];
    const T* w = static_cast<const T*>(args.weights) + panel * panel_elements<T>(args.in_features);
    const int64_t tiles = (last - first + MAX_ROWS - 1) / MAX_ROWS;
    const bool fetches_next = next && last - first > MAX_ROWS_UNFETCHED;
    const int64_t fetchers = fetches_next ? std::min<int64_t>(tiles, 2) : 0;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t row = first + (last - first) * i / tiles;
      const int rows = static_cast<int>(first + (last - first) * (i + 1) / tiles - row);
      const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
      const int width = tile_vectors(rows) * VF_WIDTH;
      for (int part = 0; part < PANEL; part += width) {
        const bool fetches = i < fetchers && part == 0;
        const T* share = fetches ? next + i * panel_elements<T>(args.in_features) / 2 : nullptr;
        const int lines = fetches ? 2 / static_cast<int>(fetchers) : 0;
        multiply_tile_of<T>(rows, lines)(sums + part, x, args.x_stride, w + part * STEP<T>,
                                         args.in_features, reinterpret_cast<const char*>(share));
      }
      store_panel<Out>(args, sums, row, rows, panel * PANEL);
    }
  }
};

template <typename T>
struct PanelsOf {
  using Product = PanelVectors<T>;
};
#if defined(__AMX_BF16__)
template <>
struct PanelsOf<bf16> {
  using Product = PanelTiles;
};
#endif

template <typename T>
using PanelProduct = typename PanelsOf<T>::Product;

template <typename T>
int64_t most_rows(const LinearArgs& args) {
  return PanelProduct<T>::most_rows(args.in_features * static_cast<int64_t>(sizeof(T)));
}

}  // namespace

template <typename T, typename Out>
void linear(const LinearArgs& args, const Slice& slice) {
  const int64_t tokens = *args.num_tokens;
  const int64_t most = most_rows<T>(args);
  const int64_t blocks = (tokens + most - 1) / most;
  const int64_t panels = num_panels(args);
  const int64_t items = blocks * panels;
  const T* weights = static_cast<const T*>(args.weights);
  PanelProduct<T> product;
  for (int64_t item = slice.take(), next; item < items; item = next) {
    next = slice.take();
    const int64_t block = item / panels;
    const T* fetch =
        next < items ? weights + next % panels * panel_elements<T>(args.in_features) : nullptr;
    product.template multiply<Out>(args, tokens * block / blocks, tokens * (block + 1) / blocks,
                                   item % panels, fetch);
  }
}

// As `linear`: an expert's rows that are few read each of its panels once.
template <typename T, typename Out>
void linear_experts(const ExpertsLinearArgs& args, const Slice& slice) {
  const int64_t panels = num_panels(args.linear);
  const int64_t elements = panel_elements<T>(args.linear.in_features);
  const auto panel_of = [&](const ExpertItem& item) {
    const T* weights = static_cast<const T*>(args.linear.weights);
    return weights + (item.expert * panels + item.panel) * elements;
  };
  ExpertItems items(args, most_rows<T>(args.linear));
  PanelProduct<T> product;
  for (ExpertItem item = items.find(slice.take()), next; item.expert >= 0; item = next) {
    next = items.find(slice.take());
    LinearArgs own = args.linear;
    own.weights = static_cast<const T*>(own.weights) + item.expert * panels * elements;
    if (own.bias) own.bias += item.expert * panels * PANEL;
    const T* fetch = next.expert >= 0 ? panel_of(next) : nullptr;
    product.template multiply<Out>(own, item.first, item.last, item.panel, fetch);
  }
}

}  // namespace loadout

LOADOUT_EXPORT(linear_float, loadout::LinearArgs, (loadout::linear<float, float>))
LOADOUT_EXPORT(linear_float_bf16, loadout::LinearArgs, (loadout::linear<float, loadout::bf16>))
LOADOUT_EXPORT(linear_bf16, loadout::LinearArgs, (loadout::linear<loadout::bf16, loadout::bf16>))
LOADOUT_EXPORT(linear_bf16_float, loadout::LinearArgs, (loadout::linear<loadout::bf16, float>))
LOADOUT_EXPORT(linear_experts_float, loadout::ExpertsLinearArgs,
               (loadout::linear_experts<float, float>))
LOADOUT_EXPORT(linear_experts_bf16, loadout::ExpertsLinearArgs,
               (loadout::linear_experts<loadout::bf16, loadout::bf16>))
