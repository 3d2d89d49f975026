// Rotary position embedding, and the way of a step's keys and values into the cache.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "e4m3.h"
#include "kv_pages.h"
#include "slice.h"

namespace loadout {

// cos[t] and sin[t] of positions[t] * inverse_frequencies, times `scaling`. With several positions
// of a token, pair i turns by the one on axes[i].
struct RotaryAnglesArgs {
  const int64_t* positions;           // [T], or [any, axis_stride]
  const int32_t* axes;                // [half], or null: a token has one position
  int64_t axis_stride;
  const float* inverse_frequencies;   // [half]
  void* cos;                          // [T, half]
  void* sin;                          // [T, half]
  const int32_t* num_tokens;
  int64_t half;  // of what is turned of a head
  float scaling;
};

template <typename T>
void rotary_angles(const RotaryAnglesArgs& args, const Slice& slice) {
  const auto mine = slice.range(*args.num_tokens);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const int64_t* positions = args.positions + t;
    const float only = static_cast<float>(*positions);
    T* cos = static_cast<T*>(args.cos) + t * args.half;
    T* sin = static_cast<T*>(args.sin) + t * args.half;
    for (int64_t i = 0; i < args.half; ++i) {
      const float position =
          args.axes ? static_cast<float>(positions[args.axes[i] * args.axis_stride]) : only;
      const float angle = position * args.inverse_frequencies[i];
      cos[i] = from_float<T>(std::cos(angle) * args.scaling);
      sin[i] = from_float<T>(std::sin(angle) * args.scaling);
    }
  }
}

// An RMSNorm over a head, or over all heads side by side.
struct HeadNorm {
  const void* weight;  // [size], of floats if it is wide, or null: no norm; or one of each token
  int64_t size;        // head_dim, or that of all heads
  int64_t stride;      // of the tokens' weights; 0: all have one
  int64_t is_wide;     // the product with the weight is rounded, not the norm before it
};

// For every token: q and k are normed (where there are weights) and rotated, or the other way
// round, and v is normed; q, times its scale, stays in place, k and v go to the token's cell.
struct RopeAndStoreArgs {
  KvLayer cache;
  void* qkv;  // [T, row_stride]: q of all heads, k and v where there are any
  int64_t row_stride;
  int64_t num_heads;
  int64_t half;     // of what is turned of a head
  const void* cos;  // [T, half], or null: nothing is rotated
  const void* sin;
  int64_t is_interleaved;  // neighbours turn with each other
  int64_t num_keys;        // heads of k; 0: nothing is stored
  int64_t has_values;      // else v is what k is at first
  HeadNorm q_norm;
  HeadNorm k_norm;
  HeadNorm v_norm;
  int64_t norms_rotated;
  const void* q_scale;   // [T], or null
  const int64_t* cells;  // [T]
  const int32_t* num_tokens;
  float eps;
};

template <typename T>
void norm_part(T* x, const HeadNorm& norm, int64_t first, float eps) {
  VF squares = vzero();
  for_vectors(norm.size, [&](int64_t i, auto lanes) {
    const VF part = vload(x + i, lanes);
    squares = vfma(part, part, squares);
  });
  const VF scale = vset1(1.0f / std::sqrt(reduce_add(squares) / norm.size + eps));
  if (norm.is_wide) {
    const float* weight = static_cast<const float*>(norm.weight) + first;
    for_vectors(norm.size, [&](int64_t i, auto lanes) {
      vstore(x + i, vmul(vmul(vload(x + i, lanes), scale), vload(weight + i, lanes)), lanes);
    });
    return;
  }
  const T* weight = static_cast<const T*>(norm.weight) + first;
  for_vectors(norm.size, [&](int64_t i, auto lanes) {
    const VF normed = rounded<T>(vmul(vload(x + i, lanes), scale));
    vstore(x + i, vmul(normed, vload(weight + i, lanes)), lanes);
  });
}

template <typename T>
void norm_heads(T* x, const HeadNorm& norm, int64_t size, int64_t t, float eps) {
  if (!norm.weight) return;
  for (int64_t at = 0; at < size; at += norm.size) norm_part(x + at, norm, t * norm.stride, eps);
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

// Element 2 i turns with element 2 i + 1.
template <typename T>
void rotate_neighbours(T* x, const T* cos, const T* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float c = to_float(cos[i]), s = to_float(sin[i]);
    const float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);
    x[2 * i] = from_float<T>(to_float(from_float<T>(a * c)) - b * s);
    x[2 * i + 1] = from_float<T>(to_float(from_float<T>(b * c)) + a * s);
  }
}

template <int P, typename C>
void store_cell(const KvLayer& cache, int64_t cell, int64_t kv_head, const C* k, const C* v) {
  const int64_t page = cell / cache.page_size, offset = cell % cache.page_size;
  const int64_t size = cache.head_dim;
  C* keys = cache.keys<C>(page, kv_head) + cache.key_at<P>(offset);
  C* values = cache.values<C>(page, kv_head) + cache.value_at<P>(offset);
  if (!cache.is_tiled) {
    std::memcpy(keys, k, size * sizeof(C));
    std::memcpy(values, v, size * sizeof(C));
    return;
  }
  for (int64_t i = 0; i < size; i += P) {
    std::memcpy(keys + i * cache.page_size, k + i, P * sizeof(C));
  }
  // Each element by itself: its neighbour belongs to a cell that another thread may be writing.
  for (int64_t i = 0; i < size; ++i) values[i * P] = v[i];
}

// Keys and values become `codes`, [2, head_dim], with a scale each.
template <typename T>
void store_fp8(const KvLayer& cache, int64_t cell, int64_t kv_head, const T* k, const T* v,
               e4m3* codes) {
  const int64_t size = cache.head_dim;
  float* scales = cache.scales(cell / cache.page_size, kv_head) + cell % cache.page_size;
  scales[0] = to_codes(codes, k, size);
  scales[cache.page_size] = to_codes(codes + size, v, size);
  store_cell<Pair<T>::SIZE>(cache, cell, kv_head, codes, codes + size);
}

// scale[t] = 1 + beta ln(1 + floor(positions[t] / length)), rounded to what queries are.
struct QueryGrowthArgs {
  const int64_t* positions;
  void* scale;  // [T]
  const int32_t* num_tokens;
  int64_t length;
  float beta;
};

template <typename T>
void query_growth(const QueryGrowthArgs& args, const Slice& slice) {
  const auto mine = slice.range(*args.num_tokens);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const float passed = static_cast<float>(args.positions[t] / args.length);
    static_cast<T*>(args.scale)[t] = from_float<T>(1.0f + args.beta * std::log1p(passed));
  }
}

template <typename T>
void rotate_heads(const RopeAndStoreArgs& args, T* heads, int64_t t) {
  if (!args.cos) return;
  const T* cos = static_cast<const T*>(args.cos) + t * args.half;
  const T* sin = static_cast<const T*>(args.sin) + t * args.half;
  const int64_t size = args.cache.head_dim;
  for (int64_t head = 0; head < args.num_heads + args.num_keys; ++head) {
    if (args.is_interleaved) {
      rotate_neighbours(heads + head * size, cos, sin, args.half);
    } else {
      rotate_head(heads + head * size, cos, sin, args.half);
    }
  }
}

template <typename T, typename C>
void rope_and_store(const RopeAndStoreArgs& args, const Slice& slice) {
  const int64_t size = args.cache.head_dim;
  const int64_t q_size = args.num_heads * size, kv_size = args.num_keys * size;
  std::vector<T> copied(args.has_values ? 0 : kv_size);
  std::vector<e4m3> codes(std::is_same_v<C, e4m3> ? 2 * size : 0);
  const auto mine = slice.range(*args.num_tokens);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    T* heads = static_cast<T*>(args.qkv) + t * args.row_stride;
    T* k = heads + q_size;
    T* v = k + kv_size;
    if (!args.has_values) {
      std::copy_n(k, kv_size, copied.data());
      v = copied.data();
    }
    if (args.norms_rotated) rotate_heads(args, heads, t);
    norm_heads(heads, args.q_norm, q_size, t, args.eps);
    norm_heads(k, args.k_norm, kv_size, t, args.eps);
    norm_heads(v, args.v_norm, kv_size, t, args.eps);
    if (!args.norms_rotated) rotate_heads(args, heads, t);
    if (args.q_scale) {
      const VF scale = vset1(to_float(static_cast<const T*>(args.q_scale)[t]));
      for_vectors(q_size, [&](int64_t i, auto lanes) {
        vstore(heads + i, vmul(vload(heads + i, lanes), scale), lanes);
      });
    }
    for (int64_t h = 0; h < args.num_keys; ++h) {
      if constexpr (std::is_same_v<C, e4m3>) {
        store_fp8(args.cache, args.cells[t], h, k + h * size, v + h * size, codes.data());
      } else {
        store_cell<Pair<T>::SIZE>(args.cache, args.cells[t], h, k + h * size, v + h * size);
      }
    }
  }
}

}  // namespace loadout

LOADOUT_EXPORT(rotary_angles_float, loadout::RotaryAnglesArgs, loadout::rotary_angles<float>)
LOADOUT_EXPORT(rotary_angles_bf16, loadout::RotaryAnglesArgs, loadout::rotary_angles<loadout::bf16>)
LOADOUT_EXPORT(query_growth_float, loadout::QueryGrowthArgs, loadout::query_growth<float>)
LOADOUT_EXPORT(query_growth_bf16, loadout::QueryGrowthArgs, loadout::query_growth<loadout::bf16>)
LOADOUT_EXPORT(rope_and_store_float, loadout::RopeAndStoreArgs,
               (loadout::rope_and_store<float, float>))
LOADOUT_EXPORT(rope_and_store_bf16, loadout::RopeAndStoreArgs,
               (loadout::rope_and_store<loadout::bf16, loadout::bf16>))
LOADOUT_EXPORT(rope_and_store_fp8_float, loadout::RopeAndStoreArgs,
               (loadout::rope_and_store<float, loadout::e4m3>))
LOADOUT_EXPORT(rope_and_store_fp8_bf16, loadout::RopeAndStoreArgs,
               (loadout::rope_and_store<loadout::bf16, loadout::e4m3>))
