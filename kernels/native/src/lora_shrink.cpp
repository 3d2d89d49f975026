// The first product, y = x @ A.T: dot products. The lanes of a chunk are summed apart, chunk after
// chunk, then added.
#include <type_traits>

#include "dots.h"
#include "lora.h"
#include "lora_shrink_tiles.h"

namespace loadout {

namespace {

// y[m][r] = x[m] . a[r] for M tokens and R rows of A. `next`: R rows that are wanted soon, or null.
template <typename T, typename W, int M, int R, bool FETCHES>
void dot_block(const T* const* x, const W* a, int64_t in, T* y, int step, const W* next) {
  constexpr int SIZE = Dot<T>::SIZE;
  VF sums[M][R];
  LOADOUT_UNROLL for (int m = 0; m < M; ++m)
    LOADOUT_UNROLL for (int r = 0; r < R; ++r) sums[m][r] = vzero();
  int64_t i = 0;
  for (; i + SIZE <= in; i += SIZE) {
    dot_chunk<T>(x, a, in, i, sums, [](const auto* p) { return Dot<T>::load(p); });
    if constexpr (FETCHES)
      LOADOUT_UNROLL for (int r = 0; r < R; ++r) _mm_prefetch(next + r * in + i, _MM_HINT_T1);
  }
  if (const int n = static_cast<int>(in - i))
    dot_chunk<T>(x, a, in, i, sums, [n](const auto* p) { return load_tail<T>(p, n); });
  LOADOUT_UNROLL for (int m = 0; m < M; ++m) store_sums(sums[m], y + m * step);
}

template <typename T, typename W, int R>
void dot_tokens(const LoraArgs& args, const LoraItem& item, const W* a, T* y, int step,
                const W* next) {
  const int64_t in = args.in_features;
  const int32_t* tokens = args.plan.tokens + item.first;
  for (int t = 0; t < item.count;) {
    const T* x[DOT_TOKENS];
    const int m = std::min(DOT_TOKENS, item.count - t);
    for (int i = 0; i < m; ++i)
      x[i] = static_cast<const T*>(args.x) + tokens[t + i] * args.x_stride;
    T* part = y + static_cast<int64_t>(t) * step;
    if (t == 0 && m == 1) dot_block<T, W, 1, R, true>(x, a, in, part, step, next);
    else if (t == 0 && m == 2) dot_block<T, W, 2, R, true>(x, a, in, part, step, next);
    else if (t == 0) dot_block<T, W, DOT_TOKENS, R, true>(x, a, in, part, step, next);
    else if (m == 1) dot_block<T, W, 1, R, false>(x, a, in, part, step, nullptr);
    else if (m == 2) dot_block<T, W, 2, R, false>(x, a, in, part, step, nullptr);
    else dot_block<T, W, DOT_TOKENS, R, false>(x, a, in, part, step, nullptr);
    t += m;
  }
}

constexpr int64_t CONVERTED_BYTES = 256 << 10;  // of a thread's stack

template <typename T, typename W>
T converted(W x) {
  if constexpr (std::is_same_v<T, W>) return x;
  else return from_float<T>(to_float(x));
}

// out[i] = values[i]; all are exact.
template <typename T>
void convert(const e4m3* values, int64_t count, T* out) {
  int64_t i = 0;
  for (; i + VF_WIDTH <= count; i += VF_WIDTH) vstore(out + i, vload(values + i));
  for (; i < count; ++i) out[i] = converted<T>(values[i]);
}

// As `dot_tokens`. Rows that many tokens are multiplied with are converted once.
template <typename T, typename W, int R>
void dot_rows(const LoraArgs& args, const LoraItem& item, const W* a, T* y, int step,
              const W* next) {
  if constexpr (!std::is_same_v<T, W>) {
    constexpr int64_t ROOM = CONVERTED_BYTES / sizeof(T);
    if (item.count > 2 * DOT_TOKENS && R * args.in_features <= ROOM) {
      alignas(64) T rows[ROOM];
      convert(a, R * args.in_features, rows);
      return dot_tokens<T, T, R>(args, item, rows, y, step, rows);
    }
  }
  dot_tokens<T, W, R>(args, item, a, y, step, next);
}

// Rows [r, end) of A, as many at once as there are left; after them come those at `next`.
template <typename T, typename W, int R>
void dot_ranks(const LoraArgs& args, const LoraItem& item, const W* a, int64_t r, int64_t end, T* y,
               int step, const W* next) {
  const int64_t in = args.in_features;
  for (; end - r >= R; r += R)
    dot_rows<T, W, R>(args, item, a + r * in, y + r, step, r + R < end ? a + (r + R) * in : next);
  if constexpr (R > 1)
    if (r < end) dot_ranks<T, W, R / 2>(args, item, a, r, end, y, step, next);
}

// Products by vectors. Tiles may stand in for them.
template <typename T>
struct VectorShrink {
  template <typename W>
  void run(const LoraArgs& args, const LoraItem& item, const W* a, int64_t begin, int64_t end, T* y,
           int step, const W* next) {
    dot_ranks<T, W, DOT_RANKS>(args, item, a, begin, end, y, step, next);
  }
};

template <typename T>
struct ShrinkOf {
  using Type = VectorShrink<T>;
};
#if defined(__AMX_BF16__)
template <>
struct ShrinkOf<bf16> {
  using Type = TileShrink;
};
#endif

}  // namespace

// y = x @ A.T of every item and target.
template <typename T, typename W, bool EXPERTS>
void lora_shrink(const LoraArgs& args, const Slice& slice) {
  const int64_t num_items = *args.plan.num_items, num_targets = args.num_targets;
  // Few parts are split into ranks; how many there are is not known before the table is read.
  const int64_t whole = num_items * num_targets;
  const int64_t size = whole >= 8 * slice.num_threads   ? args.max_rank
                       : 2 * whole >= slice.num_threads ? DOT_RANKS
                                                        : DOT_RANKS / 2;
  const int64_t splits = (args.max_rank + size - 1) / size;
  const auto take = [&] {
    LoraPart<T, W> part;
    for (int64_t i; (i = slice.take()) < whole * splits;) {
      const LoraItem& item = args.plan.items[i / splits / num_targets];
      part.k = i / splits % num_targets;
      part.place = LoraPlace<W>::template of<LoraSide::A, EXPERTS>(args, item, part.k);
      part.begin = i % splits * size;
      part.end = std::min<int64_t>(part.begin + size, part.place.rank);
      if (part.begin >= part.end) continue;
      part.item = &item;
      break;
    }
    return part;
  };
  using Part = LoraPart<T, W>;
  typename ShrinkOf<T>::Type product;
  for_lora_parts<T, W>(take, [&](const Part& part, const Part& next) {
    const LoraPlace<W>& place = part.place;
    const int step = y_step(place.rank);
    T* y = y_of<T>(args, *part.item, part.k);
    const W* next_a = next.item ? next.place.values + next.begin * args.in_features : place.values;
    product.run(args, *part.item, place.values, part.begin, part.end, y, step, next_a);
    if (part.end == place.rank && place.rank < step)
      for (int t = 0; t < part.item->count; ++t) y[t * step + place.rank] = from_float<T>(0);
  });
}

// y = A[token_ids] of every item: the shrunk rows of an embedding are rows of A.
template <typename T, typename W>
void lora_gather(const LoraArgs& args, const Slice& slice) {
  const auto mine = slice.range(*args.plan.num_items);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const LoraItem& item = args.plan.items[i];
    const auto place = LoraPlace<W>::template of<LoraSide::A, false>(args, item, 0);
    const int step = y_step(place.rank);
    T* y = y_of<T>(args, item, 0);
    for (int t = 0; t < item.count; ++t, y += step) {
      const int64_t token = args.token_ids[args.plan.tokens[item.first + t]];
      const W* row = place.values + token * place.rank;
      for (int r = 0; r < place.rank; ++r) y[r] = converted<T>(row[r]);
      if (place.rank < step) y[place.rank] = from_float<T>(0);
    }
  }
}

}  // namespace loadout

LOADOUT_EXPORT(lora_shrink_float, loadout::LoraArgs, (loadout::lora_shrink<float, float, false>))
LOADOUT_EXPORT(lora_shrink_bf16, loadout::LoraArgs,
               (loadout::lora_shrink<loadout::bf16, loadout::bf16, false>))
LOADOUT_EXPORT(lora_shrink_experts_float, loadout::LoraArgs,
               (loadout::lora_shrink<float, float, true>))
LOADOUT_EXPORT(lora_shrink_experts_bf16, loadout::LoraArgs,
               (loadout::lora_shrink<loadout::bf16, loadout::bf16, true>))
LOADOUT_EXPORT(lora_gather_float, loadout::LoraArgs, (loadout::lora_gather<float, float>))
LOADOUT_EXPORT(lora_gather_bf16, loadout::LoraArgs,
               (loadout::lora_gather<loadout::bf16, loadout::bf16>))
LOADOUT_EXPORT(lora_shrink_float8_float, loadout::LoraArgs,
               (loadout::lora_shrink<float, loadout::e4m3, false>))
LOADOUT_EXPORT(lora_shrink_float8_bf16, loadout::LoraArgs,
               (loadout::lora_shrink<loadout::bf16, loadout::e4m3, false>))
LOADOUT_EXPORT(lora_shrink_experts_float8_float, loadout::LoraArgs,
               (loadout::lora_shrink<float, loadout::e4m3, true>))
LOADOUT_EXPORT(lora_shrink_experts_float8_bf16, loadout::LoraArgs,
               (loadout::lora_shrink<loadout::bf16, loadout::e4m3, true>))
LOADOUT_EXPORT(lora_gather_float8_float, loadout::LoraArgs,
               (loadout::lora_gather<float, loadout::e4m3>))
LOADOUT_EXPORT(lora_gather_float8_bf16, loadout::LoraArgs,
               (loadout::lora_gather<loadout::bf16, loadout::e4m3>))
