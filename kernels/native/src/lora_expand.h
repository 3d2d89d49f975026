// What the second product of LoRA is made of: see lora_expand.cpp.
#pragma once

#include "lora.h"

namespace loadout {
namespace {

constexpr int MAX_PACKED_RANK = 256;  // beyond it B is only slower

constexpr int64_t AHEAD_BYTES = 8 * 1024;  // of B, under way while others are computed with

#if defined(__AVX512F__)
constexpr int VECTORS = 4, VECTOR_ROWS = 6;  // 24 sums, 4 of B, in 32 registers
#else
constexpr int VECTORS = 2, VECTOR_ROWS = 4;  // 8 sums, 2 of B, in 16 registers
#endif
constexpr int COLUMNS = VECTORS * VF_WIDTH;

template <typename T>
struct Axpy {
  using Vector = VF;
  static constexpr int STEP = 1;
  template <typename W>
  static void load(const W* b, int64_t, int, Vector* out) {
    LOADOUT_UNROLL for (int v = 0; v < VECTORS; ++v) out[v] = vload(b + v * VF_WIDTH);
  }
  static Vector number(const T* y) { return vset1(to_float(*y)); }
  static VF add(VF sum, Vector y, Vector b) { return vfma(y, b, sum); }
  static void in_order(VF*) {}
};

#if defined(__AVX512BF16__)
template <>
struct Axpy<bf16> {
  using Vector = __m512i;  // two ranks of each of 16 columns
  static constexpr int STEP = 2;
  template <typename W>
  static void load(const W* b, int64_t width, int ranks, Vector* out) {
    LOADOUT_UNROLL for (int v = 0; v < VECTORS; v += 2) {
      const W* p = b + v * VF_WIDTH;
      const __m512i even = load_bf16(p);
      const __m512i odd = ranks > 1 ? load_bf16(p + width) : _mm512_setzero_si512();
      out[v] = _mm512_unpacklo_epi16(even, odd);
      out[v + 1] = _mm512_unpackhi_epi16(even, odd);
    }
  }
  static Vector number(const bf16* y) {
    int32_t pair;
    std::memcpy(&pair, y, sizeof pair);
    return _mm512_set1_epi32(pair);
  }
  static VF add(VF sum, Vector y, Vector b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)y, (__m512bh)b);
  }
  // `load` leaves 32 columns in two vectors by quarters: 0 2 4 6 and 1 3 5 7.
  static void in_order(VF* sums) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    LOADOUT_UNROLL for (int v = 0; v < VECTORS; v += 2) {
      const VF low = sums[v], high = sums[v + 1];
      sums[v] = _mm512_permutex2var_ps(low, first, high);
      sums[v + 1] = _mm512_permutex2var_ps(low, second, high);
    }
  }
};
#endif

// Some columns of B, all ranks.
template <typename T, typename W>
struct Columns {
  const W* b;
  int64_t width;
  int rank;

  // Ranks r .. r + STEP.
  void prefetch(int r) const {
    LOADOUT_UNROLL for (int s = 0; s < Axpy<T>::STEP; ++s)
      if (r + s < rank)
        LOADOUT_UNROLL for (int i = 0; i < COLUMNS; i += LINE_BYTES / sizeof(W))
          _mm_prefetch(b + (r + s) * width + i, _MM_HINT_T1);
  }
  // Ranks r .. r + STEP of COLUMNS columns, of which n are there. Inline, by name: what a call
  // returns lies in memory, and a block of columns took 100 ns more.
  __attribute__((always_inline)) void load(int r, int n, typename Axpy<T>::Vector* out) const {
    const W* p = b + r * width;
    if (n == COLUMNS) return Axpy<T>::load(p, width, rank - r, out);
    W lanes[2][COLUMNS] = {};
    for (int s = 0; s < std::min(rank - r, Axpy<T>::STEP); ++s)
      std::memcpy(lanes[s], p + s * width, n * sizeof(W));
    Axpy<T>::load(lanes[0], COLUMNS, rank - r, out);
  }
};

// What becomes of some outputs of the base and of what is added to them: see the definition.
template <typename T>
struct Outputs {
  LoraVectors<T> vectors;  // from the first column on
  const float* base_bias = nullptr;  // as the outputs have it, or null
  bool has_base = true;    // false: the outputs are no more the base's, and products are added

  template <typename Lanes>
  VF of(VF out, VF product, VF scale, int64_t at, Lanes lanes) const {
    if (has_base) out = of_base(out, at, lanes);
    if (vectors.magnitude) product = vmul(product, vload(vectors.magnitude + at, lanes));
    out = vfma(scale, product, out);
    return vectors.bias ? vfma(scale, vload(vectors.bias + at, lanes), out) : out;
  }
  template <typename Lanes>
  VF of_base(VF out, int64_t at, Lanes lanes) const {
    if (!vectors.magnitude && !vectors.base_bias) return out;
    const VF old = base_bias ? vload(base_bias + at, lanes) : vzero();
    out = vsub(out, old);
    if (vectors.magnitude) out = vmul(out, vload(vectors.magnitude + at, lanes));
    return vadd(out, vectors.base_bias ? vload(vectors.base_bias + at, lanes) : old);
  }
};

// out[0 : n] += scale * sums. `outputs` is for adapters that HAVE vectors.
template <typename T, bool HAVE, typename Out>
inline __attribute__((always_inline)) void add_sums(Out* out, VF* sums, VF scale, int n,
                                                    const Outputs<T>* outputs) {
  Axpy<T>::in_order(sums);
  LOADOUT_UNROLL for (int v = 0; v < VECTORS; ++v) {
    const int at = v * VF_WIDTH;
    const auto add = [&](auto lanes) {
      const VF old = vload(out + at, lanes);
      if constexpr (HAVE) vstore(out + at, outputs->of(old, sums[v], scale, at, lanes), lanes);
      else vstore(out + at, vfma(scale, sums[v], old), lanes);
    };
    if (n - at >= VF_WIDTH) add(AllLanes{});
    else if (n > at) add(FirstLanes{n - at});
  }
}

}  // namespace
}  // namespace loadout
