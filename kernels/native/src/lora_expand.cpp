// The second product, out += scale * y @ B: rows of B times numbers of y, STEP ranks at once,
// COLUMNS columns in registers.
#include "lora_expand.h"

#include "lora_expand_tiles.h"

namespace loadout {

namespace {

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
  LOADOUT_UNROLL for (int m = 0; m < M; ++m) add_sums<T, HAVE>(out[m], sums[m], scale, n, outputs);
}

template <typename T, typename W, typename Out, bool HAVE, int M, typename... Args>
void axpy_rows(int count, Args... args) {
  if constexpr (M > 1)
    if (count < M) return axpy_rows<T, W, Out, HAVE, M - 1>(count, args...);
  axpy_block<T, W, Out, HAVE, M>(args...);
}

// Products by vectors. Tiles may stand in for them.
template <typename T>
struct VectorExpand {
  static constexpr int ROWS = VECTOR_ROWS;
  // B is converted once for more tokens than this.
  static constexpr int ROWS_UNPACKED = VECTOR_ROWS;

  // The same for up to ROWS tokens; `outputs` is null without vectors.
  template <typename W, typename Out, typename... Args>
  void add(const Outputs<T>* outputs, int count, Args... args) {
    if (outputs) return axpy_rows<T, W, Out, true, ROWS>(count, args..., outputs);
    axpy_rows<T, W, Out, false, ROWS>(count, args..., outputs);
  }
};

template <typename T>
struct ExpandOf {
  using Type = VectorExpand<T>;
};
#if defined(__AMX_BF16__)
template <>
struct ExpandOf<bf16> {
  using Type = TileExpand;
};
#endif

// How a thread multiplies by B, while an operation runs.
template <typename T>
using ExpandProduct = typename ExpandOf<T>::Type;

template <typename T>
Outputs<T> outputs_of(const LoraArgs& args, const LoraVectors<T>& all, int64_t k, int64_t column) {
  const auto from = [&](const auto* values) { return values ? values + column : nullptr; };
  return {{from(all.magnitude), from(all.bias), from(all.base_bias)},
          args.base_bias ? args.base_bias + args.columns[k] + column : nullptr};
}

template <typename T, typename W, typename Out>
void expand_part(ExpandProduct<T>& product, const LoraArgs& args, const LoraPart<T, W>& part,
                 const LoraPart<T, W>& next) {
  using X = Axpy<T>;
  constexpr int MAX_ROWS = ExpandProduct<T>::ROWS;
  alignas(64) typename X::Vector packed[MAX_PACKED_RANK / X::STEP][VECTORS];
  const LoraItem& item = *part.item;
  const int rank = part.place.rank, step = y_step(rank);
  const int32_t* tokens = args.plan.tokens + item.first;
  const int64_t width = args.widths[part.k];
  const bool packs = item.count > ExpandProduct<T>::ROWS_UNPACKED && rank <= MAX_PACKED_RANK;
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
      product.template add<W, Out>(part.vectors ? &outputs : nullptr, m, rows, y, step,
                                   part.place.scale, columns, soon, packs ? packed : nullptr, n);
    }
  }
}

// The same for an item with items that follow it: what stands in for the base's outputs, and then
// what all of them add, in fp32, in order, rounded once.
template <typename T, typename W, typename Out, bool EXPERTS>
void expand_mix(ExpandProduct<T>& product, const LoraArgs& args, const LoraPart<T, W>& part) {
  using X = Axpy<T>;
  constexpr int MAX_ROWS = ExpandProduct<T>::ROWS;
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
        product.template add<W, float>(outputs.vectors ? &outputs : nullptr, m, rows, y, step,
                                       place.scale, columns_of(p, column), soon, packed, n);
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
  ExpandProduct<T> product;
  for_lora_parts<T, W>(take, [&](const Part& part, const Part& next) {
    if (part.item->followers > 0) return expand_mix<T, W, Out, EXPERTS>(product, args, part);
    expand_part<T, W, Out>(product, args, part, next);
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
