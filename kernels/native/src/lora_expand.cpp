// The second product, out += scale * y @ B: rows of B times numbers of y, STEP ranks at once,
// COLUMNS columns in registers.
#include "lora.h"

namespace loadout {

namespace {

constexpr int MAX_PACKED_RANK = 256;  // beyond it B is only slower

constexpr int64_t AHEAD_BYTES = 8 * 1024;  // of B, under way while others are computed with

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
  template <typename W>
  static void load(const W* b, int64_t, int, Vector* out) {
    LOADOUT_UNROLL for (int v = 0; v < VECTORS; ++v) out[v] = vload(b + v * VF_WIDTH);
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
  template <typename W>
  static void load(const W* b, int64_t width, int ranks, Vector* out) {
    LOADOUT_UNROLL for (int v = 0; v < VECTORS; v += 2) {
      const W* p = b + v * VF_WIDTH;
      const __m512i even = load_bf16(p);
      const __m512i odd = ranks > 1 ? load_bf16(p + width) : _mm512_setzero_si512();
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
    LOADOUT_UNROLL for (int v = 0; v < VECTORS; v += 2) {
      const VF low = sums[v], high = sums[v + 1];
      sums[v] = _mm512_permutex2var_ps(low, first, high);
      sums[v + 1] = _mm512_permutex2var_ps(low, second, high);
    }
  }
};
#endif

// Some columns of B, all ranks.
template <typename T, typename W>
struct Columns {
  const W* b;
  int64_t width;
  int rank;

  // Ranks r .. r + STEP.
  void prefetch(int r) const {
    LOADOUT_UNROLL for (int s = 0; s < Axpy<T>::STEP; ++s)
      if (r + s < rank)
        LOADOUT_UNROLL for (int i = 0; i < COLUMNS; i += LINE_BYTES / sizeof(W))
          _mm_prefetch(b + (r + s) * width + i, _MM_HINT_T1);
  }
  // Ranks r .. r + STEP of COLUMNS columns, of which n are there. Inline, by name: what a call
  // returns lies in memory, and a block of columns took 100 ns more.
  __attribute__((always_inline)) void load(int r, int n, typename Axpy<T>::Vector* out) const {
    const W* p = b + r * width;
    if (n == COLUMNS) return Axpy<T>::load(p, width, rank - r, out);
    W lanes[2][COLUMNS] = {};
    for (int s = 0; s < std::min(rank - r, Axpy<T>::STEP); ++s)
      std::memcpy(lanes[s], p + s * width, n * sizeof(W));
    Axpy<T>::load(lanes[0], COLUMNS, rank - r, out);
  }
};

// What becomes of some outputs of the base and of what is added to them: see the definition.
template <typename T>
struct Outputs {
  LoraVectors<T> vectors;  // from the first column on
  const float* base_bias = nullptr;  // as the outputs have it, or null
  bool has_base = true;    // false: the outputs are no more the base's, and products are added

  VF of(VF out, VF product, VF scale, int64_t at, auto lanes) const {
    if (has_base) out = of_base(out, at, lanes);
    if (vectors.magnitude) product = vmul(product, vload(vectors.magnitude + at, lanes));
    out = vfma(scale, product, out);
    return vectors.bias ? vfma(scale, vload(vectors.bias + at, lanes), out) : out;
  }
  VF of_base(VF out, int64_t at, auto lanes) const {
    if (!vectors.magnitude && !vectors.base_bias) return out;
    const VF old = base_bias ? vload(base_bias + at, lanes) : vzero();
    out = vsub(out, old);
    if (vectors.magnitude) out = vmul(out, vload(vectors.magnitude + at, lanes));
    return vadd(out, vectors.base_bias ? vload(vectors.base_bias + at, lanes) : old);
  }
};

// out[m][0 : n] += scale * (y[m] @ B) for M tokens. `packed` is B as `load` makes it, or null.
// `outputs` is for adapters that HAVE vectors: others are compiled without.
template <typename T, typename W, typename Out, bool HAVE, int M>
void axpy_block(Out* const* out, const T* y, int step, float factor, const Columns<T, W>& columns,
                const Columns<T, W>& next, const typename Axpy<T>::Vector (*packed)[VECTORS], int n,
                const Outputs<T>* outputs) {
  using X = Axpy<T>;
  VF sums[M][VECTORS];
  LOADOUT_UNROLL for (int m = 0; m < M; ++m)
    LOADOUT_UNROLL for (int v = 0; v < VECTORS; ++v) sums[m][v] = vzero();
  for (int r = 0; r < columns.rank; r += X::STEP) {
    typename X::Vector vectors[VECTORS];
    if (packed) {
      LOADOUT_UNROLL for (int v = 0; v < VECTORS; ++v) vectors[v] = packed[r / X::STEP][v];
    } else {
      columns.load(r, n, vectors);
      next.prefetch(r);
    }
    LOADOUT_UNROLL for (int m = 0; m < M; ++m) {
      const auto number = X::number(y + m * step + r);
      LOADOUT_UNROLL for (int v = 0; v < VECTORS; ++v)
        sums[m][v] = X::add(sums[m][v], number, vectors[v]);
    }
  }
  const VF scale = vset1(factor);
  LOADOUT_UNROLL for (int m = 0; m < M; ++m) {
    X::in_order(sums[m]);
    if constexpr (HAVE) {
      LOADOUT_UNROLL for (int v = 0; v < VECTORS; ++v) {
        const int at = v * VF_WIDTH;
        if (at >= n) break;
        const auto finish = [&](auto lanes) {
          const VF old = vload(out[m] + at, lanes);
          vstore(out[m] + at, outputs->of(old, sums[m][v], scale, at, lanes), lanes);
        };
        if (n - at >= VF_WIDTH) finish(AllLanes{});
        else finish(n - at);
      }
      continue;
    }
    LOADOUT_UNROLL for (int v = 0; v < VECTORS; ++v) {
      Out* p = out[m] + v * VF_WIDTH;
      const int lanes = n - v * VF_WIDTH;
      if (lanes >= VF_WIDTH) vstore(p, vfma(scale, sums[m][v], vload(p)));
      else if (lanes > 0) vstore(p, vfma(scale, sums[m][v], vload(p, lanes)), lanes);
    }
  }
}

template <typename T, typename W, typename Out, bool HAVE, int M, typename... Args>
void axpy_rows(int count, Args... args) {
  if constexpr (M > 1)
    if (count < M) return axpy_rows<T, W, Out, HAVE, M - 1>(count, args...);
  axpy_block<T, W, Out, HAVE, M>(args...);
}

// The same for up to MAX_ROWS tokens; `outputs` is null without vectors.
template <typename T, typename W, typename Out, typename... Args>
void axpy(const Outputs<T>* outputs, int count, Args... args) {
  if (outputs) return axpy_rows<T, W, Out, true, MAX_ROWS>(count, args..., outputs);
  axpy_rows<T, W, Out, false, MAX_ROWS>(count, args..., outputs);
}

template <typename T>
Outputs<T> outputs_of(const LoraArgs& args, const LoraVectors<T>& all, int64_t k, int64_t column) {
  const auto from = [&](const auto* values) { return values ? values + column : nullptr; };
  return {{from(all.magnitude), from(all.bias), from(all.base_bias)},
          args.base_bias ? args.base_bias + args.columns[k] + column : nullptr};
}

template <typename T, typename W, typename Out>
void expand_part(const LoraArgs& args, const LoraPart<T, W>& part, const LoraPart<T, W>& next) {
  using X = Axpy<T>;
  alignas(64) typename X::Vector packed[MAX_PACKED_RANK / X::STEP][VECTORS];
  const LoraItem& item = *part.item;
  const int rank = part.place.rank, step = y_step(rank);
  const int32_t* tokens = args.plan.tokens + item.first;
  const int64_t width = args.widths[part.k];
  const bool packs = item.count > MAX_ROWS && rank <= MAX_PACKED_RANK;
  const int64_t block_bytes = std::max(rank, 1) * COLUMNS * sizeof(W);
  const int64_t ahead = std::max<int64_t>(AHEAD_BYTES / block_bytes, 1) * COLUMNS;
  for (int64_t column = part.begin; column < part.end; column += COLUMNS) {
    const int n = static_cast<int>(std::min<int64_t>(COLUMNS, part.end - column));
    const Columns<T, W> columns{part.place.values + column, width, rank};
    Columns<T, W> soon{columns.b + ahead, width, rank};
    if (column + ahead >= part.end && next.item) {
      const int64_t first = next.begin + std::max<int64_t>(column + ahead - part.end, 0);
      soon = {next.place.values + first, args.widths[next.k], next.place.rank};
    }
    if (packs)
      for (int r = 0; r < rank; r += X::STEP) {
        columns.load(r, n, packed[r / X::STEP]);
        soon.prefetch(r);
      }
    Out* first = static_cast<Out*>(args.out) + args.columns[part.k] + column;
    Outputs<T> outputs;
    if (part.vectors) outputs = outputs_of(args, part.vectors, part.k, column);
    for (int t = 0; t < item.count; t += MAX_ROWS) {
      Out* rows[MAX_ROWS];
      const int m = std::min(MAX_ROWS, item.count - t);
      for (int i = 0; i < m; ++i) rows[i] = first + tokens[t + i] * args.out_stride;
      const T* y = y_of<T>(args, item, part.k) + static_cast<int64_t>(t) * step;
      axpy<T, W, Out>(part.vectors ? &outputs : nullptr, m, rows, y, step, part.place.scale,
                      columns, soon, packs ? packed : nullptr, n);
    }
  }
}

// The same for an item with items that follow it: what stands in for the base's outputs, and then
// what all of them add, in fp32, in order, rounded once.
template <typename T, typename W, typename Out, bool EXPERTS>
void expand_mix(const LoraArgs& args, const LoraPart<T, W>& part) {
  using X = Axpy<T>;
  const LoraItem& item = *part.item;
  const int32_t* tokens = args.plan.tokens + item.first;
  const auto columns_of = [&](int p, int64_t column) {
    const auto place = LoraPlace<W>::template of<LoraSide::B, EXPERTS>(args, (&item)[p], part.k);
    return Columns<T, W>{place.values + column, args.widths[part.k], place.rank};
  };
  for (int64_t column = part.begin; column < part.end; column += COLUMNS) {
    const int n = static_cast<int>(std::min<int64_t>(COLUMNS, part.end - column));
    Out* first = static_cast<Out*>(args.out) + args.columns[part.k] + column;
    const auto outputs_of_part = [&](int p) {
      const auto vectors = LoraVectors<T>::of(args, (&item)[p], part.k);
      auto outputs = outputs_of(args, vectors, part.k, column);
      outputs.has_base = false;
      return outputs;
    };
    for (int t = 0; t < item.count; t += MAX_ROWS) {
      alignas(64) float sums[MAX_ROWS][COLUMNS];
      float* rows[MAX_ROWS];
      const int m = std::min(MAX_ROWS, item.count - t);
      for (int i = 0; i < m; ++i) {
        rows[i] = sums[i];
        const Out* out = first + tokens[t + i] * args.out_stride;
        for (int c = 0; c < n; ++c) sums[i][c] = to_float(out[c]);
      }
      for (int p = 0; p <= item.followers; ++p) {
        const auto outputs = outputs_of_part(p);
        for (int i = 0; i < m; ++i)
          for (int c = 0; c < n; c += VF_WIDTH) {
            const int lanes = std::min(n - c, VF_WIDTH);
            vstore(rows[i] + c, outputs.of_base(vload(rows[i] + c, lanes), c, lanes), lanes);
          }
      }
      for (int p = 0; p <= item.followers; ++p) {
        const LoraItem& each = (&item)[p];
        const auto place = LoraPlace<W>::template of<LoraSide::B, EXPERTS>(args, each, part.k);
        const auto outputs = outputs_of_part(p);
        if (place.rank == 0 && !outputs.vectors) continue;
        const int step = y_step(place.rank);
        const T* y = y_of<T>(args, each, part.k) + static_cast<int64_t>(t) * step;
        // The same columns of the next part, or the next ones of the first, are wanted soon.
        const auto soon =
            p < item.followers ? columns_of(p + 1, column) : columns_of(0, column + COLUMNS);
        const typename X::Vector(*packed)[VECTORS] = nullptr;
        axpy<T, W, float>(outputs.vectors ? &outputs : nullptr, m, rows, y, step, place.scale,
                          columns_of(p, column), soon, packed, n);
      }
      for (int i = 0; i < m; ++i) {
        Out* out = first + tokens[t + i] * args.out_stride;
        for (int c = 0; c < n; ++c) out[c] = from_float<Out>(sums[i][c]);
      }
    }
  }
}

// Parts are as large as lets the threads finish together: about 8 for each of them.
inline int64_t part_size(int64_t total, int num_threads, int64_t least, int64_t most) {
  const int64_t even = total / (8 * num_threads) / least * least;
  return std::max(least, std::min(even, most));
}

}  // namespace

// out += scale * y @ B of every item and target.
template <typename T, typename W, typename Out, bool EXPERTS>
void lora_expand(const LoraArgs& args, const Slice& slice) {
  const int64_t num_items = *args.plan.num_items;
  int64_t total = 0;
  for (int64_t k = 0; k < args.num_targets; ++k) total += args.widths[k];
  const int64_t size = part_size(num_items * total, slice.num_threads, 2 * COLUMNS, 4096);
  int64_t splits = 0;  // of one item
  for (int64_t k = 0; k < args.num_targets; ++k) splits += (args.widths[k] + size - 1) / size;
  const auto take = [&] {
    LoraPart<T, W> part;
    for (int64_t i; (i = slice.take()) < num_items * splits;) {
      const LoraItem& item = args.plan.items[i / splits];
      int64_t index = i % splits;
      for (part.k = 0; index * size >= args.widths[part.k]; ++part.k)
        index -= (args.widths[part.k] + size - 1) / size;
      part.place = LoraPlace<W>::template of<LoraSide::B, EXPERTS>(args, item, part.k);
      part.vectors = LoraVectors<T>::of(args, item, part.k);
      if (item.followers < 0) continue;  // it is summed with one before it
      const bool is_mix = item.followers > 0;
      if (part.place.rank == 0 && !part.vectors && !is_mix) continue;
      part.begin = index * size;
      part.end = std::min<int64_t>(part.begin + size, args.widths[part.k]);
      part.item = &item;
      break;
    }
    return part;
  };
  using Part = LoraPart<T, W>;
  for_lora_parts<T, W>(take, [&](const Part& part, const Part& next) {
    if (part.item->followers > 0) return expand_mix<T, W, Out, EXPERTS>(args, part);
    expand_part<T, W, Out>(args, part, next);
  });
}

}  // namespace loadout

LOADOUT_EXPORT(lora_expand_float, loadout::LoraArgs,
               (loadout::lora_expand<float, float, float, false>))
LOADOUT_EXPORT(lora_expand_bf16, loadout::LoraArgs,
               (loadout::lora_expand<loadout::bf16, loadout::bf16, loadout::bf16, false>))
LOADOUT_EXPORT(lora_expand_bf16_to_float, loadout::LoraArgs,
               (loadout::lora_expand<loadout::bf16, loadout::bf16, float, false>))
LOADOUT_EXPORT(lora_expand_experts_float, loadout::LoraArgs,
               (loadout::lora_expand<float, float, float, true>))
LOADOUT_EXPORT(lora_expand_experts_bf16, loadout::LoraArgs,
               (loadout::lora_expand<loadout::bf16, loadout::bf16, loadout::bf16, true>))
LOADOUT_EXPORT(lora_expand_experts_bf16_to_float, loadout::LoraArgs,
               (loadout::lora_expand<loadout::bf16, loadout::bf16, float, true>))
LOADOUT_EXPORT(lora_expand_float8_float, loadout::LoraArgs,
               (loadout::lora_expand<float, loadout::e4m3, float, false>))
LOADOUT_EXPORT(lora_expand_float8_bf16, loadout::LoraArgs,
               (loadout::lora_expand<loadout::bf16, loadout::e4m3, loadout::bf16, false>))
LOADOUT_EXPORT(lora_expand_float8_bf16_to_float, loadout::LoraArgs,
               (loadout::lora_expand<loadout::bf16, loadout::e4m3, float, false>))
LOADOUT_EXPORT(lora_expand_experts_float8_float, loadout::LoraArgs,
               (loadout::lora_expand<float, loadout::e4m3, float, true>))
LOADOUT_EXPORT(lora_expand_experts_float8_bf16, loadout::LoraArgs,
               (loadout::lora_expand<loadout::bf16, loadout::e4m3, loadout::bf16, true>))
LOADOUT_EXPORT(lora_expand_experts_float8_bf16_to_float, loadout::LoraArgs,
               (loadout::lora_expand<loadout::bf16, loadout::e4m3, float, true>))
