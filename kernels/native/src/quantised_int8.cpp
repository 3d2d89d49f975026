// Products of inputs and weights in int8, in whole numbers: two rows or more with the tiles of AMX
// where they are, else with the instructions of VNNI, or with those of 16 bits. All are exact, and so
// have the same bits.
//
// Codes lie as quantised.cpp says, in words of four inputs: [ceil(K / 4)][PANEL][4] of bytes. The
// instructions multiply unsigned by signed bytes, and so a weight's byte is 128 more than the weight:
//
//   sum(x * w) = sum(x * (w + 128)) - 128 * sum(x)
#include <array>
#include <cmath>
#include <utility>

#include "quantised.h"
#include "tile_block.h"

namespace loadout {

namespace {

constexpr int SPAN = 4, WORD_BYTES = 4;
// Inputs in a chunk, whose sums have 31 bits: 4096 * 255 * 128 * 2 has 28.
constexpr int64_t MOST_INPUTS = 4096;
#if defined(__AVX512F__)
constexpr int MOST_TILE_ROWS = 8;
#else
constexpr int MOST_TILE_ROWS = 6;
#endif

int64_t padded(int64_t in_features) { return (in_features + 7) / 8 * 8; }

Chunks chunks_of(const QuantisedForm& form, int64_t in_features) {
  return Chunks(form, in_features, MOST_INPUTS, SPAN, WORD_BYTES);
}

#if defined(__AVX512F__)
inline VI load_bytes(const char* p) { return _mm512_loadu_si512(p); }
inline VI set_lanes(int32_t x) { return _mm512_set1_epi32(x); }
inline VI add_lanes(VI a, VI b) { return _mm512_add_epi32(a, b); }
inline VF float_lanes(VI x) { return _mm512_cvtepi32_ps(x); }
inline VI whole_lanes(VF x) { return _mm512_cvtps_epi32(x); }
inline int32_t sum_lanes(VI x) { return _mm512_reduce_add_epi32(x); }
inline void store_codes(int8_t* p, VI x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x));
}
#else
inline VI load_bytes(const char* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline VI set_lanes(int32_t x) { return _mm256_set1_epi32(x); }
inline VI add_lanes(VI a, VI b) { return _mm256_add_epi32(a, b); }
inline VF float_lanes(VI x) { return _mm256_cvtepi32_ps(x); }
inline VI whole_lanes(VF x) { return _mm256_cvtps_epi32(x); }
inline int32_t sum_lanes(VI x) {
  alignas(32) int32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), x);
  int32_t sum = 0;
  for (const int32_t lane : lanes) sum += lane;
  return sum;
}
inline void store_codes(int8_t* p, VI x) {
  const __m128i words =
      _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
#endif

#if defined(__AVX512VNNI__)

// A word of weights, ready to be multiplied.
struct Weights {
  explicit Weights(VI word) : bytes(word) {}
  VI bytes;
};
struct Inputs {
  explicit Inputs(int32_t word) : bytes(set_lanes(word)) {}
  VI bytes;
};
inline VI multiply(VI sum, const Inputs& x, const Weights& w) {
  return _mm512_dpbusd_epi32(sum, w.bytes, x.bytes);
}

#else

#if defined(__AVX512F__)
inline VI even_words(VI x) { return _mm512_and_si512(x, _mm512_set1_epi16(0xff)); }
inline VI odd_words(VI x) { return _mm512_srli_epi16(x, 8); }
inline VI multiply_words(VI a, VI b) { return _mm512_madd_epi16(a, b); }
#else
inline VI even_words(VI x) { return _mm256_and_si256(x, _mm256_set1_epi16(0xff)); }
inline VI odd_words(VI x) { return _mm256_srli_epi16(x, 8); }
inline VI multiply_words(VI a, VI b) { return _mm256_madd_epi16(a, b); }
#endif

struct Weights {
  explicit Weights(VI word) : even(even_words(word)), odd(odd_words(word)) {}
  VI even, odd;
};
struct Inputs {
  // Two bytes as two words with their signs.
  static int32_t widen(int32_t first, int32_t second) {
    return (first & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(second) << 16);
  }
  explicit Inputs(int32_t word)
      : even(set_lanes(widen(static_cast<int8_t>(word), static_cast<int8_t>(word >> 16)))),
        odd(set_lanes(widen(static_cast<int8_t>(word >> 8), word >> 24))) {}
  VI even, odd;
};
inline VI multiply(VI sum, const Inputs& x, const Weights& w) {
  return add_lanes(sum, add_lanes(multiply_words(w.even, x.even), multiply_words(w.odd, x.odd)));
}

#endif

// What the tiles of a product share.
struct Shared {
  const QuantisedForm& form;
  const Chunks& chunks;
  const Int8Inputs& inputs;
  int64_t stride;  // of codes
};

// The sums of ROWS rows from `row` on by a panel, [ROWS, PANEL].
template <int ROWS>
void sum_tile(const Shared& shared, int64_t row, const char* panel, int64_t fetch, float* out) {
  constexpr int VECTORS = tile_vectors(ROWS), WIDTH = VECTORS * VF_WIDTH;
  const int64_t count = shared.chunks.count();
  for (int part = 0; part < PANEL; part += WIDTH) {
    VF sums[ROWS][VECTORS];
    LOADOUT_UNROLL
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < VECTORS; ++v) sums[r][v] = vzero();
    for (int64_t i = 0; i < count; ++i) {
      const Chunk chunk = shared.chunks.find(panel, i);
      const int8_t* x = shared.inputs.codes + row * shared.stride + chunk.first;
      const int32_t* x_sums = shared.inputs.sums + row * count + i;
      VI whole[ROWS][VECTORS];
      LOADOUT_UNROLL
      for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) whole[r][v] = set_lanes(-128 * x_sums[r * count]);
      const char* at = chunk.codes + part * WORD_BYTES;
      for (int64_t k = 0; k < chunk.size; k += SPAN, at += PANEL * WORD_BYTES) {
        if (fetch)
          for (int line = 0; line < WIDTH * WORD_BYTES; line += LINE_BYTES)
            _mm_prefetch(at + fetch + line, _MM_HINT_T1);
        VI words[VECTORS];
        for (int v = 0; v < VECTORS; ++v) words[v] = load_bytes(at + v * VF_WIDTH * WORD_BYTES);
        LOADOUT_UNROLL
        for (int r = 0; r < ROWS; ++r) {
          int32_t word;
          std::memcpy(&word, x + r * shared.stride + k, sizeof word);
          const Inputs inputs(word);
          for (int v = 0; v < VECTORS; ++v)
            whole[r][v] = multiply(whole[r][v], inputs, Weights(words[v]));
        }
      }
      for (int v = 0; v < VECTORS; ++v) {
        const int vector = part / VF_WIDTH + v;
        const VF scale = load_scales(chunk.scales, shared.form.scales, vector);
        LOADOUT_UNROLL
        for (int r = 0; r < ROWS; ++r)
          sums[r][v] = vfma(scale, float_lanes(whole[r][v]), sums[r][v]);
        if (!shared.form.has_offsets) continue;
        const char* offsets = chunk.scales + shared.chunks.scale_bytes();
        const VF offset = load_scales(offsets, shared.form.scales, vector);
        LOADOUT_UNROLL
        for (int r = 0; r < ROWS; ++r) {
          const VF sum = vset1(static_cast<float>(x_sums[r * count]));
          sums[r][v] = vfma(offset, sum, sums[r][v]);
        }
      }
    }
    LOADOUT_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const VF scale = vset1(shared.inputs.scales[row + r]);
      for (int v = 0; v < VECTORS; ++v)
        vstore(out + r * PANEL + part + v * VF_WIDTH, vmul(scale, sums[r][v]));
    }
  }
}

using SumTile = void (*)(const Shared&, int64_t, const char*, int64_t, float*);

template <int... ROWS>
constexpr std::array<SumTile, sizeof...(ROWS)> every_height(std::integer_sequence<int, ROWS...>) {
  return {sum_tile<ROWS + 1>...};
}

constexpr auto SUM_TILE = every_height(std::make_integer_sequence<int, MOST_TILE_ROWS>());

#if defined(__AMX_BF16__)

// As sum_tile, of up to 32 rows.
void sum_tiles(TileBlock& block, const Shared& shared, int64_t row, int rows, const char* panel,
               int64_t fetch, float* out) {
  const int64_t count = shared.chunks.count();
  std::fill_n(out, rows * PANEL, 0.0f);
  for (int64_t i = 0; i < count; ++i) {
    const Chunk chunk = shared.chunks.find(panel, i);
    const int32_t* x_sums = shared.inputs.sums + row * count + i;
    const char* at = chunk.codes;
    const int32_t* whole = block.multiply<int32_t>(
        shared.inputs.codes + row * shared.stride + chunk.first, shared.stride, rows, at,
        chunk.size, [&] {
          if (!fetch) return;
          for (int line = 0; line < TILE_ROWS * PANEL * WORD_BYTES; line += LINE_BYTES)
            _mm_prefetch(at + fetch + line, _MM_HINT_T1);
          at += TILE_ROWS * PANEL * WORD_BYTES;
        });
    for (int v = 0; v < PANEL / VF_WIDTH; ++v) {
      const VF scale = load_scales(chunk.scales, shared.form.scales, v);
      VF offset = vzero();
      if (shared.form.has_offsets)
        offset = load_scales(chunk.scales + shared.chunks.scale_bytes(), shared.form.scales, v);
      for (int r = 0; r < rows; ++r) {
        const int64_t lanes = r * PANEL + v * VF_WIDTH;
        const VI sum = add_lanes(load_bytes(reinterpret_cast<const char*>(whole + lanes)),
                                 set_lanes(-128 * x_sums[r * count]));
        VF total = vfma(scale, float_lanes(sum), vload(out + lanes));
        if (shared.form.has_offsets)
          total = vfma(offset, vset1(static_cast<float>(x_sums[r * count])), total);
        vstore(out + lanes, total);
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    const VF scale = vset1(shared.inputs.scales[row + r]);
    for (int lane = 0; lane < PANEL; lane += VF_WIDTH) {
      float* sums = out + r * PANEL + lane;
      vstore(sums, vmul(scale, vload(sums)));
    }
  }
}

#endif

template <typename Out>
class Product {
 public:
  Product(const LinearArgs& args, const QuantisedForm& form, const Int8Inputs& inputs)
      : in_features_(args.in_features),
        chunks_(chunks_of(form, args.in_features)),
        shared_{form, chunks_, inputs, padded(args.in_features)} {}

  int64_t most_rows() const {
    return std::max<int64_t>(MOST_TILE_ROWS, ROW_BLOCK_BYTES_OF<int8_t> / in_features_);
  }

  int64_t panel_bytes() const { return chunks_.panel_bytes(); }

  void multiply(const LinearArgs& args, int64_t first, int64_t last, int64_t panel, int64_t next) {
    alignas(64) float sums[MOST_TILE_ROWS * PANEL];
    const char* weights = static_cast<const char*>(args.weights) + panel * panel_bytes();
    const int64_t rows = last - first, tiles = (rows + MOST_TILE_ROWS - 1) / MOST_TILE_ROWS;
    if (rows <= MAX_ROWS_UNFETCHED) next = 0;
#if defined(__AMX_BF16__)
    if (rows > 1) {
      alignas(64) float sums[TileBlock::ROWS * PANEL];
      for (int64_t row = first; row < last; row += TileBlock::ROWS) {
        const int height = static_cast<int>(std::min<int64_t>(last - row, TileBlock::ROWS));
        sum_tiles(block_, shared_, row, height, weights, row == first ? next : 0, sums);
        store_panel<Out>(args, sums, row, height, panel * PANEL);
      }
      return;
    }
#endif
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t row = first + rows * i / tiles;
      const int height = static_cast<int>(first + rows * (i + 1) / tiles - row);
      SUM_TILE[height - 1](shared_, row, weights, i == 0 ? next : 0, sums);
      store_panel<Out>(args, sums, row, height, panel * PANEL);
    }
  }

 private:
  const int64_t in_features_;
  const Chunks chunks_;
  const Shared shared_;
#if defined(__AMX_BF16__)
  TileBlock block_;
#endif
};

// The scale of a row: its largest magnitude is 127. NaN if the row has numbers that are not finite,
// which a maximum would lose.
template <typename T>
float scale_of(const T* x, int64_t size) {
  VF most = vzero(), lost = vzero();
  for_vectors(size, [&](int64_t at, auto lanes) {
    const VF values = vload(x + at, lanes);
    most = vmax(most, vmax(values, vsub(vzero(), values)));
    lost = vfma(values, vzero(), lost);
  });
  constexpr float tiny = 1.17549435e-38f;  // the least normal number
  return std::max(reduce_max(most) / 127.0f, tiny) + reduce_add(lost);
}

}  // namespace

template <typename T>
void quantise_inputs(const QuantiseInputsArgs& args, const Slice& slice) {
  const QuantisedForm form{nullptr, args.group_size, 0, 0};
  const Chunks chunks = chunks_of(form, args.in_features);
  const int64_t stride = padded(args.in_features);
  const auto range = slice.range(*args.num_tokens);
  for (int64_t row = range.begin; row < range.end; ++row) {
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    const float scale = scale_of(x, args.in_features);
    args.out.scales[row] = scale;
    for (int64_t i = 0; i < chunks.count(); ++i) {
      const Chunk chunk = chunks.find(nullptr, i);
      int8_t* out = args.out.codes + row * stride + chunk.first;
      VI sum = set_lanes(0);
      int64_t at = 0;
      for (; at + VF_WIDTH <= chunk.size; at += VF_WIDTH) {
        const VI codes = whole_lanes(vdiv(vload(x + chunk.first + at), vset1(scale)));
        sum = add_lanes(sum, codes);
        store_codes(out + at, codes);
      }
      if (at < chunk.size) {
        const int n = static_cast<int>(chunk.size - at);
        const VI codes = whole_lanes(vdiv(vload(x + chunk.first + at, n), vset1(scale)));
        sum = add_lanes(sum, codes);
        int8_t last[VF_WIDTH];
        store_codes(last, codes);
        std::memcpy(out + at, last, (n + SPAN - 1) / SPAN * SPAN);
      }
      // A row that is not finite has the scale NaN, and codes whose sum could be too large.
      args.out.sums[row * chunks.count() + i] = std::isfinite(scale) ? sum_lanes(sum) : 0;
    }
  }
}

template <typename Out>
void quantised_int8(const QuantisedArgs& args, const Slice& slice) {
  Product<Out> product(args.linear, args.form, args.inputs);
  multiply_items(product, args.linear, slice);
}

template <typename Out>
void quantised_experts_int8(const ExpertsQuantisedArgs& args, const Slice& slice) {
  Product<Out> product(args.experts.linear, args.form, args.inputs);
  multiply_items(product, args.experts, slice);
}

}  // namespace loadout

LOADOUT_EXPORT(quantise_inputs_float, loadout::QuantiseInputsArgs, loadout::quantise_inputs<float>)
LOADOUT_EXPORT(quantise_inputs_bf16, loadout::QuantiseInputsArgs,
               loadout::quantise_inputs<loadout::bf16>)
LOADOUT_EXPORT(quantised_int8_float, loadout::QuantisedArgs, loadout::quantised_int8<float>)
LOADOUT_EXPORT(quantised_int8_bf16, loadout::QuantisedArgs, loadout::quantised_int8<loadout::bf16>)
LOADOUT_EXPORT(quantised_experts_int8_float, loadout::ExpertsQuantisedArgs,
               loadout::quantised_experts_int8<float>)
LOADOUT_EXPORT(quantised_experts_int8_bf16, loadout::ExpertsQuantisedArgs,
               loadout::quantised_experts_int8<loadout::bf16>)
