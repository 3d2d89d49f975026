// Products with packed weights of bf16 by AMX's tiles; see linear.cpp.
#pragma once

#include "panels.h"
#include "tile_block.h"

#if defined(__AMX_BF16__)

namespace loadout {

// A panel that is wanted soon, fetched into the second cache bit by bit.
class PanelFetch {
 public:
  // In `steps` steps; a null panel is none.
  PanelFetch(const bf16* panel, int64_t elements, int64_t steps)
      : at_(reinterpret_cast<const char*>(panel)),
        end_(panel ? at_ + elements * static_cast<int64_t>(sizeof(bf16)) : at_),
        lines_((end_ - at_ + LINE_BYTES * steps - 1) / (LINE_BYTES * steps)) {}

  void step() {
    for (int64_t i = 0; i < lines_ && at_ < end_; ++i, at_ += LINE_BYTES)
      _mm_prefetch(at_, _MM_HINT_T1);
  }

 private:
  const char* at_;
  const char* end_;
  int64_t lines_;
};

// How a thread multiplies rows by panels, while an operation runs.
class PanelTiles {
 public:
  // Fewer than 128 would read panels from memory more often, which takes longer than multiplying:
  // of long rows there are as many, if the cache holds them.
  static int64_t most_rows(int64_t row_bytes) {
    const int64_t of_long_rows = std::min<int64_t>(128, 1792 * 1024 / row_bytes);
    return std::max({int64_t{TileBlock::ROWS}, ROW_BLOCK_BYTES_OF<bf16> / row_bytes, of_long_rows});
  }

  // Rows [first, last) by one panel. `next`: null, or the panel that this thread takes next.
  template <typename Out>
  void multiply(const LinearArgs& args, int64_t first, int64_t last, int64_t panel,
                const bf16* next) {
    const int64_t elements = panel_elements<bf16>(args.in_features);
    const bf16* w = static_cast<const bf16*>(args.weights) + panel * elements;
    constexpr int64_t MAX_ROWS = TileBlock::ROWS;
    const int64_t blocks = (last - first + MAX_ROWS - 1) / MAX_ROWS;
    const int64_t steps = (args.in_features + TILE_INPUTS - 1) / TILE_INPUTS;
    PanelFetch fetch(next, elements, blocks * steps);
    for (int64_t row = first; row < last; row += MAX_ROWS) {
      const int rows = static_cast<int>(std::min<int64_t>(last - row, MAX_ROWS));
      const bf16* x = static_cast<const bf16*>(args.x) + row * args.x_stride;
      const float* sums = block_.multiply<float>(
          x, args.x_stride * sizeof(bf16), rows, w, args.in_features * sizeof(bf16),
          [&] { fetch.step(); });
      store_panel<Out>(args, sums, row, rows, panel * PANEL);
    }
  }

 private:
  TileBlock block_;
};

}  // namespace loadout

#endif
