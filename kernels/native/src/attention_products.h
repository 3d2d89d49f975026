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
  int64_t key_size;                  // dimensions of a key, in whole pairs
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

// Both products, by vectors. Tiles may stand in for them. They multiply up to ROWS rows at once,
// and sum values of CELLS cells at once, of which the first is a multiple of CELLS.
template <typename T>
class VectorProducts {
 public:
  static constexpr int ROWS = MAX_ROWS<T>;
  static constexpr int CELLS = TILE;

  // s[i, j] = q[i] . k[j] for `rows` rows of q, `width` apart, and `num_tiles` tiles of cells.
  void score(float* s, const T* q, int64_t width, int rows, const Cells<T>& cells,
             int64_t num_tiles) {
    with_constant<1, ROWS>(rows, [&](auto m) {
      each_vectors(num_tiles * TILE_VECTORS, [&](int64_t at, auto n) {
        loadout::score<T, decltype(m)::value, decltype(n)::value>(
            s + at * VF_WIDTH, q, width, cells.keys + at, cells.key_stride, cells.key_size);
      });
    });
  }

  // out[i] = out[i] * factor[i] + sum_j p[i, j] v[j], [rows, width].
  void weigh(float* out, int64_t width, int rows, const float* factor, const T* p,
             const Cells<T>& cells, int64_t num_tiles) {
    with_constant<1, ROWS>(rows, [&](auto m) {
      each_vectors(width / VF_WIDTH, [&](int64_t at, auto n) {
        loadout::weigh<T, decltype(m)::value, decltype(n)::value>(
            out + at * VF_WIDTH, width, factor, p, cells.values, cells.value_stride, num_tiles,
            at * VF_WIDTH);
      });
    });
  }

 private:
  // body(first, Constant<N>) over `count` vectors in even groups of N <= MAX_VECTORS.
  template <typename Body>
  static void each_vectors(int64_t count, Body body) {
    const int64_t num_groups = (count + MAX_VECTORS - 1) / MAX_VECTORS;
    for (int64_t group = 0; group < num_groups; ++group) {
      const int64_t first = count * group / num_groups;
      const int64_t size = count * (group + 1) / num_groups - first;
      with_constant<1, MAX_VECTORS>(static_cast<int>(size), [&](auto n) { body(first, n); });
    }
  }
};

template <typename T>
struct ProductsOf {
  using Type = VectorProducts<T>;
};

}  // namespace
}  // namespace loadout
