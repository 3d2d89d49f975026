// Weights of the base that adapters have of their own: rows of an embedding or a head, all of it, or
// a norm's. See the definitions, and the table for what lies where.
#include <algorithm>

#include "dots.h"
#include "lora.h"

namespace loadout {

constexpr int WEIGHT_FIELDS = 4;

// [max_loras, WEIGHT_FIELDS, num_weights]: one more than the granule, 0 where there is none, of the
// whole weight, of row ids and of rows; and how many these are.
struct ReplacedWeights {
  const void* arena;
  const int32_t* rows;
  int64_t num_weights;
  int64_t index;

  int32_t field(int slot, int number) const {
    return rows[(int64_t{slot} * WEIGHT_FIELDS + number) * num_weights + index];
  }
  template <typename T>
  const T* values(int slot, int number) const {
    const int64_t granule = field(slot, number);
    if (!granule) return nullptr;
    const char* first = static_cast<const char*>(arena) + (granule - 1) * GRANULE_BYTES;
    return reinterpret_cast<const T*>(first);
  }
};

// out[t] = the weight of a norm for token t: offset + what its adapter has, or the base's.
struct TokenWeightsArgs {
  ReplacedWeights weights;
  const void* base;      // [size], of floats if it is wide
  void* out;             // [T, size], of the same
  const int32_t* slots;  // [T]
  const int32_t* num_tokens;
  int64_t size;
  int64_t is_wide;
  float offset;
};

template <typename T, typename W>
void fill_token_weights(const TokenWeightsArgs& args, const Slice& slice) {
  const VF offset = vset1(args.offset);
  const auto mine = slice.range(*args.num_tokens);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    W* out = static_cast<W*>(args.out) + t * args.size;
    const int slot = args.slots[t];
    const T* own = slot < 0 ? nullptr : args.weights.values<T>(slot, 0);
    if (!own) {
      std::memcpy(out, args.base, args.size * sizeof(W));
      continue;
    }
    for_vectors(args.size, [&](int64_t at, auto lanes) {
      vstore(out + at, vadd(vload(own + at, lanes), offset), lanes);
    });
  }
}

template <typename T>
void token_weights(const TokenWeightsArgs& args, const Slice& slice) {
  if (args.is_wide) fill_token_weights<T, float>(args, slice);
  else fill_token_weights<T, T>(args, slice);
}

// out[t] = the row of t's token id in what its adapter has, where it has that.
struct ReplaceEmbeddingsArgs {
  ReplacedWeights weights;
  void* out;                 // [T, size]
  const int64_t* token_ids;  // [T]
  const int32_t* slots;      // [T]
  const int32_t* num_tokens;
  int64_t size;
};

template <typename T>
void replace_embeddings(const ReplaceEmbeddingsArgs& args, const Slice& slice) {
  const auto mine = slice.range(*args.num_tokens);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const int slot = args.slots[t];
    if (slot < 0) continue;
    int64_t place = args.token_ids[t];
    const T* rows = args.weights.values<T>(slot, 0);
    if (const int num_rows = args.weights.field(slot, 3)) {
      const int32_t* ids = args.weights.values<int32_t>(slot, 1);
      const int32_t* found = std::lower_bound(ids, ids + num_rows, place);
      if (found == ids + num_rows || *found != place) continue;
      place = found - ids;
      rows = args.weights.values<T>(slot, 2);
    }
    if (!rows) continue;
    T* out = static_cast<T*>(args.out) + t * args.size;
    std::memcpy(out, rows + place * args.size, args.size * sizeof(T));
  }
}

// out[t, i] = x[t] . row i of what t's adapter has, plus bias[i], where it has row i. Tokens of one
// item share one read of the rows.
struct ReplaceLogitsArgs {
  ReplacedWeights weights;
  LoraPlan plan;
  const void* x;  // [T, x_stride]
  int64_t x_stride;
  int64_t size;
  void* out;  // [T, out_stride]
  int64_t out_stride;
  int64_t vocab_size;  // the base's: rows of a whole weight
  const float* bias;   // [vocab_size], or null
};

constexpr int64_t ROWS_AT_ONCE = 256;  // of a part that a thread takes

// Dot products of M tokens with R rows, to the columns `ids` (null: from `first` on).
template <typename T, typename Out, int M, int R>
void replace_tile(const T* const* x, const T* rows, int64_t size, Out* const* out,
                  const int32_t* ids, int64_t first, const float* bias) {
  constexpr int SIZE = Dot<T>::SIZE;
  VF sums[M][R];
  LOADOUT_UNROLL for (int m = 0; m < M; ++m)
    LOADOUT_UNROLL for (int r = 0; r < R; ++r) sums[m][r] = vzero();
  int64_t i = 0;
  for (; i + SIZE <= size; i += SIZE) dot_chunk<T>(x, rows, size, i, sums, Dot<T>::template load<T>);
  if (const int n = static_cast<int>(size - i))
    dot_chunk<T>(x, rows, size, i, sums, [n](const T* p) { return load_tail<T>(p, n); });
  LOADOUT_UNROLL for (int m = 0; m < M; ++m) {
    float numbers[VF_WIDTH];
    store_sums(sums[m], numbers);
    for (int r = 0; r < R; ++r) {
      const int64_t place = ids ? ids[r] : first + r;
      out[m][place] = from_float<Out>(numbers[r] + (bias ? bias[place] : 0.0f));
    }
  }
}

template <typename T, typename Out, int R>
void replace_tokens(const ReplaceLogitsArgs& args, const LoraItem& item, const T* rows,
                    const int32_t* ids, int64_t first) {
  const int32_t* tokens = args.plan.tokens + item.first;
  for (int t = 0; t < item.count;) {
    const T* x[DOT_TOKENS];
    Out* out[DOT_TOKENS];
    const int m = std::min(DOT_TOKENS, item.count - t);
    for (int i = 0; i < m; ++i) {
      x[i] = static_cast<const T*>(args.x) + tokens[t + i] * args.x_stride;
      out[i] = static_cast<Out*>(args.out) + tokens[t + i] * args.out_stride;
    }
    if (m == 1) replace_tile<T, Out, 1, R>(x, rows, args.size, out, ids, first, args.bias);
    else if (m == 2) replace_tile<T, Out, 2, R>(x, rows, args.size, out, ids, first, args.bias);
    else replace_tile<T, Out, DOT_TOKENS, R>(x, rows, args.size, out, ids, first, args.bias);
    t += m;
  }
}

template <typename T, typename Out, int R>
void replace_rows(const ReplaceLogitsArgs& args, const LoraItem& item, const T* rows,
                  const int32_t* ids, int64_t row, int64_t end) {
  for (; end - row >= R; row += R)
    replace_tokens<T, Out, R>(args, item, rows + row * args.size, ids ? ids + row : nullptr, row);
  if constexpr (R > 1)
    if (row < end) replace_rows<T, Out, R / 2>(args, item, rows, ids, row, end);
}

template <typename T, typename Out>
void replace_logits(const ReplaceLogitsArgs& args, const Slice& slice) {
  const int64_t num_items = *args.plan.num_items;
  // Items of whole heads have as many parts as there can be; others end with their last row.
  int64_t most = 0;
  for (int64_t i = 0; i < num_items; ++i) {
    const int slot = args.plan.items[i].slot;
    const bool is_whole = args.weights.field(slot, 0) != 0;
    most = std::max<int64_t>(most, is_whole ? args.vocab_size : args.weights.field(slot, 3));
  }
  const int64_t splits = (most + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  for (int64_t part; (part = slice.take()) < num_items * splits;) {
    const LoraItem& item = args.plan.items[part / splits];
    const T* rows = args.weights.values<T>(item.slot, 0);
    int64_t num_rows = rows ? args.vocab_size : 0;
    const int32_t* ids = nullptr;
    if (!rows && (num_rows = args.weights.field(item.slot, 3))) {
      ids = args.weights.values<int32_t>(item.slot, 1);
      rows = args.weights.values<T>(item.slot, 2);
    }
    const int64_t begin = part % splits * ROWS_AT_ONCE;
    const int64_t end = std::min(begin + ROWS_AT_ONCE, num_rows);
    if (begin < end) replace_rows<T, Out, DOT_RANKS>(args, item, rows, ids, begin, end);
  }
}

}  // namespace loadout

LOADOUT_EXPORT(token_weights_float, loadout::TokenWeightsArgs, loadout::token_weights<float>)
LOADOUT_EXPORT(token_weights_bf16, loadout::TokenWeightsArgs, loadout::token_weights<loadout::bf16>)
LOADOUT_EXPORT(replace_embeddings_float, loadout::ReplaceEmbeddingsArgs,
               loadout::replace_embeddings<float>)
LOADOUT_EXPORT(replace_embeddings_bf16, loadout::ReplaceEmbeddingsArgs,
               loadout::replace_embeddings<loadout::bf16>)
LOADOUT_EXPORT(replace_logits_float, loadout::ReplaceLogitsArgs,
               (loadout::replace_logits<float, float>))
LOADOUT_EXPORT(replace_logits_bf16, loadout::ReplaceLogitsArgs,
               (loadout::replace_logits<loadout::bf16, loadout::bf16>))
LOADOUT_EXPORT(replace_logits_bf16_to_float, loadout::ReplaceLogitsArgs,
               (loadout::replace_logits<loadout::bf16, float>))
