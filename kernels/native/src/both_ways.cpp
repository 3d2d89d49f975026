// Attention without a causal mask: each token of a row of the step sees the tokens of its row before
// and behind it, all of them or those within reach. Nothing is stored, and nothing is padded.
//
// A work item is one head of a span of a row's queries. Its keys and values are copied once, as the
// products read them, unless they were packed before, for all items. Then each few queries pass over
// all of them, segment by segment: first their scores, then the softmax, carried along in fp32, then
// the weighted values. Segments begin at fixed positions of the row, so that a query's bits depend on
// its own row alone.
#include <algorithm>

#include "attention_products.h"
#include "attention_state.h"
#include "attention_tiles.h"
#include "slice.h"

namespace loadout {

// Keys and values of a row, of one head after the other, as the products read them: keys
// [num_heads, max_cells / BLOCK, width / P, BLOCK, P], values [num_heads, max_cells / P, width, P],
// where the width is the head's in whole tiles, and P the elements of a pair. Values behind the row's
// end are 0; the rest that nothing was written to may be anything.
struct PackedCells {
  void* keys;  // null: there are none
  void* values;
  int64_t max_cells;  // in whole blocks
};

struct BothWaysArgs {
  const void* qkv;  // [T, qkv_stride]: q, then k, then v, of all heads
  void* out;        // [T, out_stride]; may be the queries, if keys and values are packed
  const int32_t* num_rows;
  const int32_t* query_starts;  // [R + 1]
  int64_t qkv_stride;
  int64_t out_stride;
  int64_t num_heads;
  int64_t head_dim;
  int64_t reach;      // positions that a query sees to either side; negative: all
  int64_t max_cells;  // of a row, in whole blocks: a thread's memory holds as many
  char* scratch;      // [max_threads, scratch_bytes], on 64 bytes
  int64_t scratch_bytes;
  int64_t max_threads;
  int64_t first, end;  // the tokens whose queries are computed; the first one's output is row 0
  int64_t first_head, end_head;  // of these queries
  PackedCells packed;  // of the step's only row, or none
  float scale;         // above 0
};

namespace {

constexpr int64_t SEGMENT = 4 * BLOCK;  // whose scores and weights stay in the first cache
constexpr int64_t MAX_SPAN = 512;       // queries of an item: more share its copies, fewer more threads
constexpr int64_t ITEMS_PER_THREAD = 4;

// Queries [first, last) of a row of `length` tokens, which begins with token `start` of the step.
struct SpanItem {
  int64_t start = 0, length = -1;  // -1: no work is left
  int64_t first = 0, last = 0, head = 0;
};

// Finds items by their numbers, which ascend from call to call.
class SpanItems {
 public:
  SpanItems(const BothWaysArgs& args, int64_t num_threads, int64_t product_rows)
      : args_(args),
        num_heads_(args.end_head - args.first_head),
        num_threads_(num_threads),
        product_rows_(product_rows) {}

  SpanItem find(int64_t number) {
    for (; row_ < *args_.num_rows; ++row_) {
      const int64_t start = args_.query_starts[row_];
      const int64_t length = args_.query_starts[row_ + 1] - start;
      const int64_t first = std::clamp<int64_t>(args_.first - start, 0, length);
      const int64_t queries = std::clamp<int64_t>(args_.end - start, first, length) - first;
      const int64_t size = span_size(queries);
      const int64_t count = (queries + size - 1) / size * num_heads_;
      if (number - before_ < count) {
        const int64_t span = first + (number - before_) / num_heads_ * size;
        const int64_t head = args_.first_head + (number - before_) % num_heads_;
        return {start, length, span, std::min(span + size, first + queries), head};
      }
      before_ += count;
    }
    return {};
  }

 private:
  // The queries of an item. Items that copy nothing are small enough for all threads, but products
  // have all of their rows.
  int64_t span_size(int64_t queries) const {
    if (!args_.packed.keys) {
      const int64_t spans = std::max<int64_t>((queries + MAX_SPAN - 1) / MAX_SPAN, 1);
      return std::max<int64_t>((queries + spans - 1) / spans, 1);
    }
    const int64_t share = queries * num_heads_ / (ITEMS_PER_THREAD * num_threads_);
    return std::clamp(round_up(share, product_rows_), product_rows_, MAX_SPAN);
  }

  const BothWaysArgs& args_;
  const int64_t num_heads_, num_threads_, product_rows_;
  int64_t row_ = 0, before_ = 0;
};

// One thread's memory.
template <typename T, int ROWS>
struct BothWaysScratch {
  T* keys;    // [blocks, width / P, BLOCK, P]
  T* values;  // [max_cells / P, width, P]
  T* q;       // [ROWS, width]
  T* p;       // [blocks of a segment, ROWS, BLOCK]
  T* zeros;   // [width]
  float* s;   // as p
  State state;

  BothWaysScratch(char* memory, int64_t max_cells, int64_t width)
      : keys(carve<T>(memory, max_cells * width)),
        values(carve<T>(memory, max_cells * width)),
        q(carve<T>(memory, ROWS * width)),
        p(carve<T>(memory, ROWS * SEGMENT)),
        zeros(carve<T>(memory, width)),
        s(carve<float>(memory, ROWS * SEGMENT)),
        state(carve<float>(memory, State::size(ROWS, width)), ROWS, width) {
    std::fill_n(zeros, width, T{});
    std::fill_n(q, ROWS * width, T{});
  }

  template <typename U>
  static U* carve(char*& memory, int64_t count) {
    return Scratch<T, ROWS>::template carve<U>(memory, count);
  }
};

// One pair of cells: elements of both in turn.
inline void copy_pair(float* to, const float* first, const float*, int64_t size) {
  std::memcpy(to, first, size * sizeof(float));
}
inline void copy_pair(bf16* to, const bf16* first, const bf16* second, int64_t size) {
  for (int64_t d = 0; d < size; ++d) {
    to[2 * d] = first[d];
    to[2 * d + 1] = second[d];
  }
}

// The key of a cell to its place among packed ones.
template <typename T>
inline void pack_key(T* keys, int64_t cell, const T* key, int64_t size, int64_t width) {
  constexpr int P = Pair<T>::SIZE;
  T* to = keys + cell / BLOCK * BLOCK * width + cell % BLOCK * P;
  int64_t d = 0;
  for (; d + P <= size; d += P) std::memcpy(to + d * BLOCK, key + d, P * sizeof(T));
  for (; d < width; d += P) {
    for (int i = 0; i < P; ++i) to[d * BLOCK + i] = d + i < size ? key[d + i] : T{};
  }
}

template <typename T>
class BothWays {
 public:
  using Products = typename ProductsOf<T>::Type;
  static constexpr int ROWS = Products::ROWS, P = Pair<T>::SIZE;

  BothWays(const BothWaysArgs& args, char* memory)
      : args_(args),
        width_(round_up(args.head_dim, TILE)),
        scratch_(memory, args.max_cells, width_),
        keys_(scratch_.keys),
        values_(scratch_.values) {}

  void run(const SpanItem& item) {
    const PackedCells& packed = args_.packed;
    if (packed.keys) {
      const int64_t first = item.head * packed.max_cells * width_;
      keys_ = static_cast<const T*>(packed.keys) + first;
      values_ = static_cast<const T*>(packed.values) + first;
    } else {
      begin_ = first_seen(item.first) / BLOCK * BLOCK;
      pack(item, end_seen(item, item.last - 1));
    }
    for (int64_t first = item.first; first < item.last; first += ROWS) {
      compute_rows(item, first, static_cast<int>(std::min<int64_t>(item.last - first, ROWS)));
    }
  }

 private:
  int64_t first_seen(int64_t position) const {
    return args_.reach < 0 ? 0 : std::max<int64_t>(position - args_.reach, 0);
  }
  int64_t end_seen(const SpanItem& item, int64_t position) const {
    return args_.reach < 0 ? item.length : std::min(item.length, position + args_.reach + 1);
  }

  // Part 0, 1 or 2, which are q, k and v, of the head of a token of the row.
  const T* part(const SpanItem& item, int64_t position, int64_t index) const {
    const T* token = static_cast<const T*>(args_.qkv) + (item.start + position) * args_.qkv_stride;
    return token + (index * args_.num_heads + item.head) * args_.head_dim;
  }

  // Keys and values of cells [begin_, end). Those behind the end, whose weights are 0, have values
  // of 0; their keys may be anything.
  void pack(const SpanItem& item, int64_t end) {
    const int64_t size = args_.head_dim;
    for (int64_t cell = begin_; cell < end; ++cell) {
      const int64_t at = cell - begin_;
      pack_key<T>(scratch_.keys, at, part(item, cell, 1), size, width_);
    }
    const int64_t filled = begin_ + round_up(end - begin_, TILE);
    for (int64_t cell = begin_; cell < filled; cell += P) {
      const T* first = cell < end ? part(item, cell, 2) : scratch_.zeros;
      const T* second = cell + 1 < end ? part(item, cell + 1, 2) : scratch_.zeros;
      copy_pair(scratch_.values + (cell - begin_) * width_, first, second, size);
    }
  }

  void locate(Cells<T>& cells) const {
    const int64_t first = (cells.begin - begin_) * width_;
    cells.key_stride = BLOCK * P;
    cells.value_stride = width_ * P;
    cells.key_size = round_up(args_.head_dim, P);
    for (int j = 0; j < BLOCK_VECTORS; ++j) cells.keys[j] = keys_ + first + j * VF_WIDTH * P;
    for (int tile = 0; tile < BLOCK_TILES; ++tile) {
      cells.values[tile] = values_ + first + tile * TILE * width_;
    }
  }

  // `count` queries from `first` on, over one segment of cells after the other.
  void compute_rows(const SpanItem& item, int64_t first, int count) {
    for (int i = 0; i < count; ++i) {
      std::memcpy(scratch_.q + i * width_, part(item, first + i, 0), args_.head_dim * sizeof(T));
    }
    State& state = scratch_.state;
    state.clear(count);
    const int64_t end = end_seen(item, first + count - 1);
    int64_t begin = first_seen(first) / BLOCK * BLOCK;
    for (; begin < end; begin += SEGMENT) {
      compute_segment(item, first, count, begin, std::min<int64_t>(begin + SEGMENT, end));
    }
    write(item, first, count);
  }

  void compute_segment(const SpanItem& item, int64_t first, int count, int64_t begin, int64_t end) {
    Cells<T> cells;
    const auto each_block = [&](auto body) {
      for (int64_t at = begin, block = 0; at < end; at += BLOCK, ++block) {
        cells.begin = at;
        cells.end = std::min<int64_t>(at + BLOCK, end);
        locate(cells);
        body(block * ROWS * BLOCK, (cells.end - at + TILE - 1) / TILE);
      }
    };
    each_block([&](int64_t at, int64_t num_tiles) {
      products_.score(scratch_.s + at, scratch_.q, width_, count, cells, num_tiles);
    });
    float factor[ROWS], ones[ROWS];
    for (int i = 0; i < count; ++i) {
      factor[i] = soften(item, first + i, i, begin, end);
      ones[i] = 1.0f;
    }
    each_block([&](int64_t at, int64_t num_tiles) {
      products_.weigh(scratch_.state.out, width_, count, at ? ones : factor, scratch_.p + at, cells,
                      num_tiles);
    });
  }

  // Scores of cells [begin, end) to weights, of row `i`. Returns by what the earlier sums shrink.
  float soften(const SpanItem& item, int64_t position, int i, int64_t begin, int64_t end) {
    State& state = scratch_.state;
    const int64_t own_begin = first_seen(position), own_end = end_seen(item, position);
    float* s = scratch_.s + i * BLOCK;
    T* p = scratch_.p + i * BLOCK;
    // body(block's place, its first cell, Constant<vectors>)
    const auto each_block = [&](auto body) {
      for (int64_t cell = begin, at = 0; cell < end; cell += BLOCK, at += ROWS * BLOCK) {
        const int64_t num_tiles = (std::min<int64_t>(end - cell, BLOCK) + TILE - 1) / TILE;
        with_constant<1, BLOCK_TILES>(static_cast<int>(num_tiles), [&](auto n) {
          body(at, cell, Constant<decltype(n)::value * TILE_VECTORS>{});
        });
      }
    };
    VF tops[BLOCK_VECTORS];
    for (VF& top : tops) top = vset1(-INFINITY);
    each_block([&](int64_t at, int64_t cell, auto n) {
      constexpr int N = decltype(n)::value;
      if (cell < own_begin || cell + N * VF_WIDTH > own_end) {
        for (int j = 0; j < N; ++j) {
          const int64_t lane = cell + j * VF_WIDTH;
          float* each = s + at + j * VF_WIDTH;
          vstore(each, keep_lanes(vload(each), own_begin - lane, own_end - lane, vset1(-INFINITY)));
        }
      }
      LOADOUT_UNROLL for (int j = 0; j < N; ++j) {
        tops[j] = vmax(tops[j], vload(s + at + j * VF_WIDTH));
      }
    });
    VF top = tops[0];
    for (int j = 1; j < BLOCK_VECTORS; ++j) top = vmax(top, tops[j]);
    const float scale = args_.scale * LOG2_E, before = state.largest[i];
    const float largest = std::max(before, reduce_max(top) * scale);
    const float shrink = first_lane(vexp2(vset1(before - largest)));
    state.largest[i] = largest;
    VF sums[BLOCK_VECTORS];
    for (VF& sum : sums) sum = vzero();
    sums[0] = vmul(vload(state.weights + i * VF_WIDTH), vset1(shrink));
    const VF factor = vset1(scale), least = vset1(-largest);
    each_block([&](int64_t at, int64_t, auto n) {
      LOADOUT_UNROLL for (int j = 0; j < decltype(n)::value; ++j) {
        const VF weight = vexp2_for<T>(vfma(vload(s + at + j * VF_WIDTH), factor, least));
        sums[j] = vadd(sums[j], weight);
        vstore(p + at + j * VF_WIDTH, weight);
      }
    });
    VF sum = sums[0];
    for (int j = 1; j < BLOCK_VECTORS; ++j) sum = vadd(sum, sums[j]);
    vstore(state.weights + i * VF_WIDTH, sum);
    return shrink;
  }

  void write(const SpanItem& item, int64_t first, int count) const {
    const State& state = scratch_.state;
    for (int i = 0; i < count; ++i) {
      const int64_t row = item.start + first + i - args_.first;
      T* token = static_cast<T*>(args_.out) + row * args_.out_stride;
      T* out = token + item.head * args_.head_dim;
      const VF scale = vset1(1.0f / reduce_add(vload(state.weights + i * VF_WIDTH)));
      for_vectors(args_.head_dim, [&](int64_t d, auto lanes) {
        vstore(out + d, vmul(vload(state.out + i * width_ + d), scale), lanes);
      });
    }
  }

  const BothWaysArgs& args_;
  const int64_t width_;
  BothWaysScratch<T, ROWS> scratch_;
  const T* keys_;
  const T* values_;
  Products products_;
  int64_t begin_ = 0;  // the first cell that is packed
};

}  // namespace

template <typename T>
void attend_both_ways(const BothWaysArgs& args, const Slice& slice) {
  if (slice.thread >= args.max_threads) return;
  BothWays<T> attention(args, args.scratch + slice.thread * args.scratch_bytes);
  SpanItems items(args, std::min<int64_t>(slice.num_threads, args.max_threads),
                  BothWays<T>::ROWS);
  for (SpanItem item; (item = items.find(slice.take())).length >= 0;) attention.run(item);
}

// Packs keys and values of some tokens of a row.
struct PackBothWaysArgs {
  const void* qkv;  // [count, qkv_stride], as in BothWaysArgs
  const int32_t* count;
  int64_t qkv_stride;
  int64_t num_heads;
  int64_t head_dim;
  int64_t first;  // the first token's place in its row
  PackedCells packed;
};

template <typename T>
void pack_both_ways(const PackBothWaysArgs& args, const Slice& slice) {
  constexpr int P = Pair<T>::SIZE;
  const int64_t size = args.head_dim, width = round_up(size, TILE);
  const int64_t count = *args.count;
  const auto mine = slice.range(count * args.num_heads);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    // Neighbouring tokens of a head write to the same lines.
    const int64_t head = i / count, token = i % count;
    const int64_t cell = args.first + token, before = head * args.packed.max_cells * width;
    const T* key = static_cast<const T*>(args.qkv) + token * args.qkv_stride +
                   (args.num_heads + head) * size;
    pack_key<T>(static_cast<T*>(args.packed.keys) + before, cell, key, size, width);
    const T* value = key + args.num_heads * size;
    T* to = static_cast<T*>(args.packed.values) + before + cell / P * P * width + cell % P;
    for (int64_t d = 0; d < size; ++d) to[d * P] = value[d];
  }
}

}  // namespace loadout

LOADOUT_EXPORT(pack_both_ways_float, loadout::PackBothWaysArgs, loadout::pack_both_ways<float>)
LOADOUT_EXPORT(pack_both_ways_bf16, loadout::PackBothWaysArgs,
               loadout::pack_both_ways<loadout::bf16>)
LOADOUT_EXPORT(attend_both_ways_float, loadout::BothWaysArgs, loadout::attend_both_ways<float>)
LOADOUT_EXPORT(attend_both_ways_bf16, loadout::BothWaysArgs,
               loadout::attend_both_ways<loadout::bf16>)
