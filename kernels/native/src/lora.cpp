// LoRA straight from the arena: out[t, columns of k] += scale * (x[t] @ A_k.T) @ B_k.
//
// Two operations, because the second product needs all of the first: shrink (or, for an embedding,
// gather) writes y, expand reads it. A sum is made of the same terms in the same order however the
// work is tiled and shared, so a token's numbers do not depend on the batch or on the threads.
#include <algorithm>

#include "simd.h"
#include "slice.h"

namespace loadout {

constexpr int LORA_MAX_TARGETS = 8;  // of one group
constexpr int LORA_MAX_RANK = 256;  // of adapters whose B is packed for long items; others are only slower

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
  const int32_t* rows;  // [max_loras, 4, table_targets]: granule of A and B, rank, bits of the scale
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

namespace {

constexpr int64_t GRANULE_BYTES = 256;

// One target of one adapter. Rank 0: the adapter does not have it.
template <typename T>
struct Place {
  const T* a;
  const T* b;
  int rank;
  float scale;

  Place(const LoraArgs& args, int slot, int64_t k) {
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

// ---- Shrink: dot products. The lanes of a chunk are summed apart, chunk after chunk, then added.

template <typename T>
struct Dot;

template <>
struct Dot<float> {
  using Chunk = VF;
  static constexpr int SIZE = VF_WIDTH;
  static Chunk load(const float* p) { return vload(p); }
  static VF add(VF sum, Chunk x, Chunk a) { return vfma(x, a, sum); }
};

#if defined(__AVX512BF16__)
template <>
struct Dot<bf16> {
  using Chunk = __m512i;
  static constexpr int SIZE = 32;
  static Chunk load(const bf16* p) { return _mm512_loadu_si512(p); }
  static VF add(VF sum, Chunk x, Chunk a) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)a);
  }
};
#else
// A float's upper half is the bf16 itself: two of them in 32 bits widen without a shuffle.
template <>
struct Dot<bf16> {
  struct Chunk {
    VF low, high;
  };
  static constexpr int SIZE = 2 * VF_WIDTH;
#if defined(__AVX512F__)
  static Chunk load(const bf16* p) {
    const __m512i pairs = _mm512_loadu_si512(p);
    const __m512i high = _mm512_and_si512(pairs, _mm512_set1_epi32(-65536));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)), _mm512_castsi512_ps(high)};
  }
#else
  static Chunk load(const bf16* p) {
    const __m256i pairs = _mm256_loadu_si256((const __m256i*)p);
    const __m256i high = _mm256_and_si256(pairs, _mm256_set1_epi32(-65536));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)), _mm256_castsi256_ps(high)};
  }
#endif
  static VF add(VF sum, Chunk x, Chunk a) {
    return vfma(x.high, a.high, vfma(x.low, a.low, sum));
  }
};
#endif

template <typename T>
typename Dot<T>::Chunk load_tail(const T* p, int n) {
  T lanes[Dot<T>::SIZE] = {};
  std::memcpy(lanes, p, n * sizeof(T));
  return Dot<T>::load(lanes);
}

#if defined(__AVX512F__)
constexpr int DOT_TOKENS = 3, DOT_RANKS = 8;  // 24 sums in 32 registers
#else
constexpr int DOT_TOKENS = 2, DOT_RANKS = 4;  // 8 sums in 16 registers
#endif

// y[m][r] = x[m] . a[r] for M tokens and R rows of A.
template <typename T, int M, int R>
void dot_block(const T* const* x, const T* a, int64_t in, T* y, int step) {
  using D = Dot<T>;
  VF sums[M][R];
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < R; ++r) sums[m][r] = vzero();
  int64_t i = 0;
  for (; i + D::SIZE <= in; i += D::SIZE) {
    typename D::Chunk chunks[M];
    for (int m = 0; m < M; ++m) chunks[m] = D::load(x[m] + i);
    for (int r = 0; r < R; ++r) {
      const auto chunk = D::load(a + r * in + i);
      for (int m = 0; m < M; ++m) sums[m][r] = D::add(sums[m][r], chunks[m], chunk);
    }
  }
  if (const int n = static_cast<int>(in - i)) {
    typename D::Chunk chunks[M];
    for (int m = 0; m < M; ++m) chunks[m] = load_tail(x[m] + i, n);
    for (int r = 0; r < R; ++r) {
      const auto chunk = load_tail(a + r * in + i, n);
      for (int m = 0; m < M; ++m) sums[m][r] = D::add(sums[m][r], chunks[m], chunk);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < R; ++r) y[m * step + r] = from_float<T>(reduce_add(sums[m][r]));
}

template <typename T, int R>
void dot_tokens(const T* x, int64_t x_stride, const int32_t* tokens, int count, const T* a,
                int64_t in, T* y, int step) {
  const T* rows[DOT_TOKENS];
  for (int t = 0; t < count;) {
    const int m = std::min(DOT_TOKENS, count - t);
    for (int i = 0; i < m; ++i) rows[i] = x + tokens[t + i] * x_stride;
    T* part = y + static_cast<int64_t>(t) * step;
    if (m == 1) dot_block<T, 1, R>(rows, a, in, part, step);
    else if (m == 2) dot_block<T, 2, R>(rows, a, in, part, step);
    else dot_block<T, DOT_TOKENS, R>(rows, a, in, part, step);
    t += m;
  }
}

// Rows [r, end) of A, as many at once as there are left.
template <typename T, int R>
void dot_ranks(const LoraArgs& args, const int32_t* tokens, int count, const T* a, int r, int end,
               T* y, int step) {
  const int64_t in = args.in_features;
  for (; end - r >= R; r += R)
    dot_tokens<T, R>(static_cast<const T*>(args.x), args.x_stride, tokens, count, a + r * in, in,
                     y + r, step);
  if constexpr (R > 1)
    if (r < end) dot_ranks<T, R / 2>(args, tokens, count, a, r, end, y, step);
}

// ---- Expand: rows of B times numbers of y, STEP ranks at once, COLUMNS columns in registers.

#if defined(__AVX512F__)
constexpr int VECTORS = 4, MAX_ROWS = 6;  // 24 sums, 4 of B, in 32 registers
#else
constexpr int VECTORS = 2, MAX_ROWS = 4;  // 8 sums, 2 of B, in 16 registers
#endif
constexpr int COLUMNS = VECTORS * VF_WIDTH;

template <typename T>
struct Axpy {
  using Vector = VF;
  static constexpr int STEP = 1;
  static void load(const T* b, int64_t, int, Vector* out) {
    for (int v = 0; v < VECTORS; ++v) out[v] = vload(b + v * VF_WIDTH);
  }
  static Vector number(const T* y) { return vset1(to_float(*y)); }
  static VF add(VF sum, Vector y, Vector b) { return vfma(y, b, sum); }
  static void in_order(VF*) {}
};

#if defined(__AVX512BF16__)
template <>
struct Axpy<bf16> {
  using Vector = __m512i;  // two ranks of each of 16 columns
  static constexpr int STEP = 2;
  static void load(const bf16* b, int64_t width, int ranks, Vector* out) {
    for (int v = 0; v < VECTORS; v += 2) {
      const bf16* p = b + v * VF_WIDTH;
      const __m512i even = _mm512_loadu_si512(p);
      const __m512i odd = ranks > 1 ? _mm512_loadu_si512(p + width) : _mm512_setzero_si512();
      out[v] = _mm512_unpacklo_epi16(even, odd);
      out[v + 1] = _mm512_unpackhi_epi16(even, odd);
    }
  }
  static Vector number(const bf16* y) {
    int32_t pair;
    std::memcpy(&pair, y, sizeof pair);
    return _mm512_set1_epi32(pair);
  }
  static VF add(VF sum, Vector y, Vector b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)y, (__m512bh)b);
  }
  // `load` leaves 32 columns in two vectors by quarters: 0 2 4 6 and 1 3 5 7.
  static void in_order(VF* sums) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int v = 0; v < VECTORS; v += 2) {
      const VF low = sums[v], high = sums[v + 1];
      sums[v] = _mm512_permutex2var_ps(low, first, high);
      sums[v + 1] = _mm512_permutex2var_ps(low, second, high);
    }
  }
};
#endif

// STEP ranks of COLUMNS columns of B, of which n are there.
template <typename T>
void load_columns(const T* b, int64_t width, int ranks, int n, typename Axpy<T>::Vector* out) {
  if (n == COLUMNS) return Axpy<T>::load(b, width, ranks, out);
  T lanes[2][COLUMNS] = {};
  for (int r = 0; r < std::min(ranks, Axpy<T>::STEP); ++r)
    std::memcpy(lanes[r], b + r * width, n * sizeof(T));
  Axpy<T>::load(lanes[0], COLUMNS, ranks, out);
}

// out[m][0 : n] += scale * (y[m] @ B) for M tokens. `packed` is B as load_columns makes it, or null.
template <typename T, typename Out, int M>
void axpy_block(Out* const* out, const T* y, int step, const Place<T>& place, int64_t width,
                const T* b, const typename Axpy<T>::Vector (*packed)[VECTORS], int n) {
  using X = Axpy<T>;
  VF sums[M][VECTORS];
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < VECTORS; ++v) sums[m][v] = vzero();
  for (int r = 0; r < place.rank; r += X::STEP) {
    typename X::Vector vectors[VECTORS];
    if (packed) {
      for (int v = 0; v < VECTORS; ++v) vectors[v] = packed[r / X::STEP][v];
    } else {
      load_columns<T>(b + r * width, width, place.rank - r, n, vectors);
    }
    for (int m = 0; m < M; ++m) {
      const auto number = X::number(y + m * step + r);
      for (int v = 0; v < VECTORS; ++v) sums[m][v] = X::add(sums[m][v], number, vectors[v]);
    }
  }
  const VF scale = vset1(place.scale);
  for (int m = 0; m < M; ++m) {
    X::in_order(sums[m]);
    for (int v = 0; v < VECTORS; ++v) {
      Out* p = out[m] + v * VF_WIDTH;
      const int lanes = n - v * VF_WIDTH;
      if (lanes >= VF_WIDTH) vstore(p, vfma(scale, sums[m][v], vload(p)));
      else if (lanes > 0) vstore(p, vfma(scale, sums[m][v], vload(p, lanes)), lanes);
    }
  }
}

template <typename T, typename Out, int M>
int axpy_rows(Out* const* out, const T* y, int step, const Place<T>& place, int64_t width,
              const T* b, const typename Axpy<T>::Vector (*packed)[VECTORS], int n, int count) {
  if constexpr (M > 1)
    if (count < M) return axpy_rows<T, Out, M - 1>(out, y, step, place, width, b, packed, n, count);
  axpy_block<T, Out, M>(out, y, step, place, width, b, packed, n);
  return M;
}

// Columns [begin, end) of one target for one item.
template <typename T, typename Out>
void expand_columns(const LoraArgs& args, const LoraItem& item, int64_t k, const Place<T>& place,
                    int64_t begin, int64_t end) {
  using X = Axpy<T>;
  alignas(64) typename X::Vector packed[LORA_MAX_RANK / X::STEP][VECTORS];
  const int32_t* tokens = args.plan.tokens + item.first;
  const int64_t width = args.widths[k];
  const int step = y_step(place.rank);
  const T* y = y_of<T>(args, item, k);
  const bool packs = item.count > MAX_ROWS && place.rank <= LORA_MAX_RANK;
  for (int64_t column = begin; column < end; column += COLUMNS) {
    const int n = static_cast<int>(std::min<int64_t>(COLUMNS, end - column));
    const T* b = place.b + column;
    if (packs)
      for (int r = 0; r < place.rank; r += X::STEP)
        load_columns<T>(b + r * width, width, place.rank - r, n, packed[r / X::STEP]);
    Out* first = static_cast<Out*>(args.out) + args.columns[k] + column;
    for (int t = 0; t < item.count;) {
      Out* rows[MAX_ROWS];
      const int m = std::min(MAX_ROWS, item.count - t);
      for (int i = 0; i < m; ++i) rows[i] = first + tokens[t + i] * args.out_stride;
      t += axpy_rows<T, Out, MAX_ROWS>(rows, y + static_cast<int64_t>(t) * step, step, place,
                                       width, b, packs ? packed : nullptr, n, m);
    }
  }
}

// Parts are as large as lets the threads finish together: about 8 for each of them.
inline int64_t part_size(int64_t total, int num_threads, int64_t least, int64_t most) {
  const int64_t even = total / (8 * num_threads) / least * least;
  return std::max(least, std::min(even, most));
}

}  // namespace

// y = x @ A.T of every item and target.
template <typename T>
void lora_shrink(const LoraArgs& args, const Slice& slice) {
  const int64_t num_items = *args.plan.num_items;
  // Ranks are not known before the table is read: counted as one block each.
  const bool is_split = num_items * args.num_targets < 8 * slice.num_threads;
  const int part = is_split ? DOT_RANKS / 2 : static_cast<int>(args.max_rank);
  const int64_t parts = (args.max_rank + part - 1) / part;
  const int64_t count = num_items * args.num_targets * parts;
  for (int64_t unit = slice.take(); unit < count; unit = slice.take()) {
    const LoraItem& item = args.plan.items[unit / parts / args.num_targets];
    const int64_t k = unit / parts % args.num_targets;
    const Place<T> place(args, item.slot, k);
    const int begin = static_cast<int>(unit % parts) * part;
    if (begin >= place.rank) continue;
    const int end = std::min(begin + part, place.rank);
    const int step = y_step(place.rank);
    T* y = y_of<T>(args, item, k);
    dot_ranks<T, DOT_RANKS>(args, args.plan.tokens + item.first, item.count, place.a, begin, end, y,
                            step);
    if (end == place.rank && end < step)
      for (int t = 0; t < item.count; ++t) y[t * step + end] = from_float<T>(0);
  }
}

// y = A[token_ids] of every item: the shrunk rows of an embedding are rows of A.
template <typename T>
void lora_gather(const LoraArgs& args, const Slice& slice) {
  const auto mine = slice.range(*args.plan.num_items);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const LoraItem& item = args.plan.items[i];
    const Place<T> place(args, item.slot, 0);
    const int step = y_step(place.rank);
    T* y = y_of<T>(args, item, 0);
    for (int t = 0; t < item.count; ++t, y += step) {
      const int64_t token = args.token_ids[args.plan.tokens[item.first + t]];
      std::memcpy(y, place.a + token * place.rank, place.rank * sizeof(T));
      if (place.rank < step) y[place.rank] = from_float<T>(0);
    }
  }
}

// out += scale * y @ B of every item and target.
template <typename T, typename Out>
void lora_expand(const LoraArgs& args, const Slice& slice) {
  const int64_t num_items = *args.plan.num_items;
  int64_t total = 0;
  for (int64_t k = 0; k < args.num_targets; ++k) total += args.widths[k];
  const int64_t part = part_size(num_items * total, slice.num_threads, 2 * COLUMNS, 4096);
  int64_t parts = 0;  // of one item
  for (int64_t k = 0; k < args.num_targets; ++k) parts += (args.widths[k] + part - 1) / part;
  const int64_t count = num_items * parts;
  for (int64_t unit = slice.take(); unit < count; unit = slice.take()) {
    const LoraItem& item = args.plan.items[unit / parts];
    int64_t k = 0, index = unit % parts;
    for (; index * part >= args.widths[k]; ++k) index -= (args.widths[k] + part - 1) / part;
    const Place<T> place(args, item.slot, k);
    if (place.rank == 0) continue;
    const int64_t end = std::min<int64_t>((index + 1) * part, args.widths[k]);
    expand_columns<T, Out>(args, item, k, place, index * part, end);
  }
}

}  // namespace loadout

LOADOUT_EXPORT(lora_shrink_float, loadout::LoraArgs, loadout::lora_shrink<float>)
LOADOUT_EXPORT(lora_shrink_bf16, loadout::LoraArgs, loadout::lora_shrink<loadout::bf16>)
LOADOUT_EXPORT(lora_gather_float, loadout::LoraArgs, loadout::lora_gather<float>)
LOADOUT_EXPORT(lora_gather_bf16, loadout::LoraArgs, loadout::lora_gather<loadout::bf16>)
LOADOUT_EXPORT(lora_expand_float, loadout::LoraArgs, (loadout::lora_expand<float, float>))
LOADOUT_EXPORT(lora_expand_bf16, loadout::LoraArgs,
               (loadout::lora_expand<loadout::bf16, loadout::bf16>))
LOADOUT_EXPORT(lora_expand_bf16_to_float, loadout::LoraArgs,
               (loadout::lora_expand<loadout::bf16, float>))
