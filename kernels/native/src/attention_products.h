// The two products of attention: scores of keys, and weighted sums of values.
#pragma once

#include "attention.h"

namespace loadout {
namespace {

// Cells [begin, end) of a block, as the products read them.
template <typename T>
struct Cells {
  int64_t begin, end;
  const T* keys[BLOCK_VECTORS];
  const T* values[BLOCK_TILES];
  int64_t key_stride, value_stride;  // from one pair to the next
};

// s[i, j] = q[i] . k[j] for M rows and N vectors of keys.
template <typename T, int M, int N>
void score(float* s, const T* q, int64_t q_stride, const T* const* keys, int64_t key_stride,
           int64_t size) {
  using P = Pair<T>;
  VF sums[M][N];
  LOADOUT_UNROLL for (int i = 0; i < M; ++i) {
    LOADOUT_UNROLL for (int j = 0; j < N; ++j) sums[i][j] = vzero();
  }
  int64_t at = 0;
  for (int64_t d = 0; d < size; d += P::SIZE, at += key_stride) {
    typename P::Vector k[N];
    LOADOUT_UNROLL for (int j = 0; j < N; ++j) k[j] = P::load(keys[j] + at);
    LOADOUT_UNROLL for (int i = 0; i < M; ++i) {
      const auto x = P::broadcast(q + i * q_stride + d);
      LOADOUT_UNROLL for (int j = 0; j < N; ++j) sums[i][j] = P::dot(sums[i][j], x, k[j]);
    }
  }
  LOADOUT_UNROLL for (int i = 0; i < M; ++i) {
    LOADOUT_UNROLL for (int j = 0; j < N; ++j) vstore(s + i * BLOCK + j * VF_WIDTH, sums[i][j]);
  }
}

// out[i] = out[i] * factor[i] + sum_j p[i, j] v[j] for M rows and N vectors of dimensions, over
// `num_tiles` tiles of values.
template <typename T, int M, int N>
void weigh(float* out, int64_t width, const float* factor, const T* p, const T* const* values,
           int64_t value_stride, int64_t num_tiles, int64_t first_dim) {
  using P = Pair<T>;
  VF sums[M][N];
  LOADOUT_UNROLL for (int i = 0; i < M; ++i) {
    LOADOUT_UNROLL for (int j = 0; j < N; ++j) {
      sums[i][j] = vmul(vload(out + i * width + j * VF_WIDTH), vset1(factor[i]));
    }
  }
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const T* v = values[tile] + first_dim * P::SIZE;
    for (int64_t c = tile * TILE; c < (tile + 1) * TILE; c += P::SIZE, v += value_stride) {
      typename P::Vector part[N];
      LOADOUT_UNROLL for (int j = 0; j < N; ++j) part[j] = P::load(v + j * VF_WIDTH * P::SIZE);
      LOADOUT_UNROLL for (int i = 0; i < M; ++i) {
        const auto weight = P::broadcast(p + i * BLOCK + c);
        LOADOUT_UNROLL for (int j = 0; j < N; ++j) {
          sums[i][j] = P::dot(sums[i][j], weight, part[j]);
        }
      }
    }
  }
  LOADOUT_UNROLL for (int i = 0; i < M; ++i) {
    LOADOUT_UNROLL for (int j = 0; j < N; ++j) {
      vstore(out + i * width + j * VF_WIDTH, sums[i][j]);
    }
  }
}

}  // namespace
}  // namespace loadout
