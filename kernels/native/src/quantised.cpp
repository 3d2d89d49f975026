// Products with weights in few bits: out = x @ W^T + bias, with W = table[code] * scale + offset.
//
// W lies in panels of PANEL outputs, each contiguous. A panel has its groups in the order of K, each
// as [scales][offsets][codes]; see quantised_codes.h for the order of codes. Codes are decoded to
// table[code] in the type of x. Every output is a sum over chunks in the order of K:
//
//   sum = offset * sum(x of the chunk) + (scale * sum(x * table[code]) + sum)
//
// whatever the number of tokens: a row alone gives the bits that it gives in any batch. Few rows
// decode codes in registers; many, and all that AMX multiplies, decode a chunk once, into the first
// cache.
//
// With AVX2 alone, codes of whole numbers and inputs in bf16 are multiplied as integers of 16 bits,
// which one instruction multiplies sixteen of; see WholeInputs.
#include "quantised.h"

#include <array>
#include <type_traits>
#include <utility>

#include "quantised_codes.h"
#include "quantised_inputs.h"
#include "tile_block.h"

namespace loadout {

namespace {

// Inputs in a chunk: decoded in float, they take half of a first cache of 32 KiB.
constexpr int64_t MOST_INPUTS = 128;
// Rows in a tile: as fast as the most that fit, and more of them stay apart in the first cache.
#if defined(__AVX512F__)
constexpr int MOST_TILE_ROWS = 8;
#else
constexpr int MOST_TILE_ROWS = 6;
#endif

// Chunks that are computed side by side, so that few rows have as many sums as the latency of their
// instructions asks for.
constexpr int side_by_side(int rows) {
#if defined(__AVX512F__)
  return rows == 1 ? 4 : rows == 2 ? 2 : 1;
#else
  return 1;
#endif
}

// What all tiles of an item share.
template <typename T>
struct Item {
  const QuantisedForm& form;
  const Chunks& chunks;
  const T* x;  // of the first row
  int64_t stride;
  const float* input_sums;  // [rows, chunks], or null
  const float* factors;     // of whole inputs [rows, chunks], else null
  const int32_t* firsts;    // likewise: the sums of products with the number of code 0
  float* sums;              // [rows, PANEL]
  int64_t fetch;            // bytes from this panel to the one that this thread takes next, or 0
};

// Adds the products of `words` words of chunks side by side. x: of the first chunk, `size` inputs
// before the second's.
template <int ROWS, int CHUNKS, int VECTORS, typename Codes, typename T>
inline __attribute__((always_inline)) void multiply_words(
    VF (&partial)[CHUNKS][ROWS][VECTORS], const Codes& codes, const char* const (&at)[CHUNKS],
    const T* x, int64_t size, int64_t stride, int64_t words, int64_t fetch) {
  constexpr int STEPS = Codes::SPAN / STEP_OF<T>;
  constexpr int WORD_BYTES = Codes::WORD_BYTES * PANEL;
  using Word = decltype(Codes::load(nullptr, 0));
#pragma GCC unroll 2
  for (int64_t w = 0; w < words; ++w) {
    Word word[CHUNKS][VECTORS];
#pragma GCC unroll 4
    for (int c = 0; c < CHUNKS; ++c)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) word[c][v] = Codes::load(at[c] + w * WORD_BYTES, v);
#pragma GCC unroll 8
    for (int step = 0; step < STEPS; ++step)
#pragma GCC unroll 4
      for (int c = 0; c < CHUNKS; ++c) {
        VF weights[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) weights[v] = codes.decode(word[c][v], step);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
          const VF xr = load_step(x + r * stride + c * size + w * Codes::SPAN, step);
#pragma GCC unroll 4
          for (int v = 0; v < VECTORS; ++v)
            partial[c][r][v] = multiply_step<T>(partial[c][r][v], xr, weights[v]);
        }
#if !defined(__AVX512F__)
        asm volatile("" ::: "memory");  // loads pairs again rather than hold them in registers
#endif
      }
    if (fetch)
#pragma GCC unroll 4
      for (int c = 0; c < CHUNKS; ++c)
        for (int line = 0; line < VECTORS * VF_WIDTH * Codes::WORD_BYTES; line += LINE_BYTES)
          _mm_prefetch(at[c] + w * WORD_BYTES + fetch + line, _MM_HINT_T1);
  }
}

// Adds chunks, the first of which has the given number, to the sums of ROWS rows from `row` on, for
// the outputs from `part` on. `decoded`: the only chunk's, or null.
template <typename Codes, typename T, int ROWS, int CHUNKS>
inline void add_chunks(const Item<T>& item, const Codes& codes, int row, int part, int64_t number,
                       const Chunk (&chunks)[CHUNKS], const char* decoded,
                       int64_t fetch) {
  constexpr int VECTORS = tile_vectors(ROWS);
  VF partial[CHUNKS][ROWS][VECTORS];
#pragma GCC unroll 4
  for (int c = 0; c < CHUNKS; ++c)
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) partial[c][r][v] = vzero();
  const char* at[CHUNKS];
  for (int c = 0; c < CHUNKS; ++c)
    at[c] = (decoded ? decoded : chunks[c].codes) + part * Codes::LANE_BYTES;
  const T* x = item.x + row * item.stride + chunks[0].first;
  const int64_t size = chunks[0].size, words = size / Codes::SPAN;
  multiply_words<ROWS, CHUNKS>(partial, codes, at, x, size, item.stride, words,
                               fetch);
  if constexpr (CHUNKS == 1) {
    const int64_t done = words * Codes::SPAN;
    if (done < size) {  // a word that ends beyond the row
      T padded[ROWS * Codes::SPAN] = {};
      for (int r = 0; r < ROWS; ++r)
        std::memcpy(padded + r * Codes::SPAN, x + r * item.stride + done,
                    (size - done) * sizeof(T));
      at[0] += words * Codes::WORD_BYTES * PANEL;
      multiply_words<ROWS, 1>(partial, codes, at, padded, 0, Codes::SPAN, 1, 0);
    }
  }
  for (int c = 0; c < CHUNKS; ++c) {
    const char* scales = chunks[c].scales;
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      const int vector = part / VF_WIDTH + v;
      VF scale = load_scales(scales, item.form.scales, vector);
      if constexpr (Codes::FACTOR != 1) scale = vmul(scale, vset1(Codes::FACTOR));
      float* sums = item.sums + row * PANEL + part + v * VF_WIDTH;
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r)
        vstore(sums + r * PANEL, vfma(scale, partial[c][r][v], vload(sums + r * PANEL)));
      if (!item.input_sums) continue;
      const VF offset = load_scales(scales + item.chunks.scale_bytes(), item.form.scales, vector);
      for (int r = 0; r < ROWS; ++r) {
        const float sum = item.input_sums[(row + r) * item.chunks.count() + number + c];
        vstore(sums + r * PANEL, vfma(offset, vset1(sum), vload(sums + r * PANEL)));
      }
    }
  }
}

// Adds chunks [first, last) of a panel to the sums of ROWS rows from `row` on.
template <typename Codes, typename T, int ROWS>
struct AddAll {
  static void add(const Item<T>& item, int row, const char* panel, int64_t first, int64_t last,
                  const char* decoded, int64_t fetch);
};

template <typename Codes, typename T, int ROWS>
void AddAll<Codes, T, ROWS>::add(const Item<T>& item, int row, const char* panel, int64_t first,
                                 int64_t last, const char* decoded, int64_t fetch) {
  constexpr int CHUNKS = side_by_side(ROWS), WIDTH = tile_vectors(ROWS) * VF_WIDTH;
  const Codes codes(item.form.table);
  for (int part = 0; part < PANEL; part += WIDTH) {
    int64_t i = first;
    if constexpr (CHUNKS > 1)
      for (; i + CHUNKS <= last; i += CHUNKS) {
        Chunk chunks[CHUNKS];
        bool are_equal = true;
        for (int c = 0; c < CHUNKS; ++c) {
          chunks[c] = item.chunks.find(panel, i + c);
          are_equal &= chunks[c].size == chunks[0].size;
        }
        if (!are_equal || chunks[0].size % Codes::SPAN) break;
        add_chunks<Codes, T, ROWS, CHUNKS>(item, codes, row, part, i, chunks, nullptr, fetch);
      }
    for (; i < last; ++i) {
      const Chunk chunk[1] = {item.chunks.find(panel, i)};
      add_chunks<Codes, T, ROWS, 1>(item, codes, row, part, i, chunk, decoded, fetch);
    }
  }
}

#if !defined(__AVX512F__)

// Few rows by a whole panel, others by two vectors, so that sums, weights and inputs fit registers.
constexpr int whole_vectors(int rows) { return rows <= 2 ? PANEL / VF_WIDTH : 2; }

// As add_chunks, of all chunks [first, last) and of inputs in whole numbers.
template <typename Codes, int ROWS>
void add_whole_chunks(const Item<Whole>& item, int row, int part, const char* panel, int64_t first,
                      int64_t last, const char* decoded, int64_t fetch) {
  constexpr int VECTORS = whole_vectors(ROWS);
  const Codes codes(item.form.table);
  const int64_t count = item.chunks.count();
  for (int64_t number = first; number < last; ++number) {
    const Chunk chunk = item.chunks.find(panel, number);
    VF partial[1][ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v)
        partial[0][r][v] =
            _mm256_castsi256_ps(_mm256_set1_epi32(item.firsts[(row + r) * count + number]));
    const char* const at[1] = {(decoded ? decoded : chunk.codes) + part * Codes::LANE_BYTES};
    const Whole* x = item.x + row * item.stride + chunk.first;
    const int64_t words = chunk.size / Codes::SPAN, done = words * Codes::SPAN;
    multiply_words<ROWS, 1>(partial, codes, at, x, 0, item.stride, words, fetch);
    if (done < chunk.size) {  // a word that ends beyond the row
      Whole padded[ROWS * Codes::SPAN] = {};
      for (int r = 0; r < ROWS; ++r)
        std::memcpy(padded + r * Codes::SPAN, x + r * item.stride + done,
                    (chunk.size - done) * sizeof(Whole));
      const char* const end[1] = {at[0] + words * Codes::WORD_BYTES * PANEL};
      multiply_words<ROWS, 1>(partial, codes, end, padded, 0, Codes::SPAN, 1, 0);
    }
    VF scales[VECTORS];
    load_scales(chunk.scales, item.form.scales, part / VF_WIDTH, scales);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const VF factor = vset1(item.factors[(row + r) * count + number]);
      float* sums = item.sums + (row + r) * PANEL + part;
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        const VF sum = _mm256_cvtepi32_ps(_mm256_castps_si256(partial[0][r][v]));
        vstore(sums + v * VF_WIDTH,
               vfma(vmul(scales[v], factor), sum, vload(sums + v * VF_WIDTH)));
      }
    }
    if (!item.input_sums) continue;
    load_scales(chunk.scales + item.chunks.scale_bytes(), item.form.scales, part / VF_WIDTH,
                scales);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const VF input_sum = vset1(item.input_sums[(row + r) * count + number]);
      float* sums = item.sums + (row + r) * PANEL + part;
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v)
        vstore(sums + v * VF_WIDTH, vfma(scales[v], input_sum, vload(sums + v * VF_WIDTH)));
    }
  }
}

template <typename Codes, int ROWS>
struct AddAll<Codes, Whole, ROWS> {
  static void add(const Item<Whole>& item, int row, const char* panel, int64_t first, int64_t last,
                  const char* decoded, int64_t fetch) {
    for (int part = 0; part < PANEL; part += whole_vectors(ROWS) * VF_WIDTH)
      add_whole_chunks<Codes, ROWS>(item, row, part, panel, first, last, decoded, fetch);
  }
};

#endif

template <typename T>
using Add = void (*)(const Item<T>&, int, const char*, int64_t, int64_t, const char*, int64_t);

template <typename Codes, typename T, int... ROWS>
constexpr std::array<Add<T>, sizeof...(ROWS)> every_height(std::integer_sequence<int, ROWS...>) {
  return {AddAll<Codes, T, ROWS + 1>::add...};
}

// ADD_ALL<Codes, T>[rows - 1]
template <typename Codes, typename T>
constexpr auto ADD_ALL = every_height<Codes, T>(std::make_integer_sequence<int, MOST_TILE_ROWS>());

// Writes the values of a chunk as `Decoded` reads them.
template <typename Codes, typename T>
inline void decode_chunk(const Item<T>& item, const Chunk& chunk, float* to) {
  constexpr int STEPS = Codes::SPAN / STEP_OF<T>, WORD_BYTES = Codes::WORD_BYTES * PANEL;
  const Codes codes(item.form.table);
  const int64_t words = (chunk.size + Codes::SPAN - 1) / Codes::SPAN;
  for (int64_t w = 0; w < words; ++w) {
    const char* at = chunk.codes + w * WORD_BYTES;
#pragma GCC unroll 4
    for (int v = 0; v < PANEL / VF_WIDTH; ++v) {
      const auto word = Codes::load(at, v);
#pragma GCC unroll 8
      for (int step = 0; step < STEPS; ++step, to += PANEL)
        vstore(to + v * VF_WIDTH, codes.decode(word, step));
      to -= STEPS * PANEL;
    }
    to += STEPS * PANEL;
    for (int line = 0; line < WORD_BYTES; line += LINE_BYTES)
      _mm_prefetch(at + item.fetch + line, _MM_HINT_T1);
  }
}

// The sums of `rows` rows by one panel.
template <typename Codes, typename T>
void sum_panel(const Item<T>& item, int rows, const char* panel) {
  const int64_t count = item.chunks.count();
  const int tiles = (rows + MOST_TILE_ROWS - 1) / MOST_TILE_ROWS;
  const auto add = [&](const auto& add_all, int tile, int64_t first, int64_t last,
                       const float* decoded, int64_t fetch) {
    const int row = rows * tile / tiles, height = rows * (tile + 1) / tiles - row;
    add_all[height - 1](item, row, panel, first, last, reinterpret_cast<const char*>(decoded),
                        fetch);
  };
  if (rows <= Codes::MOST_DIRECT_ROWS) {
    for (int i = 0; i < tiles; ++i)
      add(ADD_ALL<Codes, T>, i, 0, count, nullptr, i == 0 ? item.fetch : 0);
    return;
  }
  alignas(64) float decoded[MOST_INPUTS / STEP_OF<T> * PANEL];
  for (int64_t number = 0; number < count; ++number) {
    decode_chunk<Codes, T>(item, item.chunks.find(panel, number), decoded);
    for (int i = 0; i < tiles; ++i)
      add(ADD_ALL<Decoded<Codes, T>, T>, i, number, number + 1, decoded, 0);
  }
}

#if defined(__AMX_BF16__)

// Adds a chunk to the sums of `rows` rows from `row` on. partial: [rows, PANEL].
template <typename Codes>
void add_partial(const Item<bf16>& item, const Chunk& chunk, int64_t number, int row, int rows,
                 const float* partial) {
  for (int v = 0; v < PANEL / VF_WIDTH; ++v) {
    VF scale = load_scales(chunk.scales, item.form.scales, v);
    if constexpr (Codes::FACTOR != 1) scale = vmul(scale, vset1(Codes::FACTOR));
    VF offset = vzero();
    if (item.input_sums)
      offset = load_scales(chunk.scales + item.chunks.scale_bytes(), item.form.scales, v);
    for (int r = 0; r < rows; ++r) {
      float* sums = item.sums + (row + r) * PANEL + v * VF_WIDTH;
      VF sum = vfma(scale, vload(partial + r * PANEL + v * VF_WIDTH), vload(sums));
      if (item.input_sums)
        sum = vfma(offset, vset1(item.input_sums[(row + r) * item.chunks.count() + number]), sum);
      vstore(sums, sum);
    }
  }
}

// As sum_panel.
template <typename Codes>
void sum_panel_by_tiles(TileBlock& block, const Item<bf16>& item, int rows, const char* panel) {
  constexpr int64_t BYTES = sizeof(bf16);
  alignas(64) float decoded[MOST_INPUTS / 2 * PANEL];
  for (int64_t number = 0; number < item.chunks.count(); ++number) {
    const Chunk chunk = item.chunks.find(panel, number);
    decode_chunk<Codes, bf16>(item, chunk, decoded);
    for (int row = 0; row < rows; row += TileBlock::ROWS) {
      const int height = std::min(rows - row, TileBlock::ROWS);
      const bf16* x = item.x + row * item.stride + chunk.first;
      const float* partial = block.multiply<float>(x, item.stride * BYTES, height, decoded,
                                                   chunk.size * BYTES, [] {});
      add_partial<Codes>(item, chunk, number, row, height, partial);
    }
  }
}

#endif

// A thread's part of a product: it computes items, and keeps what it knows of their inputs. These are
// X, and multiplied as T.
template <typename Codes, typename T, typename X, typename Out>
class Product {
 public:
  Product(const LinearArgs& args, const QuantisedForm& form)
      : args_(args),
        form_(form),
        chunks_(form, args.in_features, MOST_INPUTS, Codes::SPAN, Codes::WORD_BYTES),
        inputs_(chunks_, args.in_features, first_number()) {}

  int64_t most_rows() const {
    const int64_t row_bytes = args_.in_features * static_cast<int64_t>(sizeof(T));
    const int64_t most = std::max<int64_t>(MAX_ROWS, ROW_BLOCK_BYTES_OF<T> / row_bytes);
    const int64_t of_sums = form_.has_offsets ? MOST_INPUT_SUMS / chunks_.count() : MOST_ITEM_ROWS;
    return std::min({most, of_sums, inputs_.most_rows(), MOST_ITEM_ROWS});
  }

  int64_t panel_bytes() const { return chunks_.panel_bytes(); }

  // Rows [first, last) by one panel of the weights in `args`. `next`: the number of bytes from it to
  // the one that this thread takes next.
  void multiply(const LinearArgs& args, int64_t first, int64_t last, int64_t panel, int64_t next) {
    const X* x = static_cast<const X*>(args.x) + first * args.x_stride;
    const int rows = static_cast<int>(last - first);
    if (first != first_ || last != last_) {
      if (form_.has_offsets) add_inputs(x, rows);
      if constexpr (IS_WHOLE<T>) inputs_.take(x, args.x_stride, rows);
      first_ = first, last_ = last;
    }
    alignas(64) float sums[MOST_ITEM_ROWS * PANEL];
    std::fill_n(sums, rows * PANEL, 0.0f);
    const Item<T> item = item_of(x, sums, next);
    const char* weights = static_cast<const char*>(args.weights) + panel * panel_bytes();
#if defined(__AMX_BF16__)
    if constexpr (std::is_same_v<T, bf16>) sum_panel_by_tiles<Codes>(block_, item, rows, weights);
    else sum_panel<Codes, T>(item, rows, weights);
#else
    sum_panel<Codes, T>(item, rows, weights);
#endif
    store_panel<Out>(args, sums, first, rows, panel * PANEL);
  }

 private:
  Item<T> item_of(const X* x, float* sums, int64_t next) const {
    const float* input_sums = form_.has_offsets ? input_sums_ : nullptr;
    if constexpr (IS_WHOLE<T>)
      return {form_, chunks_, inputs_.numbers(), inputs_.stride(), input_sums, inputs_.factors(),
              inputs_.firsts(), sums, next};
    else
      return {form_, chunks_, x, args_.x_stride, input_sums, nullptr, nullptr, sums, next};
  }

  int32_t first_number() const {
    if constexpr (IS_WHOLE<T>) return Codes::first(form_.table);
    return 0;
  }

  void add_inputs(const X* x, int rows) {
    for (int r = 0; r < rows; ++r)
      for (int64_t i = 0; i < chunks_.count(); ++i) {
        const Chunk chunk = chunks_.find(nullptr, i);
        VF sum = vzero();
        for_vectors(chunk.size, [&](int64_t at, auto lanes) {
          sum = vadd(sum, vload(x + r * args_.x_stride + chunk.first + at, lanes));
        });
        input_sums_[r * chunks_.count() + i] = reduce_add(sum);
      }
  }

  const LinearArgs& args_;
  const QuantisedForm& form_;
  const Chunks chunks_;
  int64_t first_ = -1, last_ = -1;
  float input_sums_[MOST_INPUT_SUMS];
  std::conditional_t<IS_WHOLE<T>, WholeInputs, PlainInputs> inputs_;
#if defined(__AMX_BF16__)
  TileBlock block_;
#endif
};

}  // namespace

// Not inlined, because each takes much of the stack.
template <typename Codes, typename T, typename X, typename Out, typename Args>
__attribute__((noinline)) void multiply_as(const LinearArgs& linear, const Args& args,
                                           const QuantisedForm& form, const Slice& slice) {
  Product<Codes, T, X, Out> product(linear, form);
  multiply_items(product, args, slice);
}

// Computes with the decoder and the type of inputs that are fastest for inputs X.
template <template <typename> typename Codes, typename X, typename Out, typename Args>
void multiply_fastest(const LinearArgs& linear, const Args& args, const QuantisedForm& form,
                      const Slice& slice) {
#if !defined(__AVX512F__)
  constexpr bool has_nibbles = std::is_same_v<Codes<X>, Nibbles<X>>;
  constexpr bool has_integers = std::is_same_v<Codes<X>, Integers<X>>;
  const bool is_consecutive = has_nibbles && are_consecutive(form.table);
  if constexpr (std::is_same_v<X, bf16> && (has_nibbles || has_integers))
    if ((has_integers || is_consecutive) &&
        WholeInputs::can_hold(linear.in_features, form.group_size)) {
      using WholeCodes = std::conditional_t<has_nibbles, WholeNibbles, WholeBytes>;
      return multiply_as<WholeCodes, Whole, X, Out>(linear, args, form, slice);
    }
  if constexpr (has_nibbles)
    if (is_consecutive)
      return multiply_as<ConsecutiveNibbles<X>, X, X, Out>(linear, args, form, slice);
#endif
  multiply_as<Codes<X>, X, X, Out>(linear, args, form, slice);
}

template <template <typename> typename Codes, typename X, typename Out>
void quantised(const QuantisedArgs& args, const Slice& slice) {
  multiply_fastest<Codes, X, Out>(args.linear, args.linear, args.form, slice);
}

template <template <typename> typename Codes, typename X, typename Out>
void quantised_experts(const ExpertsQuantisedArgs& args, const Slice& slice) {
  multiply_fastest<Codes, X, Out>(args.experts.linear, args.experts, args.form, slice);
}

}  // namespace loadout

#define EXPORT_CODES(NAME, CODES)                                                          \
  LOADOUT_EXPORT(quantised_##NAME##_float, loadout::QuantisedArgs,                         \
                 (loadout::quantised<loadout::CODES, float, float>))                       \
  LOADOUT_EXPORT(quantised_##NAME##_bf16, loadout::QuantisedArgs,                          \
                 (loadout::quantised<loadout::CODES, loadout::bf16, loadout::bf16>))       \
  LOADOUT_EXPORT(quantised_##NAME##_bf16_float, loadout::QuantisedArgs,                    \
                 (loadout::quantised<loadout::CODES, loadout::bf16, float>))               \
  LOADOUT_EXPORT(quantised_experts_##NAME##_float, loadout::ExpertsQuantisedArgs,          \
                 (loadout::quantised_experts<loadout::CODES, float, float>))               \
  LOADOUT_EXPORT(quantised_experts_##NAME##_bf16, loadout::ExpertsQuantisedArgs,           \
                 (loadout::quantised_experts<loadout::CODES, loadout::bf16, loadout::bf16>))

EXPORT_CODES(nibbles, Nibbles)
EXPORT_CODES(integers, Integers)
EXPORT_CODES(fp8, Fp8)
