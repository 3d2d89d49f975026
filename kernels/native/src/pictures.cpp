// A tower's own operations: patches cut from pixels, positions that are blended, values that are
// clipped or standardised, heads that are arranged, patches that become cells, and rows that a part of
// a tile has in common with all of it.
#include <algorithm>

#include "simd.h"
#include "slice.h"

namespace loadout {

constexpr int64_t CHANNELS = 3, BYTE_VALUES = 256;

// out[p, c, y, x] = values[c, the byte of channel c of pixel (y, x) of patch p]; pixel by pixel it is
// out[p, y, x, c].
struct CutPatchesArgs {
  const uint8_t* pixels;   // [height, width, CHANNELS]
  const float* values;     // [CHANNELS, BYTE_VALUES]
  const int64_t* rows;     // [P], of the grid of patches
  const int64_t* columns;  // [P]
  void* out;               // [P, CHANNELS * side * side]
  const int32_t* count;
  int64_t width;
  int64_t side;
};

template <typename T, bool BY_PIXEL>
void cut_patches(const CutPatchesArgs& args, const Slice& slice) {
  const int64_t side = args.side;
  const int64_t of_channel = BY_PIXEL ? 1 : side * side, of_pixel = BY_PIXEL ? CHANNELS : 1;
  const auto mine = slice.range(*args.count);
  for (int64_t p = mine.begin; p < mine.end; ++p) {
    T* out = static_cast<T*>(args.out) + p * CHANNELS * side * side;
    const int64_t first = args.rows[p] * side * args.width + args.columns[p] * side;
    for (int64_t y = 0; y < side; ++y, out += side * of_pixel) {
      const uint8_t* pixel = args.pixels + (first + y * args.width) * CHANNELS;
      for (int64_t x = 0; x < side; ++x, pixel += CHANNELS) {
        for (int64_t c = 0; c < CHANNELS; ++c) {
          const float value = args.values[c * BYTE_VALUES + pixel[c]];
          out[c * of_channel + x * of_pixel] = from_float<T>(value);
        }
      }
    }
  }
}

constexpr int MAX_BLENDED = 4;

// x[t] += the sum of table[rows[t, i]] * weights[t, i], in place; the sum is rounded first.
struct AddBlendArgs {
  void* x;               // [T, size]
  const void* table;     // [S, size]
  const int64_t* rows;   // [T, blended], below S
  const float* weights;  // [T, blended]
  const int32_t* count;
  int64_t size;
  int64_t blended;  // at most MAX_BLENDED
};

template <typename T>
void add_blend(const AddBlendArgs& args, const Slice& slice) {
  const int64_t blended = args.blended;
  const auto mine = slice.range(*args.count);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    T* x = static_cast<T*>(args.x) + t * args.size;
    const T* rows[MAX_BLENDED];
    VF weights[MAX_BLENDED];
    for (int64_t i = 0; i < blended; ++i) {
      rows[i] = static_cast<const T*>(args.table) + args.rows[t * blended + i] * args.size;
      weights[i] = vset1(args.weights[t * blended + i]);
    }
    for_vectors(args.size, [&](int64_t at, auto lanes) {
      VF sum = vmul(vload(rows[0] + at, lanes), weights[0]);
      for (int64_t i = 1; i < blended; ++i) sum = vfma(vload(rows[i] + at, lanes), weights[i], sum);
      vstore(x + at, vadd(vload(x + at, lanes), rounded<T>(sum)), lanes);
    });
  }
}

// out[t] = x[t] between two bounds. NaN stays NaN.
struct ClipArgs {
  const void* x;  // [T, size], rows x_stride apart
  void* out;      // [T, size], rows out_stride apart; may be `x`
  const int32_t* count;
  int64_t size;
  int64_t x_stride;
  int64_t out_stride;
  float least;
  float most;
};

template <typename T>
void clip(const ClipArgs& args, const Slice& slice) {
  const VF least = vset1(args.least), most = vset1(args.most);
  const auto mine = slice.range(*args.count);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const T* x = static_cast<const T*>(args.x) + t * args.x_stride;
    T* out = static_cast<T*>(args.out) + t * args.out_stride;
    for_vectors(args.size, [&](int64_t at, auto lanes) {
      vstore(out + at, vmin(most, vmax(least, vload(x + at, lanes))), lanes);
    });
  }
}

constexpr int KINDS = 3, QUARTERS = 4;  // queries, keys and values

// Each head becomes head / sqrt(mean(head^2) + eps) * weight, in place; the quarters of queries and
// keys go to other places.
struct ArrangeHeadsArgs {
  void* qkv;                    // [T, KINDS * num_heads * head_dim], rows stride apart
  const float* weights[KINDS];  // [head_dim], or one of each token
  const int32_t* count;
  int64_t weight_strides[KINDS];  // 0: all tokens have one weight
  int64_t stride;
  int64_t num_heads;
  int64_t head_dim;         // in whole quarters
  int64_t places[QUARTERS];  // of the quarters of queries and keys
  float eps;
};

template <typename T>
void arrange_heads(const ArrangeHeadsArgs& args, const Slice& slice) {
  const int64_t size = args.head_dim, quarter = size / QUARTERS;
  const auto mine = slice.range(*args.count * KINDS);
  for (int64_t item = mine.begin; item < mine.end; ++item) {
    const int64_t t = item / KINDS, kind = item % KINDS;
    const float* weight = args.weights[kind] + t * args.weight_strides[kind];
    T* head = static_cast<T*>(args.qkv) + t * args.stride + kind * args.num_heads * size;
    for (int64_t h = 0; h < args.num_heads; ++h, head += size) {
      VF squares = vzero();
      for_vectors(size, [&](int64_t at, auto lanes) {
        const VF x = vload(head + at, lanes);
        squares = vfma(x, x, squares);
      });
      const VF scale = vset1(1.0f / std::sqrt(reduce_add(squares) / size + args.eps));
      T* to[QUARTERS];
      for (int i = 0; i < QUARTERS; ++i)
        to[i] = head + (kind < 2 ? args.places[i] : i) * quarter;
      for_vectors(quarter, [&](int64_t at, auto lanes) {  // all are read before any is written
        VF made[QUARTERS];
        LOADOUT_UNROLL
        for (int i = 0; i < QUARTERS; ++i) {
          const int64_t from = i * quarter + at;
          made[i] = vmul(vmul(vload(head + from, lanes), scale), vload(weight + from, lanes));
        }
        LOADOUT_UNROLL
        for (int i = 0; i < QUARTERS; ++i) vstore(to[i] + at, made[i], lanes);
      });
    }
  }
}

// The rows of a cell's patches, side by side; element by element in turn; or their mean.
enum class Merging : int64_t { SIDE_BY_SIDE, TAKING_TURNS, MEAN };

struct MergePatchesArgs {
  const void* x;  // [cells * patches, size]
  void* out;      // [cells, patches * size], or, of means, [cells, size]
  const int32_t* count;
  int64_t patches;
  int64_t size;
  Merging merging;
};

template <typename T>
void merge_patches(const MergePatchesArgs& args, const Slice& slice) {
  const int64_t size = args.size, patches = args.patches;
  const auto mine = slice.range(*args.count);
  for (int64_t cell = mine.begin; cell < mine.end; ++cell) {
    const T* x = static_cast<const T*>(args.x) + cell * patches * size;
    if (args.merging == Merging::MEAN) {
      T* out = static_cast<T*>(args.out) + cell * size;
      const VF share = vset1(1.0f / patches);
      for_vectors(size, [&](int64_t at, auto lanes) {
        VF sum = vload(x + at, lanes);
        for (int64_t i = 1; i < patches; ++i) sum = vadd(sum, vload(x + i * size + at, lanes));
        vstore(out + at, vmul(sum, share), lanes);
      });
      continue;
    }
    T* out = static_cast<T*>(args.out) + cell * patches * size;
    if (args.merging == Merging::SIDE_BY_SIDE) {
      std::memcpy(out, x, patches * size * sizeof(T));
      continue;
    }
    for (int64_t at = 0; at < size; ++at)
      for (int64_t i = 0; i < patches; ++i) *out++ = x[i * size + at];
  }
}

// x[i] = (scale * x[i] - bias) * factor, in place, or scale * x[i]; rounded once.
struct StandardiseArgs {
  void* x;              // [M, size]
  const float* bias;    // [size], or null
  const float* factor;  // as bias
  const int32_t* count;
  int64_t size;
  float scale;
};

template <typename T>
void standardise(const StandardiseArgs& args, const Slice& slice) {
  const VF scale = vset1(args.scale);
  const auto mine = slice.range(*args.count);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    T* x = static_cast<T*>(args.x) + i * args.size;
    for_vectors(args.size, [&](int64_t at, auto lanes) {
      VF made = vmul(vload(x + at, lanes), scale);
      if (args.bias)
        made = vmul(vsub(made, vload(args.bias + at, lanes)), vload(args.factor + at, lanes));
      vstore(x + at, made, lanes);
    });
  }
}

// Copies rows from one place to another.
struct CopyRowsArgs {
  const void* source;  // rows source_stride bytes apart
  void* target;        // rows target_stride bytes apart
  const int32_t* count;
  int64_t num_bytes;  // of a row
  int64_t source_stride;
  int64_t target_stride;
};

void copy_rows(const CopyRowsArgs& args, const Slice& slice) {
  const auto mine = slice.range(*args.count);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    std::memcpy(static_cast<char*>(args.target) + i * args.target_stride,
                static_cast<const char*>(args.source) + i * args.source_stride, args.num_bytes);
  }
}

}  // namespace loadout

LOADOUT_EXPORT(cut_patches, loadout::CutPatchesArgs, (loadout::cut_patches<float, false>))
LOADOUT_EXPORT(read_patches_float, loadout::CutPatchesArgs, (loadout::cut_patches<float, true>))
LOADOUT_EXPORT(read_patches_bf16, loadout::CutPatchesArgs,
               (loadout::cut_patches<loadout::bf16, true>))
LOADOUT_EXPORT(add_blend_float, loadout::AddBlendArgs, loadout::add_blend<float>)
LOADOUT_EXPORT(add_blend_bf16, loadout::AddBlendArgs, loadout::add_blend<loadout::bf16>)
LOADOUT_EXPORT(merge_patches_float, loadout::MergePatchesArgs, loadout::merge_patches<float>)
LOADOUT_EXPORT(merge_patches_bf16, loadout::MergePatchesArgs,
               loadout::merge_patches<loadout::bf16>)
LOADOUT_EXPORT(clip_float, loadout::ClipArgs, loadout::clip<float>)
LOADOUT_EXPORT(clip_bf16, loadout::ClipArgs, loadout::clip<loadout::bf16>)
LOADOUT_EXPORT(arrange_heads_float, loadout::ArrangeHeadsArgs, loadout::arrange_heads<float>)
LOADOUT_EXPORT(arrange_heads_bf16, loadout::ArrangeHeadsArgs, loadout::arrange_heads<loadout::bf16>)
LOADOUT_EXPORT(standardise_float, loadout::StandardiseArgs, loadout::standardise<float>)
LOADOUT_EXPORT(standardise_bf16, loadout::StandardiseArgs, loadout::standardise<loadout::bf16>)
LOADOUT_EXPORT(copy_rows, loadout::CopyRowsArgs, loadout::copy_rows)
