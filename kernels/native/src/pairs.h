// Products of small matrices whose inner dimension lies in pairs (bf16) or single (float).
//
// `dot(sum, a, b)` adds, in each lane, the products of one pair, or of one element.
#pragma once

#include "simd.h"

namespace loadout {

template <typename T>
struct Pair;

template <>
struct Pair<float> {
  using Vector = VF;
  static constexpr int SIZE = 1;
  static constexpr bool IS_ONE_REGISTER = true;
  static Vector load(const float* p) { return vload(p); }
  static Vector broadcast(const float* p) { return vset1(*p); }
  static VF dot(VF sum, Vector a, Vector b) { return vfma(a, b, sum); }
};

#if defined(__AVX512BF16__)

template <>
struct Pair<bf16> {
  using Vector = __m512bh;
  static constexpr int SIZE = 2;
  static constexpr bool IS_ONE_REGISTER = true;
  static Vector load(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static Vector broadcast(const bf16* p) {
    int32_t both;
    std::memcpy(&both, p, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
  }
  static VF dot(VF sum, Vector a, Vector b) { return _mm512_dpbf16_ps(sum, a, b); }
};

#else

template <>
struct Pair<bf16> {
  struct Vector {
    VF low, high;
  };
  static constexpr int SIZE = 2;
  static constexpr bool IS_ONE_REGISTER = false;
  static Vector load(const bf16* p) {
    const VI both = vbits(p);
    return {even(both), odd(both)};
  }
  static Vector broadcast(const bf16* p) {
    return {vset1(to_float(p[0])), vset1(to_float(p[1]))};
  }
  static VF dot(VF sum, const Vector& a, const Vector& b) {
    return vfma(a.high, b.high, vfma(a.low, b.low, sum));
  }
};

#endif

// A product's block of sums must fit in the registers, beside a row of the right operand.
#if defined(__AVX512F__)
constexpr int MAX_VECTORS = 4;
template <typename T>
constexpr int MAX_ROWS = Pair<T>::IS_ONE_REGISTER ? 6 : 4;
#else
constexpr int MAX_VECTORS = 2;
template <typename T>
constexpr int MAX_ROWS = 4;
#endif

template <int N>
struct Constant {
  static constexpr int value = N;
};

// Calls body(Constant<n>{}) for LEAST <= n <= MOST; beyond these with the nearer one.
template <int LEAST, int MOST, typename Body>
inline void with_constant(int n, Body body) {
  if constexpr (LEAST < MOST) {
    if (n > LEAST) return with_constant<LEAST + 1, MOST>(n, body);
  }
  body(Constant<LEAST>{});
}

}  // namespace loadout
