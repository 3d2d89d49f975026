// Tiles of products with packed weights, whatever the form of these is.
#pragma once

#include <algorithm>

#include "linear.h"
#include "simd.h"

namespace loadout {

constexpr int LINE_BYTES = 64;

// Bytes of x rows that stay in the second cache while the panels pass by.
constexpr int64_t ROW_BLOCK_BYTES = 384 * 1024;
// The same of rows of T. Tiles multiply so fast that fewer rows wait for panels, and all processors
// with AMX have a second cache of 2 MiB: two panels fit, too.
template <typename T>
constexpr int64_t ROW_BLOCK_BYTES_OF = ROW_BLOCK_BYTES;
#if defined(__AMX_BF16__)
template <>
inline constexpr int64_t ROW_BLOCK_BYTES_OF<bf16> = 1280 * 1024;
template <>
inline constexpr int64_t ROW_BLOCK_BYTES_OF<int8_t> = 1280 * 1024;
#endif

// One product works on a tile of up to MAX_ROWS rows, whose sums lie in registers: 24 of 32, or 12
// of 16. 14 rows would fit too, but rows 2 KiB apart then compete for the same lines of the first
// cache.
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12;
#else
constexpr int MAX_ROWS = 6;
#endif

// The width of the tile: few rows by a whole panel, many by two vectors.
constexpr int tile_vectors(int rows) {
  constexpr int panel = PANEL / VF_WIDTH;
  return rows * panel <= 2 * MAX_ROWS ? panel : 2;
}

// With more rows than this the panel that comes next is fetched while this one is computed with.
// With fewer a panel is computed with as fast as it arrives, and the hardware fetches better alone.
constexpr int MAX_ROWS_UNFETCHED = MAX_ROWS / 2;

template <int ROWS>
using Sums = VF[ROWS][tile_vectors(ROWS)];

// Fetches LINES lines of what comes next, in the i-th step of its reader.
template <int LINES>
inline void fetch(const char* next, int64_t i) {
  for (int line = 0; line < LINES; ++line)
    _mm_prefetch(next + (i * LINES + line) * LINE_BYTES, _MM_HINT_T1);
}

// Adds the bias to the sums of `rows` rows by one panel and writes what of its outputs, from `column`
// on, there is.
template <typename Out>
void store_panel(const LinearArgs& args, const float* sums, int64_t row, int rows,
                 int64_t column) {
  constexpr int VECTORS = PANEL / VF_WIDTH;
  Out* out = static_cast<Out*>(args.out) + row * args.out_stride + column;
  const int64_t width = std::min<int64_t>(args.out_features - column, PANEL);
  VF bias[VECTORS] = {};
  if (args.bias)
    for (int v = 0; v * VF_WIDTH < width; ++v)
      bias[v] = vload(args.bias + column + v * VF_WIDTH,
                      static_cast<int>(std::min<int64_t>(width - v * VF_WIDTH, VF_WIDTH)));
  for (int r = 0; r < rows; ++r, out += args.out_stride, sums += PANEL) {
    const auto sum = [&](int v) { return vadd(vload(sums + v * VF_WIDTH), bias[v]); };
    if (width == PANEL) {
      LOADOUT_UNROLL for (int v = 0; v < VECTORS; v += 2)
        vstore(out + v * VF_WIDTH, sum(v), sum(v + 1));
      continue;
    }
    for (int v = 0; v * VF_WIDTH < width; ++v) {
      const int64_t n = std::min<int64_t>(width - v * VF_WIDTH, VF_WIDTH);
      vstore(out + v * VF_WIDTH, sum(v), static_cast<int>(n));
    }
  }
}

inline int64_t num_panels(const LinearArgs& args) {
  return (args.out_features + PANEL - 1) / PANEL;
}

// Some rows of one expert by one panel of it.
struct ExpertItem {
  int64_t expert = -1;  // -1: no work is left
  int64_t first = 0, last = 0, panel = 0;
};

// Finds items of at most `most_rows` rows by their numbers, which ascend from call to call.
class ExpertItems {
 public:
  ExpertItems(const ExpertsLinearArgs& args, int64_t most_rows)
      : args_(args), most_(most_rows), panels_(num_panels(args.linear)) {}

  ExpertItem find(int64_t number) {
    for (; expert_ < args_.num_experts; ++expert_) {
      const int64_t start = args_.starts[expert_], count = args_.starts[expert_ + 1] - start;
      const int64_t blocks = (count + most_ - 1) / most_;
      if (number - before_ < blocks * panels_) {
        const int64_t block = (number - before_) / panels_;
        return {expert_, start + count * block / blocks, start + count * (block + 1) / blocks,
                (number - before_) % panels_};
      }
      before_ += blocks * panels_;
    }
    return {};
  }

 private:
  const ExpertsLinearArgs& args_;
  const int64_t most_, panels_;
  int64_t expert_ = 0, before_ = 0;
};

}  // namespace loadout
