// Decoders: the values of codes, in registers, step by step.
//
// A step is what one instruction multiplies: two inputs of each output with the bf16 dot product,
// else one. A decoder opens a word of SPAN inputs of each output, and returns its steps in order.
#pragma once

#include "quantised.h"

namespace loadout {

// An input as a whole number of 16 bits, which its row and chunk have a factor for; see `WholeInputs`.
struct Whole {
  int16_t number;
};
template <typename T>
constexpr bool IS_WHOLE = std::is_same_v<T, Whole>;

#if defined(__AVX512BF16__)
template <typename T>
constexpr bool HAS_PAIRS = sizeof(T) == 2;
#else
template <typename T>
constexpr bool HAS_PAIRS = IS_WHOLE<T>;
#endif

// The most rows for which codes are decoded in registers, and again by each tile. Where pairs are
// multiplied, decoding four bits costs other units than multiplying, and so nothing. Tiles of AMX
// multiply what was decoded before, however few rows there are.
constexpr int FEW_ROWS = VF_WIDTH == 16 ? 12 : 4;

// Inputs in a step.
template <typename T>
constexpr int STEP_OF = HAS_PAIRS<T> ? 2 : 1;

// Adds products of a step's inputs and weights, which lie as a vector of floats whatever they are.
template <typename T>
inline __attribute__((always_inline)) VF multiply_step(VF sum, VF x, VF weights) {
#if defined(__AVX512BF16__)
  if constexpr (HAS_PAIRS<T>)
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(x),
                            (__m512bh)_mm512_castps_si512(weights));
#endif
#if !defined(__AVX512F__)
  if constexpr (IS_WHOLE<T>) {
    const VI products = _mm256_madd_epi16(_mm256_castps_si256(x), _mm256_castps_si256(weights));
    VI total = _mm256_add_epi32(_mm256_castps_si256(sum), products);
    asm("" : "+x"(total));  // else gcc adds the products of all steps first, and keeps them in memory
    return _mm256_castsi256_ps(total);
  }
#endif
  return vfma(x, weights, sum);
}

template <typename T>
inline uint32_t load_pair(const T* x) {
  static_assert(sizeof(T) == 2);
  uint32_t bits;
  std::memcpy(&bits, x, sizeof bits);
  return bits;
}

// The inputs of step `step` of a word at x.
inline __attribute__((always_inline)) VF load_step(const float* x, int step) {
  return vset1(x[step]);
}
inline __attribute__((always_inline)) VF load_step(const bf16* x, int step) {
#if defined(__AVX512BF16__)
  return _mm512_castsi512_ps(vbits(load_pair(x + 2 * step)));
#else
  const VI pair = vbits(load_pair(x + step / 2 * 2));
  return step % 2 ? odd(pair) : even(pair);
#endif
}
#if !defined(__AVX512F__)
inline __attribute__((always_inline)) VF load_step(const Whole* x, int step) {
  return _mm256_castsi256_ps(vbits(load_pair(x + 2 * step)));
}
#endif

#if defined(__AVX512F__)
using HalfVI = __m256i;
inline HalfVI load_half(const char* p) {
  return _mm256_loadu_si256(reinterpret_cast<const HalfVI*>(p));
}
template <int N>
inline HalfVI shift_left(HalfVI x) {
  return _mm256_slli_epi16(x, N);
}
template <int N>
inline HalfVI shift_right(HalfVI x) {
  return _mm256_srai_epi16(x, N);
}
inline HalfVI bits_of(HalfVI x, short mask) { return _mm256_and_si256(x, _mm256_set1_epi16(mask)); }
inline HalfVI join(HalfVI a, HalfVI b) { return _mm256_or_si256(a, b); }
inline VF of_integers(HalfVI x) { return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(x)); }
inline VF of_halves(HalfVI x) { return _mm512_cvtph_ps(x); }
#else
using HalfVI = __m128i;
inline HalfVI load_half(const char* p) {
  return _mm_loadu_si128(reinterpret_cast<const HalfVI*>(p));
}
template <int N>
inline HalfVI shift_left(HalfVI x) {
  return _mm_slli_epi16(x, N);
}
template <int N>
inline HalfVI shift_right(HalfVI x) {
  return _mm_srai_epi16(x, N);
}
inline HalfVI bits_of(HalfVI x, short mask) { return _mm_and_si128(x, _mm_set1_epi16(mask)); }
inline HalfVI join(HalfVI a, HalfVI b) { return _mm_or_si128(a, b); }
inline VF of_integers(HalfVI x) { return _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(x)); }
inline VF of_halves(HalfVI x) { return _mm256_cvtph_ps(x); }
#endif

// Codes of four bits in words of eight inputs: [ceil(K / 8)][PANEL] of uint32. Input 2 * i + h has
// bits [16 * h + 4 * i, ... + 4), so that a shift brings a pair where the bf16 dot product wants it.
template <typename T>
struct Nibbles {
  static constexpr int SPAN = 8, WORD_BYTES = 4, LANE_BYTES = WORD_BYTES;
  static constexpr float FACTOR = 1;
  static constexpr int MOST_DIRECT_ROWS = HAS_PAIRS<T> ? 1 << 30 : FEW_ROWS;

  explicit Nibbles(const float* table) {
#if defined(__AVX512BF16__)
    if constexpr (HAS_PAIRS<T>) {
      // Twice, because an index has five bits, of which the upper is the next code's.
      const __m256i values = narrow(vload(table));
      table_ = _mm512_castsi512_ps(_mm512_broadcast_i64x4(values));
      return;
    }
#endif
    table_ = vload(table);
#if !defined(__AVX512F__)
    upper_ = vload(table + VF_WIDTH);
#endif
  }

  // Vector v of a word, which begins at p.
  static VI load(const char* p, int v) {
    return vbits(reinterpret_cast<const bf16*>(p + v * VF_WIDTH * WORD_BYTES));
  }

  inline __attribute__((always_inline)) VF decode(VI word, int step) const {
#if defined(__AVX512BF16__)
    if constexpr (HAS_PAIRS<T>) {
      const __m512i codes = _mm512_srli_epi32(word, 4 * step);
      return _mm512_castsi512_ps(_mm512_permutexvar_epi16(codes, _mm512_castps_si512(table_)));
    }
#endif
    const int shift = 16 * (step % 2) + 4 * (step / 2);
#if defined(__AVX512F__)
    return _mm512_permutexvar_ps(_mm512_srli_epi32(word, shift), table_);
#else
    const __m256i codes = _mm256_srli_epi32(word, shift);
    const __m256 is_upper = _mm256_castsi256_ps(_mm256_slli_epi32(word, 28 - shift));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table_, codes),
                            _mm256_permutevar8x32_ps(upper_, codes), is_upper);
#endif
  }

 private:
  VF table_;
#if !defined(__AVX512F__)
  VF upper_;
#endif
};

#if !defined(__AVX512F__)

// Whether the codes' values are consecutive integers, as those of INT4 are.
inline bool are_consecutive(const float* table) {
  for (int i = 0; i < 16; ++i)
    if (table[i] != std::nearbyint(table[0]) + i) return false;
  return true;
}

// Decoders of codes to whole numbers in pairs, for inputs that are whole numbers, too: one instruction
// multiplies sixteen of these. `first` is the number of code 0, which decoded ones count from.
struct WholeNibbles {
  static constexpr int SPAN = 8, WORD_BYTES = 4, LANE_BYTES = WORD_BYTES;
  static constexpr float FACTOR = 1;
  static constexpr int MOST_DIRECT_ROWS = 6;

  explicit WholeNibbles(const float*) {}

  static int32_t first(const float* table) { return static_cast<int32_t>(table[0]); }

  static VI load(const char* p, int v) {
    return vbits(reinterpret_cast<const bf16*>(p + v * VF_WIDTH * WORD_BYTES));
  }

  inline __attribute__((always_inline)) VF decode(VI word, int step) const {
    const VI codes = _mm256_srli_epi16(word, 4 * step);
    return _mm256_castsi256_ps(
        step == 3 ? codes : _mm256_and_si256(codes, _mm256_set1_epi16(15)));
  }
};

struct WholeBytes {
  static constexpr int SPAN = 2, WORD_BYTES = 2, LANE_BYTES = WORD_BYTES;
  static constexpr float FACTOR = 1;
  static constexpr int MOST_DIRECT_ROWS = 6;

  explicit WholeBytes(const float*) {}

  static int32_t first(const float*) { return 0; }

  static HalfVI load(const char* p, int v) { return load_half(p + v * VF_WIDTH * WORD_BYTES); }

  inline __attribute__((always_inline)) VF decode(HalfVI word, int) const {
    return _mm256_castsi256_ps(_mm256_cvtepi8_epi16(word));
  }
};

// As Nibbles, of codes whose values are consecutive integers: arithmetic takes half the time of two
// tables. A code becomes the last bits of a float's mantissa that count integers, at the place where
// the code lies in its word, so that nothing is shifted but the codes in the way of the exponent.
template <typename T>
struct ConsecutiveNibbles : Nibbles<T> {
  explicit ConsecutiveNibbles(const float* table) : Nibbles<T>(table) {
    for (int i = 0; i < PLACES; ++i)
      subtrahends_[i] = static_cast<float>(1 << (23 - 4 * i)) - table[0];
  }

  inline __attribute__((always_inline)) VF decode(VI word, int step) const {
    int shift = 16 * (step % 2) + 4 * (step / 2);
    if (shift >= 4 * PLACES) {
      word = _mm256_srli_epi32(word, 12);
      shift -= 12;
    }
    const __m256i code = _mm256_and_si256(word, _mm256_set1_epi32(15 << shift));
    const __m256i exponent = _mm256_set1_epi32((127 + 23 - shift) << 23);
    return _mm256_sub_ps(_mm256_castsi256_ps(_mm256_or_si256(code, exponent)),
                         _mm256_broadcast_ss(subtrahends_ + shift / 4));
  }

 private:
  static constexpr int PLACES = 5;
  float subtrahends_[PLACES];
};

#endif

// Codes of eight bits in words of two inputs: [ceil(K / 2)][PANEL][2] of bytes.
template <typename T>
struct Bytes {
  static constexpr int SPAN = 2, WORD_BYTES = 2, LANE_BYTES = WORD_BYTES;
  static constexpr int MOST_DIRECT_ROWS = HAS_PAIRS<T> ? 16 : FEW_ROWS;

  static HalfVI load(const char* p, int v) { return load_half(p + v * VF_WIDTH * WORD_BYTES); }
};

template <typename T>
struct Integers : Bytes<T> {
  static constexpr float FACTOR = 1;

  explicit Integers(const float*) {}

  inline __attribute__((always_inline)) VF decode(HalfVI word, int step) const {
#if defined(__AVX512BF16__)
    if constexpr (HAS_PAIRS<T>) {
      const auto widened = [](__m128i bytes) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
      };
      const __m512 lower = widened(_mm256_castsi256_si128(word));
      const __m512 upper = widened(_mm256_extracti128_si256(word, 1));
      return _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(upper, lower));
    }
#endif
    return of_integers(shift_right<8>(step ? word : shift_left<8>(word)));
  }
};

// FP8 of E4M3. Its exponent is moved into a half's, whose bias is 8 more, and whose conversion to
// float is exact for small numbers, too. NaN is no code here: packing makes it one of scales.
template <typename T>
struct Fp8 : Bytes<T> {
  static constexpr float FACTOR = HAS_PAIRS<T> ? 1 : 256;

#if defined(__AVX512BF16__)
  // The magnitudes in bf16, from which a code's seven lower bits choose.
  explicit Fp8(const float* table) {
    if constexpr (HAS_PAIRS<T>)
      for (int i = 0; i < 4; ++i)
        magnitudes_[i] = _mm512_inserti64x4(
            _mm512_castsi256_si512(narrow(vload(table + 32 * i))),
            narrow(vload(table + 32 * i + 16)), 1);
  }
#else
  explicit Fp8(const float*) {}
#endif

  inline __attribute__((always_inline)) VF decode(HalfVI word, int step) const {
#if defined(__AVX512BF16__)
    if constexpr (HAS_PAIRS<T>) {
      const __m512i codes = _mm512_cvtepu8_epi16(word);
      const __mmask32 is_large = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x40));
      const __m512i small = _mm512_permutex2var_epi16(magnitudes_[0], codes, magnitudes_[1]);
      const __m512i large = _mm512_permutex2var_epi16(magnitudes_[2], codes, magnitudes_[3]);
      const __m512i magnitude = _mm512_mask_mov_epi16(small, is_large, large);
      const __m512i shifted = _mm512_slli_epi16(codes, 8), sign = _mm512_set1_epi16(-0x8000);
      // magnitude | (shifted & sign)
      return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(magnitude, shifted, sign, 0xf8));
    }
#endif
    const HalfVI sign = bits_of(step ? word : shift_left<8>(word), -0x8000);
    const HalfVI rest = bits_of(step ? shift_right<1>(word) : shift_left<7>(word), 0x3f80);
    return of_halves(join(sign, rest));
  }

 private:
#if defined(__AVX512BF16__)
  __m512i magnitudes_[HAS_PAIRS<T> ? 4 : 1];
#endif
};

// What a decoder's steps have been written to, in order: [steps][PANEL] of vectors' lanes.
template <typename Codes, typename T>
struct Decoded {
  static constexpr int SPAN = Codes::SPAN, LANE_BYTES = 4;
  static constexpr int WORD_BYTES = SPAN / STEP_OF<T> * LANE_BYTES;
  static constexpr float FACTOR = Codes::FACTOR;

  explicit Decoded(const float*) {}

  static const float* load(const char* p, int v) {
    return reinterpret_cast<const float*>(p) + v * VF_WIDTH;
  }

  inline __attribute__((always_inline)) VF decode(const float* word, int step) const {
    return vload(word + step * PANEL);
  }
};

}  // namespace loadout
