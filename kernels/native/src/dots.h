// Dot products of some tokens with some rows of a matrix. The lanes of a chunk are summed apart, chunk
// after chunk, then added as a tree: the same terms in the same order however many there are at once.
// The matrix is of the tokens' type T, or of another that `load` converts to it.
#pragma once

#include <cstring>

#include "e4m3.h"
#include "simd.h"

namespace loadout {

template <typename T>
struct Dot;

template <>
struct Dot<float> {
  using Chunk = VF;
  static constexpr int SIZE = VF_WIDTH;
  template <typename W>
  static Chunk load(const W* p) {
    return vload(p);
  }
  static VF add(VF sum, Chunk x, Chunk a) { return vfma(x, a, sum); }
};

#if defined(__AVX512BF16__)
template <>
struct Dot<bf16> {
  using Chunk = __m512i;
  static constexpr int SIZE = 32;
  template <typename W>
  static Chunk load(const W* p) {
    return load_bf16(p);
  }
  static VF add(VF sum, Chunk x, Chunk a) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)a);
  }
};
#else
template <>
struct Dot<bf16> {
  struct Chunk {
    VF low, high;
  };
  static constexpr int SIZE = 2 * VF_WIDTH;
  template <typename W>
  static Chunk load(const W* p) {
    Chunk chunk;
    load_pairs(p, &chunk.low, &chunk.high);
    return chunk;
  }
  static VF add(VF sum, Chunk x, Chunk a) {
    return vfma(x.high, a.high, vfma(x.low, a.low, sum));
  }
};
#endif

template <typename T, typename W>
typename Dot<T>::Chunk load_tail(const W* p, int n) {
  W lanes[Dot<T>::SIZE] = {};
  std::memcpy(lanes, p, n * sizeof(W));
  return Dot<T>::load(lanes);
}

#if defined(__AVX512F__)
constexpr int DOT_TOKENS = 3, DOT_RANKS = 8;  // 24 sums in 32 registers
#else
constexpr int DOT_TOKENS = 2, DOT_RANKS = 4;  // 8 sums in 16 registers
#endif

#if defined(__AVX512F__)
inline __m256 fold(VF x) {
  return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
}
inline VF widened(__m256 x) { return _mm512_zextps256_ps512(x); }
#else
inline __m256 fold(VF x) { return x; }
inline VF widened(__m256 x) { return x; }
#endif

// y[r] = the lanes of sums[r], added as a tree: always the same one, and all R at once.
template <typename T, int R>
inline void store_sums(const VF (&sums)[R], T* y) {
  static_assert(R <= 8);
  __m256 eight[8], four[4], two[2];
  LOADOUT_UNROLL for (int r = 0; r < 8; ++r)
    eight[r] = r < R ? fold(sums[r < R ? r : 0]) : _mm256_setzero_ps();
  LOADOUT_UNROLL for (int r = 0; r < 4; ++r)
    four[r] = _mm256_add_ps(_mm256_permute2f128_ps(eight[r], eight[r + 4], 0x20),
                            _mm256_permute2f128_ps(eight[r], eight[r + 4], 0x31));
  LOADOUT_UNROLL for (int r = 0; r < 2; ++r)
    two[r] = _mm256_add_ps(_mm256_shuffle_ps(four[2 * r], four[2 * r + 1], 0x44),
                           _mm256_shuffle_ps(four[2 * r], four[2 * r + 1], 0xee));
  const __m256 one = _mm256_add_ps(_mm256_shuffle_ps(two[0], two[1], 0x88),
                                   _mm256_shuffle_ps(two[0], two[1], 0xdd));
  vstore(y, widened(one), R);
}

// sums[m][r] += x[m] . a[r] over one chunk, of which `load` reads what there is.
template <typename T, typename W, int M, int R, typename Load>
inline void dot_chunk(const T* const* x, const W* a, int64_t in, int64_t i, VF (&sums)[M][R],
                      Load load) {
  typename Dot<T>::Chunk chunks[M];
  LOADOUT_UNROLL for (int m = 0; m < M; ++m) chunks[m] = load(x[m] + i);
  LOADOUT_UNROLL for (int r = 0; r < R; ++r) {
    const auto chunk = load(a + r * in + i);
    LOADOUT_UNROLL for (int m = 0; m < M; ++m)
      sums[m][r] = Dot<T>::add(sums[m][r], chunks[m], chunk);
  }
}

}  // namespace loadout
