// The LoRA plan of a mixture: which pairs of a token and an expert use which adapter. It follows
// from the routing, so it is made within a step, of every layer anew.
#include "lora.h"

namespace loadout {

constexpr int32_t TILE_TOKENS = 64;  // of one item, as in kernels/lora/plan.py

struct LoraPairsArgs {
  const int32_t* token_slots;  // [T]
  const int64_t* tokens;       // [P]: the token of each pair; pairs are in the order of experts
  const int32_t* starts;       // [num_experts + 1]
  LoraItem* items;
  int32_t* num_items;
  int32_t* order;           // [P, times the parts of mixes]: the plan's tokens, which are pairs
  int64_t* keys;            // [P]
  const int32_t* num_parts;  // [slots of mixes], or null: there are no mixes
  int64_t num_experts;
  int64_t max_loras;  // slots from here on are those of mixes
};

void lora_pairs(const LoraPairsArgs& args, const Slice& slice) {
  if (slice.take() != 0) return;  // one thread: a step has few pairs
  int32_t num_items = 0, end = 0;
  for (int64_t expert = 0; expert < args.num_experts; ++expert) {
    int64_t count = 0;
    for (int32_t pair = args.starts[expert]; pair < args.starts[expert + 1]; ++pair) {
      const int64_t slot = args.token_slots[args.tokens[pair]];
      if (slot >= 0) args.keys[count++] = slot << 32 | pair;
    }
    std::sort(args.keys, args.keys + count);
    for (int64_t first = 0, next; first < count; first = next) {
      const int32_t slot = static_cast<int32_t>(args.keys[first] >> 32);
      for (next = first; next < count && next - first < TILE_TOKENS; ++next)
        if (args.keys[next] >> 32 != slot) break;
      const bool is_mix = args.num_parts && slot >= args.max_loras;
      const int32_t parts = is_mix ? args.num_parts[slot - args.max_loras] : 1;
      for (int32_t part = 0; part < parts; ++part) {
        const int32_t size = static_cast<int32_t>(next - first);
        args.items[num_items++] = {end, size, slot + part, static_cast<int32_t>(expert),
                                   part ? -1 : parts - 1};
        for (int64_t i = first; i < next; ++i) args.order[end++] = static_cast<int32_t>(args.keys[i]);
      }
    }
  }
  *args.num_items = num_items;
}

}  // namespace loadout

LOADOUT_EXPORT(lora_pairs, loadout::LoraPairsArgs, loadout::lora_pairs)
