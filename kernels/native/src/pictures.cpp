// A tower's own operations: patches cut from pixels, positions that are blended, patches that become
// cells, and rows that a part of a tile has in common with all of it.
#include <algorithm>

#include "simd.h"
#include "slice.h"

namespace loadout {

constexpr int64_t CHANNELS = 3, BYTE_VALUES = 256;

// out[p, c, y, x] = values[c, the byte of channel c of pixel (y, x) of patch p].
struct CutPatchesArgs {
  const uint8_t* pixels;   // [height, width, CHANNELS]
  const float* values;     // [CHANNELS, BYTE_VALUES]
  const int64_t* rows;     // [P], of the grid of patches
  const int64_t* columns;  // [P]
  float* out;              // [P, CHANNELS, side, side]
  const int32_t* count;
  int64_t width;
  int64_t side;
};

void cut_patches(const CutPatchesArgs& args, const Slice& slice) {
  const int64_t side = args.side, plane = side * side;
  const auto mine = slice.range(*args.count);
  for (int64_t p = mine.begin; p < mine.end; ++p) {
    float* out = args.out + p * CHANNELS * plane;
    const int64_t first = args.rows[p] * side * args.width + args.columns[p] * side;
    for (int64_t y = 0; y < side; ++y, out += side) {
      const uint8_t* pixel = args.pixels + (first + y * args.width) * CHANNELS;
      for (int64_t x = 0; x < side; ++x, pixel += CHANNELS) {
        for (int64_t c = 0; c < CHANNELS; ++c)
          out[c * plane + x] = args.values[c * BYTE_VALUES + pixel[c]];
      }
    }
  }
}

constexpr int BLENDED = 4;

// x[t] += the sum of table[rows[t, i]] * weights[t, i], in place; the sum is rounded first.
struct AddBlendArgs {
  void* x;               // [T, size]
  const void* table;     // [S, size]
  const int64_t* rows;   // [T, BLENDED], below S
  const float* weights;  // [T, BLENDED]
  const int32_t* count;
  int64_t size;
};

template <typename T>
void add_blend(const AddBlendArgs& args, const Slice& slice) {
  const auto mine = slice.range(*args.count);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    T* x = static_cast<T*>(args.x) + t * args.size;
    const T* rows[BLENDED];
    VF weights[BLENDED];
    for (int i = 0; i < BLENDED; ++i) {
      rows[i] = static_cast<const T*>(args.table) + args.rows[t * BLENDED + i] * args.size;
      weights[i] = vset1(args.weights[t * BLENDED + i]);
    }
    for_vectors(args.size, [&](int64_t at, auto lanes) {
      VF sum = vmul(vload(rows[0] + at, lanes), weights[0]);
      for (int i = 1; i < BLENDED; ++i) sum = vfma(vload(rows[i] + at, lanes), weights[i], sum);
      vstore(x + at, vadd(vload(x + at, lanes), rounded<T>(sum)), lanes);
    });
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

LOADOUT_EXPORT(cut_patches, loadout::CutPatchesArgs, loadout::cut_patches)
LOADOUT_EXPORT(add_blend_float, loadout::AddBlendArgs, loadout::add_blend<float>)
LOADOUT_EXPORT(add_blend_bf16, loadout::AddBlendArgs, loadout::add_blend<loadout::bf16>)
LOADOUT_EXPORT(merge_patches_float, loadout::MergePatchesArgs, loadout::merge_patches<float>)
LOADOUT_EXPORT(merge_patches_bf16, loadout::MergePatchesArgs,
               loadout::merge_patches<loadout::bf16>)
LOADOUT_EXPORT(copy_rows, loadout::CopyRowsArgs, loadout::copy_rows)
