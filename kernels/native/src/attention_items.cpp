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

static void attention_items(const AttentionItemsArgs& args, const Slice& slice) {
  if (slice.thread != 0) return;
  const Rows& rows = args.rows;
  const auto each_block = [&](auto body) {
    for (int32_t row = 0; row < *rows.count; ++row) {
      const int32_t count = rows.query_starts[row + 1] - rows.query_starts[row];
      const int32_t num_blocks = (count + args.block_queries - 1) / args.block_queries;
      for (int32_t block = num_blocks - 1; block >= 0; --block) {  // those that see most first
        AttentionItem item{};
        item.row = row;
        item.first_query = block * args.block_queries;
        item.num_queries = std::min<int32_t>(args.block_queries, count - item.first_query);
        const int64_t position = rows.context_lengths[row] - count + item.first_query;
        item.end_cell = position + item.num_queries;
        item.first_cell = args.window ? std::max<int64_t>(0, position - args.window + 1) : 0;
        const int64_t num_cells = item.end_cell - item.first_cell;
        item.part_cells = std::max<int64_t>(
            PART, round_up((num_cells + LONG_PARTS - 1) / LONG_PARTS, PART));
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
    const bool is_split = cost(item) > largest && slice.num_threads > 1 && item.num_parts > 1 &&
                          num_rows <= args.split_rows;
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
