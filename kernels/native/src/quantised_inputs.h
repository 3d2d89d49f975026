// Inputs of products with weights in few bits: as they are, or bf16 as whole numbers for processors
// that multiply these faster; see quantised.cpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "quantised.h"
#include "quantised_codes.h"

namespace loadout {

// Rows in an item.
constexpr int64_t MOST_ITEM_ROWS = 96;
// Sums of inputs in chunks that an item's rows may have.
constexpr int64_t MOST_INPUT_SUMS = 16384;
// Inputs of an item's rows in whole numbers, with padding.
constexpr int64_t MOST_WHOLE_INPUTS = 1 << 17;

#if !defined(__AVX512F__)

// Inputs of an item's rows as whole numbers of 16 bits. Each chunk of a row has a power of two as its
// factor, by which the largest input uses all bits: inputs are exact from 1/128 of the largest on,
// and smaller ones are wrong by 2^-15 of the largest at most, or by 2^-126 where that is more. A
// chunk with an input that is not finite has the factor NaN.
class WholeInputs {
 public:
  WholeInputs(const Chunks& chunks, int64_t in_features, int32_t first)
      : chunks_(chunks), stride_(stride(in_features)), first_(first) {}

  // Whether a row fits, and the numbers that each of its chunks has.
  static bool can_hold(int64_t in_features, int64_t group_size) {
    return stride(in_features) <= MOST_WHOLE_INPUTS && in_features <= MOST_INPUT_SUMS * group_size;
  }

  int64_t most_rows() const {
    return std::min(MOST_WHOLE_INPUTS / stride_, MOST_INPUT_SUMS / chunks_.count());
  }

  void take(const bf16* x, int64_t x_stride, int rows) {
    for (int r = 0; r < rows; ++r)
      for (int64_t i = 0; i < chunks_.count(); ++i)
        take(x + r * x_stride, chunks_.find(nullptr, i), r, r * chunks_.count() + i);
  }

  const Whole* numbers() const { return numbers_; }
  int64_t stride() const { return stride_; }
  const float* factors() const { return factors_; }
  // The sum of each chunk, multiplied by the number of code 0.
  const int32_t* firsts() const { return firsts_; }

 private:
  // Stores are of whole vectors, of which the last may begin at the last input.
  static int64_t stride(int64_t in_features) { return (in_features + 15) / 8 * 8; }

  void take(const bf16* x, const Chunk& chunk, int row, int64_t number) {
    x += chunk.first;
    VI most = _mm256_setzero_si256();
    for_vectors(chunk.size, [&](int64_t at, auto lanes) {
      const VI bits = _mm256_castps_si256(vload(x + at, lanes));
      most = _mm256_max_epi32(most, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
    });
    alignas(32) int32_t lanes[VF_WIDTH];
    _mm256_store_si256(reinterpret_cast<VI*>(lanes), most);
    const int32_t exponent = *std::max_element(lanes, lanes + VF_WIDTH) >> 23;
    Whole* numbers = numbers_ + row * stride_ + chunk.first;
    if (exponent == 255) {
      factors_[number] = NAN;
      firsts_[number] = 0;
      std::fill_n(numbers, chunk.size, Whole{0});
      return;
    }
    // Of the factor, with its bias. Zeros have 1, since products with a tiny one would be denormal.
    const int32_t power = exponent == 0 ? 127 : std::max(exponent, 15) - 14;
    factors_[number] = power_of_two(power);
    const VF multiplier = vset1(power_of_two(254 - power));
    VI sum = _mm256_setzero_si256();
    for_vectors(chunk.size, [&](int64_t at, auto lanes) {
      const VI whole = _mm256_cvtps_epi32(vmul(vload(x + at, lanes), multiplier));
      sum = _mm256_add_epi32(sum, whole);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(numbers + at),
                       _mm_packs_epi32(_mm256_castsi256_si128(whole),
                                       _mm256_extracti128_si256(whole, 1)));
    });
    _mm256_store_si256(reinterpret_cast<VI*>(lanes), sum);
    firsts_[number] = first_ * std::accumulate(lanes, lanes + VF_WIDTH, 0);
  }

  static float power_of_two(int32_t biased) {
    const int32_t bits = biased << 23;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }

  const Chunks& chunks_;
  const int64_t stride_;
  const int32_t first_;
  Whole numbers_[MOST_WHOLE_INPUTS];
  float factors_[MOST_INPUT_SUMS];
  int32_t firsts_[MOST_INPUT_SUMS];
};

#else

struct WholeInputs;  // no inputs are whole numbers here

#endif

// Inputs that are multiplied as they are.
struct PlainInputs {
  PlainInputs(const Chunks&, int64_t, int32_t) {}
  int64_t most_rows() const { return MOST_ITEM_ROWS; }
};

}  // namespace loadout
