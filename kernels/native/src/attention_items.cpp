// How a step is cut into work items.
#include <algorithm>

#include "attention.h"
#include "slice.h"

namespace loadout {

// Cuts a step into items; once per step for all layers of one window.
struct AttentionItemsArgs {
  Rows rows;
  int64_t num_kv_heads;
  int64_t group;          // query heads per key head
  int64_t window;         // 0: every position up to the query's own is seen
  int64_t block_rows;     // queries * group * key heads of one item at most
  int64_t block_queries;  // queries of one item at most
  int64_t split_rows;     // only items of at most so many queries * group are split into parts
  int64_t max_slots;
  AttentionItem* items;
  int32_t* num_items;
};

// Cells of a part, for a query at `position`. They are the same for all positions between two
// multiples of SPAN, so that they do not depend on which other queries share a query's block.
static int64_t part_cells(int64_t position, int64_t window) {
  const int64_t seen = window ? std::min(position + 1, window) : position + 1;
  return (seen + SPAN - 1) / SPAN * PART;
}

static void attention_items(const AttentionItemsArgs& args, const Slice& slice) {
  if (slice.thread != 0) return;
  const Rows& rows = args.rows;
  const auto each_block = [&](auto body) {
    for (int32_t row = 0; row < *rows.count; ++row) {
      const int64_t count = rows.query_starts[row + 1] - rows.query_starts[row];
      const int64_t first_position = rows.context_lengths[row] - count;
      for (int64_t end = count, first; end > 0; end = first) {  // those that see most first
        // Queries on both sides of a multiple of SPAN have parts of other sizes: no block has both.
        const int64_t last_position = first_position + end - 1;
        const int64_t start = std::max<int64_t>(0, last_position / SPAN * SPAN - first_position);
        first = start + (end - 1 - start) / args.block_queries * args.block_queries;
        AttentionItem item{};
        item.row = row;
        item.first_query = first;
        item.num_queries = end - first;
        const int64_t position = first_position + first;
        item.end_cell = rows.end(row, end - 1, last_position);
        item.first_cell = args.window ? std::max<int64_t>(0, position - args.window + 1) : 0;
        item.part_cells = part_cells(last_position, args.window);
        item.first_part = item.first_cell / item.part_cells;
        item.num_parts = (item.end_cell - 1) / item.part_cells + 1 - item.first_part;
        item.slot = -1;
        item.num_heads = 1;
        body(item);
      }
    }
  };
  // Reading a cell costs about as much as 8 queries' work on it.
  const auto cost = [&](const AttentionItem& item) {
    return (item.end_cell - item.first_cell) * (8 + item.num_queries * args.group);
  };
  int64_t total = 0;
  each_block([&](const AttentionItem& item) { total += cost(item) * args.num_kv_heads; });
  const int64_t largest = total / (LEAST_SHARES * slice.num_threads);
  int32_t num_items = 0, num_slots = 0;
  each_block([&](AttentionItem item) {
    const int64_t num_rows = item.num_queries * args.group;
    const int64_t fit = std::min(args.block_rows / num_rows, largest / cost(item));
    const int64_t step = std::clamp<int64_t>(fit, 1, args.num_kv_heads);
    // Queries that see beyond their position may have more parts than there is room for.
    const bool has_room = num_rows <= args.split_rows && item.num_parts <= MAX_PARTS;
    const bool is_split = cost(item) > largest && slice.num_threads > 1 && item.num_parts > 1 &&
                          has_room;
    for (int64_t head = 0; head < args.num_kv_heads; head += step) {
      item.first_head = head;
      item.num_heads = std::min(step, args.num_kv_heads - head);
      if (!is_split || num_slots == args.max_slots) {
        args.items[num_items++] = item;
        continue;
      }
      AttentionItem part = item;
      part.slot = num_slots++;
      part.num_parts = 1;
      for (int32_t i = 0; i < item.num_parts; ++i, ++part.first_part) {
        args.items[num_items++] = part;
      }
    }
  });
  *args.num_items = num_items;
}

}  // namespace loadout

LOADOUT_EXPORT(attention_items, loadout::AttentionItemsArgs, loadout::attention_items)
