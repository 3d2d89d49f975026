// Rotary position embedding, and the way of a step's keys and values into the cache.
#include "kv_pages.h"
#include "slice.h"

namespace loadout {

// cos[t] and sin[t] of positions[t] * inverse_frequencies, times `scaling`.
struct RotaryAnglesArgs {
  const int64_t* positions;           // [T]
  const float* inverse_frequencies;   // [head_dim / 2]
  void* cos;                          // [T, head_dim / 2]
  void* sin;                          // [T, head_dim / 2]
  const int32_t* num_tokens;
  int64_t half;  // head_dim / 2
  float scaling;
};

template <typename T>
void rotary_angles(const RotaryAnglesArgs& args, const Slice& slice) {
  const auto mine = slice.range(*args.num_tokens);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const float position = static_cast<float>(args.positions[t]);
    T* cos = static_cast<T*>(args.cos) + t * args.half;
    T* sin = static_cast<T*>(args.sin) + t * args.half;
    for (int64_t i = 0; i < args.half; ++i) {
      const float angle = position * args.inverse_frequencies[i];
      cos[i] = from_float<T>(std::cos(angle) * args.scaling);
      sin[i] = from_float<T>(std::sin(angle) * args.scaling);
    }
  }
}

// For every token: q and k of each head are normed (where there are weights) and rotated; q stays
// in place, k and v go to the token's cell.
struct RopeAndStoreArgs {
  KvLayer cache;
  void* qkv;  // [T, row_stride]: q of all heads, k, v
  int64_t row_stride;
  int64_t num_heads;
  const void* cos;  // [T, head_dim / 2]
  const void* sin;
  const void* q_norm;  // [head_dim] or null
  const void* k_norm;
  const int64_t* cells;  // [T]
  const int32_t* num_tokens;
  float eps;
};

template <typename T>
void norm_head(T* x, const T* weight, int64_t size, float eps) {
  VF squares = vzero();
  for_vectors(size, [&](int64_t i, auto lanes) {
    const VF part = vload(x + i, lanes);
    squares = vfma(part, part, squares);
  });
  const VF scale = vset1(1.0f / std::sqrt(reduce_add(squares) / size + eps));
  for_vectors(size, [&](int64_t i, auto lanes) {
    const VF normed = rounded<T>(vmul(vload(x + i, lanes), scale));
    vstore(x + i, vmul(normed, vload(weight + i, lanes)), lanes);
  });
}

// Element i turns with element i + half. Rounded after the first product, as torch does.
template <typename T>
void rotate_head(T* x, const T* cos, const T* sin, int64_t half) {
  for_vectors(half, [&](int64_t i, auto lanes) {
    const VF c = vload(cos + i, lanes), s = vload(sin + i, lanes);
    const VF a = vload(x + i, lanes), b = vload(x + half + i, lanes);
    vstore(x + i, vsub(rounded<T>(vmul(a, c)), vmul(b, s)), lanes);
    vstore(x + half + i, vfma(a, s, rounded<T>(vmul(b, c))), lanes);
  });
}

template <typename T>
void store_cell(const KvLayer& cache, int64_t cell, int64_t kv_head, const T* k, const T* v) {
  constexpr int P = Pair<T>::SIZE;
  const int64_t page = cell / cache.page_size, offset = cell % cache.page_size;
  const int64_t size = cache.head_dim;
  T* keys = cache.keys<T>(page, kv_head) + cache.key_at<T>(offset, 0);
  T* values = cache.values<T>(page, kv_head) + cache.value_at<T>(offset);
  if (!cache.is_tiled) {
    std::memcpy(keys, k, size * sizeof(T));
    std::memcpy(values, v, size * sizeof(T));
    return;
  }
  for (int64_t i = 0; i < size; i += P) {
    std::memcpy(keys + i * cache.page_size, k + i, P * sizeof(T));
  }
  // Each element by itself: its neighbour belongs to a cell that another thread may be writing.
  for (int64_t i = 0; i < size; ++i) values[i * P] = v[i];
}

template <typename T>
void rope_and_store(const RopeAndStoreArgs& args, const Slice& slice) {
  const int64_t size = args.cache.head_dim, half = size / 2;
  const int64_t num_kv_heads = args.cache.num_kv_heads;
  const T* q_norm = static_cast<const T*>(args.q_norm);
  const T* k_norm = static_cast<const T*>(args.k_norm);
  const auto mine = slice.range(*args.num_tokens);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    T* heads = static_cast<T*>(args.qkv) + t * args.row_stride;
    const T* cos = static_cast<const T*>(args.cos) + t * half;
    const T* sin = static_cast<const T*>(args.sin) + t * half;
    for (int64_t h = 0; h < args.num_heads + num_kv_heads; ++h) {
      const T* weight = h < args.num_heads ? q_norm : k_norm;
      if (weight) norm_head(heads + h * size, weight, size, args.eps);
      rotate_head(heads + h * size, cos, sin, half);
    }
    const T* k = heads + args.num_heads * size;
    const T* v = k + num_kv_heads * size;
    for (int64_t h = 0; h < num_kv_heads; ++h) {
      store_cell(args.cache, args.cells[t], h, k + h * size, v + h * size);
    }
  }
}

}  // namespace loadout

LOADOUT_EXPORT(rotary_angles_float, loadout::RotaryAnglesArgs, loadout::rotary_angles<float>)
LOADOUT_EXPORT(rotary_angles_bf16, loadout::RotaryAnglesArgs, loadout::rotary_angles<loadout::bf16>)
LOADOUT_EXPORT(rope_and_store_float, loadout::RopeAndStoreArgs, loadout::rope_and_store<float>)
LOADOUT_EXPORT(rope_and_store_bf16, loadout::RopeAndStoreArgs,
               loadout::rope_and_store<loadout::bf16>)
