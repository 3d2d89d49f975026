// E4M3, the float8 of adapters: a sign, 4 bits of exponent (bias 7), 3 of mantissa, no infinities.
// https://arxiv.org/abs/2209.05433. Every value is exact in bf16.
//
// Values below 2^-6 (size < 8) have no leading 1. They are looked up or converted from integers: as
// floats that are shifted into place they would be denormal, and products of these take a hundred
// cycles on some processors. NaN (size 127), which no store writes, reads as 480.
#pragma once

#include <immintrin.h>

#include "simd.h"

namespace loadout {

struct e4m3 {
  uint8_t bits;
};

inline float to_float(e4m3 x) {
  const uint32_t size = x.bits & 0x7f, sign = static_cast<uint32_t>(x.bits & 0x80) << 24;
  const float small = static_cast<float>(size) * 0x1p-9f;
  uint32_t bits = (size << 20) + (120u << 23);
  if (size < 8) std::memcpy(&bits, &small, sizeof bits);
  bits |= sign;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

#if defined(__AVX512F__)

// The values of codes, one in each lane.
inline VF decode(VI codes) {
  const VI size = _mm512_and_si512(codes, _mm512_set1_epi32(0x7f));
  const VI sign = _mm512_slli_epi32(_mm512_andnot_si512(_mm512_set1_epi32(0x7f), codes), 24);
  const VI normal = _mm512_add_epi32(_mm512_slli_epi32(size, 20), _mm512_set1_epi32(120 << 23));
  const VF small = vmul(_mm512_cvtepi32_ps(size), vset1(0x1p-9f));
  const __mmask16 is_small = _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(8));
  const VI value = _mm512_mask_mov_epi32(normal, is_small, _mm512_castps_si512(small));
  return _mm512_castsi512_ps(_mm512_or_si512(value, sign));
}

inline VF vload(const e4m3* p) {
  return decode(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}

// Pairs of neighbours, as `even` and `odd` of bf16.
inline void load_pairs(const e4m3* p, VF* even, VF* odd) {
  const VI pairs = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  *even = decode(_mm512_and_si512(pairs, _mm512_set1_epi32(0xff)));
  *odd = decode(_mm512_srli_epi32(pairs, 8));
}

// 32 values as bf16.
inline __m512i load_bf16(const e4m3* p) {
  const __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p));
  const __m512i size = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
  const __m512i sign = _mm512_slli_epi16(_mm512_andnot_si512(_mm512_set1_epi16(0x7f), codes), 8);
  const __m512i normal =
      _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
  // 0, 1, ... 7 times 2^-9
  const __m512i small = _mm512_castsi128_si512(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00,
                                                              0x3c20, 0x3c40, 0x3c60));
  const __mmask32 is_small = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(8));
  return _mm512_or_si512(_mm512_mask_permutexvar_epi16(normal, is_small, size, small), sign);
}

#else

inline VF decode(VI codes) {
  const VI size = _mm256_and_si256(codes, _mm256_set1_epi32(0x7f));
  const VI sign = _mm256_slli_epi32(_mm256_andnot_si256(_mm256_set1_epi32(0x7f), codes), 24);
  const VI normal = _mm256_add_epi32(_mm256_slli_epi32(size, 20), _mm256_set1_epi32(120 << 23));
  const VF small = vmul(_mm256_cvtepi32_ps(size), vset1(0x1p-9f));
  const VI is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), size);
  const VF value = _mm256_blendv_ps(_mm256_castsi256_ps(normal), small,
                                    _mm256_castsi256_ps(is_small));
  return _mm256_or_ps(value, _mm256_castsi256_ps(sign));
}

inline VF vload(const e4m3* p) {
  return decode(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}

inline void load_pairs(const e4m3* p, VF* even, VF* odd) {
  const VI pairs = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  *even = decode(_mm256_and_si256(pairs, _mm256_set1_epi32(0xff)));
  *odd = decode(_mm256_srli_epi32(pairs, 8));
}

#endif

#if defined(__AVX512F__)
inline __m512i load_bf16(const bf16* p) { return _mm512_loadu_si512(p); }
#endif

inline void load_pairs(const bf16* p, VF* first, VF* second) {
  const VI pairs = vbits(p);
  *first = even(pairs);
  *second = odd(pairs);
}

}  // namespace loadout
