// What the LoRA operations share. Straight from the arena:
//
//     out[t, columns of k] += scale * (x[t] @ A_k.T) @ B_k
//
// Two operations, because the second product needs all of the first: shrink (or, for an embedding,
// gather) writes y, expand reads it. A sum is made of the same terms in the same order however the
// work is tiled and shared, so a token's numbers do not depend on the batch or on the threads.
#pragma once

#include <algorithm>

#include "simd.h"
#include "slice.h"

namespace loadout {

constexpr int LORA_MAX_TARGETS = 8;  // of one group

// Some tokens of one slot, which share one read of A and B: tokens[first : first + count].
struct LoraItem {
  int32_t first, count, slot, nothing;
};

struct LoraPlan {
  const LoraItem* items;
  const int32_t* num_items;
  const int32_t* tokens;  // which row of x and out; all items' tokens, one item after the other
  int64_t max_tokens;
};

struct LoraArgs {
  LoraPlan plan;
  const void* arena;
  const int32_t* rows;  // [max_loras, 4, table_targets]: granules of A and B, rank, bits of scale
  int64_t table_targets;
  int64_t num_targets;  // of the group; the first ones below
  int32_t targets[LORA_MAX_TARGETS];
  int32_t columns[LORA_MAX_TARGETS];  // first column of out
  int32_t widths[LORA_MAX_TARGETS];   // number of columns
  const void* x;                      // [T, x_stride]; not for an embedding
  int64_t x_stride;
  int64_t in_features;
  const int64_t* token_ids;  // [T]; for an embedding
  void* y;                   // [num_targets, max_tokens, max_rank], max_rank even
  int64_t max_rank;
  void* out;  // [T, out_stride]
  int64_t out_stride;
};

constexpr int64_t GRANULE_BYTES = 256;
constexpr int LINE_BYTES = 64;

// One target of one adapter. Rank 0: the adapter does not have it.
template <typename T>
struct LoraPlace {
  const T* a = nullptr;
  const T* b = nullptr;
  int rank = 0;
  float scale = 0;

  LoraPlace() = default;
  LoraPlace(const LoraArgs& args, int slot, int64_t k) {
    const int64_t step = args.table_targets;
    const int32_t* row = args.rows + slot * 4 * step + args.targets[k];
    const char* arena = static_cast<const char*>(args.arena);
    a = reinterpret_cast<const T*>(arena + row[0] * GRANULE_BYTES);
    b = reinterpret_cast<const T*>(arena + row[step] * GRANULE_BYTES);
    rank = row[2 * step];
    std::memcpy(&scale, row + 3 * step, sizeof scale);
  }
};

// y of an item and target is [count, y_step] at y_of: dense, so that it stays in the first cache.
inline int y_step(int rank) { return (rank + 1) & ~1; }

template <typename T>
T* y_of(const LoraArgs& args, const LoraItem& item, int64_t k) {
  return static_cast<T*>(args.y) + (k * args.plan.max_tokens + item.first) * args.max_rank;
}

// What a thread takes at once: one target of one item, in part (ranks of A or columns of B).
template <typename T>
struct LoraPart {
  const LoraItem* item = nullptr;  // null: no work is left
  int64_t k = 0;
  LoraPlace<T> place;
  int64_t begin = 0, end = 0;
};

// Calls run(part, next) for each part that this thread takes. One is taken ahead, so that its
// weights are under way when it begins.
template <typename T, typename Take, typename Run>
void for_lora_parts(Take take, Run run) {
  LoraPart<T> part = take();
  while (part.item) {
    const LoraPart<T> next = take();
    run(part, next);
    part = next;
  }
}

}  // namespace loadout
