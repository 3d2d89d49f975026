// E4M3, the FP8 of adapters, keys and values: a sign, 4 bits of exponent (bias 7), 3 of mantissa, no
// infinities. https://arxiv.org/abs/2209.05433. Every value is exact in bf16. Vectors of codes with
// a scale for each are as `to_fp8` in `kernels/attention/kv_cache.py` defines them.
//
// Values below 2^-6 (size < 8) have no leading 1. They are looked up or converted from integers: as
// floats that are shifted into place they would be denormal, and products of these take a hundred
// cycles on some processors. NaN (size 127), which nobody writes, reads as 480: a vector with NaN
// has NaN for its scale.
#pragma once

#include <immintrin.h>

#include <algorithm>

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

// Codes become bf16 as their bits do: sign and magnitude move to where bf16 has its own, and the
// difference of the two exponents' offsets is added.
constexpr int16_t E4M3_PLACES = static_cast<int16_t>(0x87f0);
constexpr int16_t E4M3_EXPONENT = 0x0780;
constexpr int16_t E4M3_OFFSET = (127 - 7) << 7;
constexpr int16_t SIGN = static_cast<int16_t>(0x8000);

// 16 codes, as bf16.
inline __m256i widened_codes(__m128i codes) {
  const __m256i code = _mm256_cvtepi8_epi16(codes);
  const __m256i placed =
      _mm256_and_si256(_mm256_slli_epi16(code, 4), _mm256_set1_epi16(E4M3_PLACES));
  const __m256i normal = _mm256_add_epi16(placed, _mm256_set1_epi16(E4M3_OFFSET));
  // For m in [0, 8) the lower bytes of m / 512, then the upper ones.
  const __m256i table = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 0, char(0x80), char(0xc0), 0, 0x20, 0x40, 0x60,  //
                    0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c));
  const __m256i m = _mm256_and_si256(code, _mm256_set1_epi16(7));
  const __m256i both = _mm256_or_si256(m, _mm256_slli_epi16(m, 8));
  const __m256i place = _mm256_or_si256(both, _mm256_set1_epi16(0x0800));
  const __m256i sign = _mm256_and_si256(code, _mm256_set1_epi16(SIGN));
  const __m256i small = _mm256_or_si256(_mm256_shuffle_epi8(table, place), sign);
  const __m256i exponent = _mm256_and_si256(placed, _mm256_set1_epi16(E4M3_EXPONENT));
  const __m256i is_small = _mm256_cmpeq_epi16(exponent, _mm256_setzero_si256());
  return _mm256_blendv_epi8(normal, small, is_small);
}

#if defined(__AVX512BW__)

// 32 codes, as bf16.
inline __m512i widened_codes(__m256i codes) {
  const __m512i code = _mm512_cvtepi8_epi16(codes);
  const __m512i placed =
      _mm512_and_si512(_mm512_slli_epi16(code, 4), _mm512_set1_epi16(E4M3_PLACES));
  const __m512i normal = _mm512_add_epi16(placed, _mm512_set1_epi16(E4M3_OFFSET));
  const __m512i table = _mm512_castsi128_si512(
      _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
  const __mmask32 is_small = _mm512_testn_epi16_mask(placed, _mm512_set1_epi16(E4M3_EXPONENT));
  const __m512i value = _mm512_mask_permutexvar_epi16(normal, is_small, code, table);
  constexpr int OR_OF_FIRST_AND_BOTH_OTHERS = 0xf8;
  return _mm512_ternarylogic_epi64(value, code, _mm512_set1_epi16(SIGN),
                                   OR_OF_FIRST_AND_BOTH_OTHERS);
}

#endif

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
  return widened_codes(_mm256_loadu_si256((const __m256i*)p));
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

// The values of `count` codes, a multiple of 16, without their scale.
inline void widen_codes(bf16* to, const e4m3* from, int64_t count) {
  int64_t i = 0;
#if defined(__AVX512BW__)
  for (; i + 32 <= count; i += 32) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    _mm512_storeu_si512(to + i, widened_codes(codes));
  }
#endif
  for (; i < count; i += 16) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), widened_codes(codes));
  }
}

inline void widen_codes(float* to, const e4m3* from, int64_t count) {
  for (int64_t i = 0; i < count; i += VF_WIDTH) vstore(to + i, vload(from + i));
}

// The codes of |x| <= 448, rounded to the nearest, ties to even, each in a lane of 32 bits.
inline VI codes_of(VF x) {
#if defined(__AVX512F__)
  const VI bits = _mm512_castps_si512(x);
  const VI size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
  const VI odd = _mm512_and_si512(_mm512_srli_epi32(size, 20), _mm512_set1_epi32(1));
  const VI up = _mm512_add_epi32(_mm512_add_epi32(size, _mm512_set1_epi32(0x7ffff)), odd);
  const VI normal = _mm512_sub_epi32(_mm512_srli_epi32(up, 20), _mm512_set1_epi32(120 << 3));
  // The last place of numbers above 2^14 is 2^-9, as that of the smallest codes.
  const VF shifted = vadd(_mm512_castsi512_ps(size), vset1(16384.0f));
  const VI small = _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(0x46800000));
  const __mmask16 is_small = _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(0x3c800000));
  const VI sign = _mm512_srli_epi32(_mm512_xor_si512(bits, size), 24);
  return _mm512_or_si512(_mm512_mask_mov_epi32(normal, is_small, small), sign);
#else
  const VI bits = _mm256_castps_si256(x);
  const VI size = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  const VI odd = _mm256_and_si256(_mm256_srli_epi32(size, 20), _mm256_set1_epi32(1));
  const VI up = _mm256_add_epi32(_mm256_add_epi32(size, _mm256_set1_epi32(0x7ffff)), odd);
  const VI normal = _mm256_sub_epi32(_mm256_srli_epi32(up, 20), _mm256_set1_epi32(120 << 3));
  const VF shifted = vadd(_mm256_castsi256_ps(size), vset1(16384.0f));
  const VI small = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(0x46800000));
  const VI is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3c800000), size);
  const VI sign = _mm256_srli_epi32(_mm256_xor_si256(bits, size), 24);
  return _mm256_or_si256(_mm256_blendv_epi8(normal, small, is_small), sign);
#endif
}

// Rounds a vector to codes; returns its scale. One with NaN or an infinity has NaN for it.
template <typename T>
float to_codes(e4m3* codes, const T* x, int64_t size) {
  VF largest = vzero(), fault = vzero();
  for_vectors(size, [&](int64_t i, auto lanes) {
    const VF part = vload(x + i, lanes);
    largest = vmax(largest, vmax(part, vsub(vzero(), part)));
    fault = vfma(part, vzero(), fault);
  });
  constexpr float LARGEST = 448.0f, TINY = 1.17549435e-38f;
  const float scale = std::fmax(reduce_max(largest) / LARGEST, TINY) + reduce_add(fault);
  for_vectors(size, [&](int64_t i, auto lanes) {
    const VF divided = vdiv(vload(x + i, lanes), vset1(scale));
    const VF bounded = vmax(vset1(-LARGEST), vmin(vset1(LARGEST), divided));
    uint32_t found[VF_WIDTH];
    const VI both = codes_of(bounded);
    std::memcpy(found, &both, sizeof both);
    const int64_t count = std::min<int64_t>(VF_WIDTH, size - i);
    for (int64_t j = 0; j < count; ++j) codes[i + j] = {static_cast<uint8_t>(found[j])};
  });
  return scale;
}

}  // namespace loadout
