// Float vectors of the machine's width, and the two storage types: float and bf16.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

// Before loops over sums in registers: sums that the compiler indexes are sums in memory.
#define LOADOUT_UNROLL _Pragma("GCC unroll 16")

namespace loadout {

struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename T>
inline T from_float(float x);

template <>
inline float from_float<float>(float x) {
  return x;
}

// To the nearest, ties to even; NaN stays NaN.
template <>
inline bf16 from_float<bf16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline void stream_fence() { _mm_sfence(); }

#if defined(__AVX512F__)

using VF = __m512;
using VI = __m512i;
constexpr int VF_WIDTH = 16;

inline VF vzero() { return _mm512_setzero_ps(); }
inline VF vset1(float x) { return _mm512_set1_ps(x); }
inline VF vadd(VF a, VF b) { return _mm512_add_ps(a, b); }
inline VF vsub(VF a, VF b) { return _mm512_sub_ps(a, b); }
inline VF vmul(VF a, VF b) { return _mm512_mul_ps(a, b); }
inline VF vdiv(VF a, VF b) { return _mm512_div_ps(a, b); }
inline VF vmax(VF a, VF b) { return _mm512_max_ps(a, b); }
inline VF vmin(VF a, VF b) { return _mm512_min_ps(a, b); }
inline VF vfma(VF a, VF b, VF c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
inline float reduce_add(VF x) { return _mm512_reduce_add_ps(x); }
inline float reduce_max(VF x) { return _mm512_reduce_max_ps(x); }
inline float first_lane(VF x) { return _mm512_cvtss_f32(x); }

inline VF widen(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

inline __m256i narrow(VF x) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}

inline VF vload(const float* p) { return _mm512_loadu_ps(p); }
inline VF vload(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
inline void vstore(float* p, VF x) { _mm512_storeu_ps(p, x); }
inline void vstore(bf16* p, VF x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }
// Past the caches, to an aligned address; other threads see it after a `stream_fence`.
inline void vstream(float* p, VF x) { _mm512_stream_ps(p, x); }

// Pairs of bf16, one in each lane. A bf16 is the upper half of a float, so that either of a pair
// widens without a shuffle: `even` the one that comes first in memory, `odd` the other.
inline VI vbits(const bf16* p) { return _mm512_loadu_si512(p); }
inline VI vbits(uint32_t bits) { return _mm512_set1_epi32(static_cast<int>(bits)); }
inline VF even(VI x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
inline VF odd(VI x) { return _mm512_castsi512_ps(_mm512_and_si512(x, vbits(0xffff0000))); }

// The first n lanes (0 < n <= VF_WIDTH); the others read as 0 and are not written.
inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
inline VF vload(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline void vstore(float* p, VF x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
inline VF vload(const bf16* p, int n) {
  uint16_t lanes[16] = {};
  std::memcpy(lanes, p, n * sizeof(bf16));
  return widen(_mm256_loadu_si256((const __m256i*)lanes));
}
inline void vstore(bf16* p, VF x, int n) {
  uint16_t lanes[16];
  _mm256_storeu_si256((__m256i*)lanes, narrow(x));
  std::memcpy(p, lanes, n * sizeof(bf16));
}

// 2^n for n rounded to whole numbers in [-126, 127].
inline VF exponent(VF n) {
  const __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(whole, 23));
}
inline VF vround(VF x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// Lanes [begin, end) of x, and `other` in the rest; the bounds may lie outside the vector.
inline VF keep_lanes(VF x, int64_t begin, int64_t end, VF other) {
  const auto below = [](int64_t n) {
    return n <= 0 ? 0u : n >= VF_WIDTH ? 0xffffu : (1u << n) - 1;
  };
  return _mm512_mask_mov_ps(other, static_cast<__mmask16>(below(end) & ~below(begin)), x);
}

// Lanes of `near` where x < limit, of `other` elsewhere.
inline VF vselect_below(VF x, VF limit, VF near, VF other) {
  return _mm512_mask_mov_ps(other, _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), near);
}

// y * 2^n for whole n, y of about 1; 0 at and below LEAST_POWER, where a denormal would take 150
// cycles on some processors.
constexpr float LEAST_POWER = -126.0f;
inline VF scale_by_power(VF y, VF n) {
  const __mmask16 is_normal = _mm512_cmp_ps_mask(n, vset1(LEAST_POWER), _CMP_NLE_UQ);
  return _mm512_maskz_scalef_ps(is_normal, y, n);
}

#else  // AVX2 with FMA

using VF = __m256;
using VI = __m256i;
constexpr int VF_WIDTH = 8;

inline VF vzero() { return _mm256_setzero_ps(); }
inline VF vset1(float x) { return _mm256_set1_ps(x); }
inline VF vadd(VF a, VF b) { return _mm256_add_ps(a, b); }
inline VF vsub(VF a, VF b) { return _mm256_sub_ps(a, b); }
inline VF vmul(VF a, VF b) { return _mm256_mul_ps(a, b); }
inline VF vdiv(VF a, VF b) { return _mm256_div_ps(a, b); }
inline VF vmax(VF a, VF b) { return _mm256_max_ps(a, b); }
inline VF vmin(VF a, VF b) { return _mm256_min_ps(a, b); }
inline VF vfma(VF a, VF b, VF c) { return _mm256_fmadd_ps(a, b, c); }  // a * b + c

inline float reduce_add(VF x) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_shuffle_ps(sum, sum, 1)));
}
inline float first_lane(VF x) { return _mm256_cvtss_f32(x); }

inline float reduce_max(VF x) {
  __m128 most = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  most = _mm_max_ps(most, _mm_movehl_ps(most, most));
  return _mm_cvtss_f32(_mm_max_ss(most, _mm_shuffle_ps(most, most, 1)));
}

inline VF widen(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}

inline __m128i narrow(VF x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  rounded = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan));
  rounded = _mm256_srli_epi32(rounded, 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}

inline VF vload(const float* p) { return _mm256_loadu_ps(p); }
inline VF vload(const bf16* p) { return widen(_mm_loadu_si128((const __m128i*)p)); }
inline void vstore(float* p, VF x) { _mm256_storeu_ps(p, x); }
inline void vstore(bf16* p, VF x) { _mm_storeu_si128((__m128i*)p, narrow(x)); }
inline void vstream(float* p, VF x) { _mm256_stream_ps(p, x); }

inline VI vbits(const bf16* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline VI vbits(uint32_t bits) { return _mm256_set1_epi32(static_cast<int>(bits)); }
inline VF even(VI x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
inline VF odd(VI x) { return _mm256_castsi256_ps(_mm256_and_si256(x, vbits(0xffff0000))); }

// The first n lanes (0 < n <= VF_WIDTH); the others read as 0 and are not written.
template <typename T>
inline VF vload(const T* p, int n) {
  T lanes[VF_WIDTH] = {};
  std::memcpy(lanes, p, n * sizeof(T));
  return vload(lanes);
}
template <typename T>
inline void vstore(T* p, VF x, int n) {
  T lanes[VF_WIDTH];
  vstore(lanes, x);
  std::memcpy(p, lanes, n * sizeof(T));
}

inline VF exponent(VF n) {
  const __m256i whole = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(whole, 23));
}
inline VF vround(VF x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// Lanes [begin, end) of x, and `other` in the rest; the bounds may lie outside the vector.
inline VF keep_lanes(VF x, int64_t begin, int64_t end, VF other) {
  const auto bound = [](int64_t n) {
    return vset1(static_cast<float>(n < 0 ? 0 : n > VF_WIDTH ? VF_WIDTH : n));
  };
  const VF lane = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);
  const VF is_kept = _mm256_and_ps(_mm256_cmp_ps(lane, bound(begin), _CMP_GE_OQ),
                                   _mm256_cmp_ps(lane, bound(end), _CMP_LT_OQ));
  return _mm256_blendv_ps(other, x, is_kept);
}

// Lanes of `near` where x < limit, of `other` elsewhere.
inline VF vselect_below(VF x, VF limit, VF near, VF other) {
  return _mm256_blendv_ps(other, near, _mm256_cmp_ps(x, limit, _CMP_LT_OQ));
}

// y * 2^n for whole n; n = LEAST_POWER gives 0.
inline VF scale_by_power(VF y, VF n) { return vmul(y, exponent(n)); }
constexpr float LEAST_POWER = -127.0f;

#endif

// Two vectors side by side, in bf16 as one store.
template <typename T>
inline void vstore(T* p, VF first, VF second) {
  vstore(p, first);
  vstore(p + VF_WIDTH, second);
}
#if defined(__AVX512BF16__)
inline void vstore(bf16* p, VF first, VF second) {
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}
#endif

// How many lanes of a vector count: all, or the first n at the end of a row.
struct AllLanes {};
struct FirstLanes {
  int n;
};
template <typename T>
inline VF vload(const T* p, AllLanes) {
  return vload(p);
}
template <typename T>
inline VF vload(const T* p, FirstLanes lanes) {
  return vload(p, lanes.n);
}
template <typename T>
inline void vstore(T* p, VF x, AllLanes) {
  vstore(p, x);
}
template <typename T>
inline void vstore(T* p, VF x, FirstLanes lanes) {
  vstore(p, x, lanes.n);
}

// Calls body(index, lanes) for a row of `size` elements, vector by vector.
template <typename Body>
inline void for_vectors(int64_t size, Body body) {
  int64_t at = 0;
  for (; at + VF_WIDTH <= size; at += VF_WIDTH) body(at, AllLanes{});
  if (at < size) body(at, FirstLanes{static_cast<int>(size - at)});
}

// x as a T holds it.
template <typename T>
inline VF rounded(VF x);
template <>
inline VF rounded<float>(VF x) {
  return x;
}
template <>
inline VF rounded<bf16>(VF x) {
  return widen(narrow(x));
}

// e^x within 2 units in the last place; below -87.3 the smallest normal number, which sums lose.
// NaN stays NaN, here and below: of NaN and a number, vmin and vmax return their second operand.
// Range reduction by ln 2 in two parts and the degree-5 polynomial of Cephes' expf.
inline VF vexp(VF x) {
  x = vmax(vset1(-87.3f), vmin(vset1(88.0f), x));
  const VF n = vround(vmul(x, vset1(1.44269504f)));
  x = vfma(n, vset1(-0.693359375f), x);
  x = vfma(n, vset1(2.12194440e-4f), x);
  VF y = vset1(1.9875691500e-4f);
  y = vfma(y, x, vset1(1.3981999507e-3f));
  y = vfma(y, x, vset1(8.3334519073e-3f));
  y = vfma(y, x, vset1(4.1665795894e-2f));
  y = vfma(y, x, vset1(1.6666665459e-1f));
  y = vfma(y, x, vset1(5.0000001201e-1f));
  y = vadd(vfma(y, vmul(x, x), x), vset1(1.0f));
  return vmul(y, exponent(n));
}

// 2^x for x <= 127, within 2 units in the last place; 0 at and below LEAST_POWER. The polynomial is
// that of Cephes' exp2f.
inline VF vexp2(VF x) {
  x = vmax(vset1(LEAST_POWER), x);
  const VF n = vround(x);
  const VF f = vsub(x, n);
  VF y = vset1(1.535336188319500e-4f);
  y = vfma(y, f, vset1(1.339887440266574e-3f));
  y = vfma(y, f, vset1(9.618437357674640e-3f));
  y = vfma(y, f, vset1(5.550332471162809e-2f));
  y = vfma(y, f, vset1(2.402264791363012e-1f));
  y = vfma(y, f, vset1(6.931472028550421e-1f));
  y = vfma(y, f, vset1(1.0f));
  return scale_by_power(y, n);
}

// 2^x for x <= 127 and a result that is rounded to a T: as vexp2, or in bf16 within 2^-18 of itself.
template <typename T>
inline VF vexp2_for(VF x) {
  return vexp2(x);
}
#if defined(__AVX512F__)
// The polynomial has the least relative error of all of degree 4 that are 1 at 0. The last bits of
// `n` are x, rounded, and go to the exponent.
template <>
inline VF vexp2_for<bf16>(VF x) {
  const VF far = vset1(12582912.0f);  // 1.5 * 2^23
  const VF n = vadd(x, far);
  const VF f = vsub(x, vsub(n, far));
  VF y = vset1(9.582830106e-03f);
  y = vfma(y, f, vset1(5.590639966e-02f));
  y = vfma(y, f, vset1(2.402409885e-01f));
  y = vfma(y, f, vset1(6.931241964e-01f));
  y = vfma(y, f, vset1(1.0f));
  const VI power = _mm512_slli_epi32(_mm512_castps_si512(n), 23);
  const __mmask16 is_normal = _mm512_cmp_ps_mask(x, vset1(LEAST_POWER), _CMP_GT_OQ);
  const VI other = _mm512_castps_si512(vmax(vzero(), x));  // 0, or NaN
  return _mm512_castsi512_ps(
      _mm512_mask_add_epi32(other, is_normal, _mm512_castps_si512(y), power));
}
#endif

// 1 / x of a result that is rounded to a T: exact to rounding, or in bf16 within 2^-11 of itself.
template <typename T>
inline VF vreciprocal_for(VF x) {
  return vdiv(vset1(1.0f), x);
}
template <>
inline VF vreciprocal_for<bf16>(VF x) {
#if defined(__AVX512F__)
  return _mm512_rcp14_ps(x);
#else
  return _mm256_rcp_ps(x);
#endif
}

// 1 - 2 / (1 + e^(2x)); near 0 it is x - x^3 / 3, which the difference would lose.
inline VF vtanh(VF x) {
  x = vmax(vset1(-20.0f), vmin(vset1(20.0f), x));
  const VF one = vset1(1.0f);
  const VF far = vsub(one, vdiv(vset1(2.0f), vadd(one, vexp(vadd(x, x)))));
  const VF square = vmul(x, x);
  VF series = vset1(-17.0f / 315.0f);
  series = vfma(series, square, vset1(2.0f / 15.0f));
  series = vfma(series, square, vset1(-1.0f / 3.0f));
  series = vmul(vfma(series, square, one), x);
  return vselect_below(square, vset1(0.04f), series, far);
}

}  // namespace loadout
