// What the LoRA operations share. Straight from the arena:
//
//     out[t, columns of k] += scale * (x[t] @ A_k.T) @ B_k
//
// and, where an adapter has vectors over the outputs, what the definition says of these.
//
// Two operations, because the second product needs all of the first: shrink (or, for an embedding,
// gather) writes y, expand reads it. A sum is made of the same terms in the same order however the
// work is tiled and shared, so a token's numbers do not depend on the batch or on the threads.
//
// Each has a rank of its own: shrink and gather write as many numbers of a token as A has ranks,
// expand reads as many as B has. Where devices share the first product A has a part of the ranks,
// and what the devices have written, one part after the other, is what expand reads.
//
// A and B are of a type W: the model's, T, or float8, which is converted in registers.
//
// With EXPERTS targets are mixtures: A and B are segments of an image, which begin with an index,
// and the plan's tokens are pairs of a token and an expert.
#pragma once

#include <algorithm>

#include "e4m3.h"
#include "simd.h"
#include "slice.h"

namespace loadout {

constexpr int LORA_MAX_TARGETS = 8;  // of one group

// Some tokens of one slot, which share one read of A and B: tokens[first : first + count]. Only
// plans of mixtures of experts have experts. `followers` says how many of the next items have the
// same tokens, and are summed with this one: parts of a mix of adapters, each of which says -1.
struct LoraItem {
  int32_t first, count, slot, expert, followers;
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
  // [max_loras, LORA_FIELDS, table_targets]: granules of A and B, ranks of A and B, bits of scale,
  // and one more than the granule of magnitude, bias and base bias, 0 where there is none
  const int32_t* rows;
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
  const float* base_bias;  // what out has of the base's bias, [out_stride], or null
};

constexpr int LORA_FIELDS = 8;
constexpr int64_t GRANULE_BYTES = 256;
constexpr int LINE_BYTES = 64;

// What the index of a segment says of one expert.
struct LoraIndex {
  int32_t granule;  // from the segment's start
  int32_t rank, scale_bits, nothing;
};

enum class LoraSide { A, B };

// A or B of one target of one adapter, of the model's type or float8. Rank 0: there is nothing of it
// here. Only B has a scale.
template <typename W>
struct LoraPlace {
  const W* values = nullptr;
  int rank = 0;
  float scale = 0;

  template <LoraSide SIDE, bool EXPERTS>
  static LoraPlace of(const LoraArgs& args, const LoraItem& item, int64_t k) {
    constexpr int side = SIDE == LoraSide::B;
    const int64_t step = args.table_targets;
    const int32_t* row = args.rows + int64_t{item.slot} * LORA_FIELDS * step + args.targets[k];
    const char* values = static_cast<const char*>(args.arena) + row[side * step] * GRANULE_BYTES;
    LoraPlace place;
    place.rank = row[(2 + side) * step];
    if constexpr (SIDE == LoraSide::B) place.scale = from_bits(row[4 * step]);
    if constexpr (EXPERTS) {
      if (place.rank == 0) return place;  // nor is there a segment
      const LoraIndex& index = reinterpret_cast<const LoraIndex*>(values)[item.expert];
      values += index.granule * GRANULE_BYTES;
      place.rank = index.rank;
      if constexpr (SIDE == LoraSide::B) place.scale *= from_bits(index.scale_bits);
    }
    place.values = reinterpret_cast<const W*>(values);
    return place;
  }

 private:
  static float from_bits(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
};

// What one adapter has over the outputs of one target; null: nothing of the kind.
template <typename T>
struct LoraVectors {
  const float* magnitude = nullptr;
  const float* bias = nullptr;
  const T* base_bias = nullptr;

  static LoraVectors of(const LoraArgs& args, const LoraItem& item, int64_t k) {
    const int64_t step = args.table_targets;
    const int32_t* row =
        args.rows + (int64_t{item.slot} * LORA_FIELDS + 5) * step + args.targets[k];
    const char* arena = static_cast<const char*>(args.arena) - GRANULE_BYTES;
    const auto at = [&](int field) {
      const int64_t granule = row[field * step];
      return granule ? arena + granule * GRANULE_BYTES : nullptr;
    };
    return {reinterpret_cast<const float*>(at(0)), reinterpret_cast<const float*>(at(1)),
            reinterpret_cast<const T*>(at(2))};
  }

  explicit operator bool() const { return magnitude || bias || base_bias; }
};

// y of an item and target is [count, y_step] at y_of, of A's rank when it is written and of B's when
// it is read: dense, so that it stays in the first cache. An odd rank is followed by a 0.
inline int y_step(int rank) { return (rank + 1) & ~1; }

template <typename T>
T* y_of(const LoraArgs& args, const LoraItem& item, int64_t k) {
  return static_cast<T*>(args.y) + (k * args.plan.max_tokens + item.first) * args.max_rank;
}

// What a thread takes at once: one target of one item, in part (ranks of A or columns of B).
template <typename T, typename W>
struct LoraPart {
  const LoraItem* item = nullptr;  // null: no work is left
  int64_t k = 0;
  LoraPlace<W> place;
  LoraVectors<T> vectors;  // of expand
  int64_t begin = 0, end = 0;
};

// Calls run(part, next) for each part that this thread takes. One is taken ahead, so that its
// weights are under way when it begins.
template <typename T, typename W, typename Take, typename Run>
void for_lora_parts(Take take, Run run) {
  LoraPart<T, W> part = take();
  while (part.item) {
    const LoraPart<T, W> next = take();
    run(part, next);
    part = next;
  }
}

}  // namespace loadout
