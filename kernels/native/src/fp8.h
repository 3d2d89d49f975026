// FP8, four bits of exponent and three of mantissa without infinities: vectors of codes with a scale
// for each, as `to_fp8` in `kernels/attention/kv_cache.py` defines them.
#pragma once

#include <algorithm>

#include "simd.h"

namespace loadout {

struct e4m3 {
  uint8_t bits;
};

// Codes become bf16 as their bits do: sign and magnitude move to where bf16 has its own, and the
// difference of the two exponents' offsets is added. Codes below 8 have no leading one: their values
// are looked up, because arithmetic with numbers that small is slow, or takes them for zero. The
// codes of NaN become 480: a vector with NaN has NaN for its scale.
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
  for (int64_t i = 0; i < count; i += 16) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    bf16 values[16];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(values), widened_codes(codes));
    for (int j = 0; j < 16; j += VF_WIDTH) vstore(to + i + j, vload(values + j));
  }
}

inline float to_float(e4m3 code) {
  const int magnitude = code.bits & 0x7f;
  const float sign = code.bits & 0x80 ? -1.0f : 1.0f;
  if (magnitude < 8) return sign * magnitude / 512;
  return sign * std::ldexp(static_cast<float>(8 + magnitude % 8), magnitude / 8 - 10);
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
