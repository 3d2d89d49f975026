// Products of small matrices whose inner dimension lies in pairs (bf16) or single (float).
//
// `dot(sum, a, b)` adds, in each lane, the products of one pair, or of one element.
#pragma once

#include "simd.h"

#define LOADOUT_UNROLL _Pragma("GCC unroll 16")

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
#if defined(__AVX512F__)
  static Vector split(__m512i both) {
    const __m512i high = _mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)), _mm512_castsi512_ps(high)};
  }
  static Vector load(const bf16* p) { return split(_mm512_loadu_si512(p)); }
#else
  static Vector split(__m256i both) {
    const __m256i high = _mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)), _mm256_castsi256_ps(high)};
  }
  static Vector load(const bf16* p) { return split(_mm256_loadu_si256((const __m256i*)p)); }
#endif
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

// Calls body(integral constants M, N) for the M <= MAX_ROWS<T>, N <= MAX_VECTORS asked for.
template <int N>
struct Constant {
  static constexpr int value = N;
};

template <int LEAST, int MOST, typename Body>
inline void with_constant(int n, Body body) {
  if constexpr (LEAST < MOST) {
    if (n > LEAST) return with_constant<LEAST + 1, MOST>(n, body);
  }
  body(Constant<LEAST>{});
}

}  // namespace loadout
