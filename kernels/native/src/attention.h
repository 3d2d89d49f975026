// What the operations of attention share; see attention.cpp.
#pragma once

#include "kv_pages.h"

namespace loadout {

constexpr int TILE = 16;   // cells that lie in one piece of a tiled page
constexpr int BLOCK = 64;  // cells between two rescalings of the sums
constexpr int BLOCK_TILES = BLOCK / TILE;
constexpr int BLOCK_VECTORS = BLOCK / VF_WIDTH;
constexpr int TILE_VECTORS = TILE / VF_WIDTH;
constexpr int PART = 512;       // cells that one thread takes at least, where a context is split
constexpr int LONG_PARTS = 16;  // a longer context has longer parts
constexpr int64_t SPAN = LONG_PARTS * PART;  // a context has PART cells in a part for each of these
// Most parts of an item: a window may begin and end inside one, and a block's queries see a few
// cells more than one query does.
constexpr int MAX_PARTS = LONG_PARTS + 2;
constexpr int LEAST_SHARES = 8;  // of its work that a thread takes, where it can be cut so small
constexpr float NOTHING_SEEN = -1e30f;
constexpr float LOG2_E = 1.44269504f;

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Queries [first_query, first_query + num_queries) of a row over cells [first_cell, end_cell) of
// its sequence, of which this item computes `num_parts` parts from `first_part` on.
struct AttentionItem {
  int32_t row;
  int32_t first_head, num_heads;  // of keys and values
  int32_t first_query, num_queries;
  int32_t first_cell, end_cell;
  int32_t part_cells;
  int32_t first_part, num_parts;
  int32_t slot;  // -1, or where the parts of a split item meet
};

}  // namespace loadout
