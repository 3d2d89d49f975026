// Attention over paged keys and values: decode rows and chunks of prompts in one batch.
//
// A work item is one block of a row's queries with the query heads of one or more key heads. Per
// key head and block of cells these are the rows of two small matrix products, with the softmax
// carried along in fp32. Key heads that fit in one item stay together: their cells are neighbours,
// and memory is read fastest in long pieces. What a query gets depends on its own sequence alone,
// bit for bit: cells are taken in blocks and parts at fixed positions, and the parts are merged in
// order, whoever computed them.
//
// Keys and values in FP8 are widened block by block, without their scales: a key's multiplies its
// scores, a value's its weights.
#include <algorithm>
#include <type_traits>

#include "attention_products.h"
#include "attention_state.h"
#include "attention_tiles.h"
#include "e4m3.h"
#include "slice.h"

namespace loadout {

struct AttendArgs {
  KvLayer cache;
  Rows rows;
  const void* q;  // token t, head h: q + t * q_stride + h * head_dim
  void* out;
  int64_t q_stride;
  int64_t out_stride;
  int64_t group;
  int64_t window;
  int64_t block_rows;
  int64_t split_rows;
  const AttentionItem* items;
  const int32_t* num_items;
  std::atomic<int32_t>* arrived;  // [max_slots] zeros; zeros again at the end
  float* partials;                // [max_slots, MAX_PARTS] states of split_rows rows
  char* scratch;                  // [max_threads, scratch_bytes], on 64 bytes
  int64_t scratch_bytes;
  int64_t max_threads;
  const float* sinks;  // [query heads], each one more score, without a value; null: none
  float scale;
  float softcap;  // 0: none; else scores are softcap * tanh(score / softcap)
};

namespace {

// One item, block by block. The cache holds C: T, or FP8.
template <typename T, typename C>
struct Attention {
  using Products = typename ProductsOf<T>::Type;
  using Memory = Scratch<T, Products::ROWS>;
  static constexpr int P = Pair<T>::SIZE;
  static constexpr bool IS_FP8 = std::is_same_v<C, e4m3>;
  // Cells of one key head.
  struct Range {
    const int32_t* pages;
    int64_t begin, end, kv_head;
  };

  const AttendArgs& args;
  Memory& scratch;
  Products& products;
  const AttentionItem& item;
  const AttentionItem* following;  // what this thread likely computes afterwards, or null
  const int32_t* pages;
  int64_t head_rows;       // queries * group
  int64_t num_rows;        // those of all key heads, head by head
  int64_t first_position;  // of the first query

  Attention(const AttendArgs& args, Memory& scratch, Products& products, const AttentionItem& item,
            const AttentionItem* following)
      : args(args),
        scratch(scratch),
        products(products),
        item(item),
        following(following),
        pages(pages_of(item)),
        head_rows(item.num_queries * args.group),
        num_rows(head_rows * item.num_heads),
        first_position(args.rows.context_lengths[item.row] - num_queries_of(item.row) +
                       item.first_query) {}

  int64_t width() const { return scratch.total.width; }

  int64_t num_queries_of(int64_t row) const {
    return args.rows.query_starts[row + 1] - args.rows.query_starts[row];
  }
  // The cell after the last that a query of this item sees.
  int64_t end_of(int64_t query) const {
    return args.rows.end(item.row, item.first_query + query, first_position + query);
  }

  const int32_t* pages_of(const AttentionItem& of) const {
    return args.rows.page_table + of.row * args.rows.page_table_stride;
  }

  // Row r of a key head's products is query r / group, query head r % group.
  void pack_queries() {
    const int64_t size = args.cache.head_dim;
    const T* q = static_cast<const T*>(args.q);
    for (int64_t r = 0; r < num_rows; ++r) {
      T* row = scratch.q + r * width();
      std::memcpy(row, q + token(r) * args.q_stride + query_head(r) * size, size * sizeof(T));
      std::fill(row + size, row + width(), T{});
    }
  }

  int64_t token(int64_t r) const {
    return args.rows.query_starts[item.row] + item.first_query + r % head_rows / args.group;
  }
  int64_t query_head(int64_t r) const {
    return (item.first_head + r / head_rows) * args.group + r % args.group;
  }

  void compute_part(int64_t part, State& state) {
    state.clear(num_rows);
    const int64_t begin = start_of(item, part);
    const int64_t end = std::min<int64_t>((part + 1) * item.part_cells, item.end_cell);
    Cells<T> cells;
    for (cells.begin = begin; cells.begin < end; cells.begin = cells.end) {
      cells.end = std::min<int64_t>(cells.begin / BLOCK * BLOCK + BLOCK, end);
      for (int64_t head = 0; head < item.num_heads; ++head) {
        locate(cells, item.first_head + head, after(cells, head, end));
        compute_head(cells, head * head_rows, state);
      }
    }
  }

  void compute_head(const Cells<T>& cells, int64_t first, const State& state) {
    constexpr int64_t ROWS = Products::ROWS;
    const int64_t num_chunks = (head_rows + ROWS - 1) / ROWS;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      const int64_t begin = head_rows * chunk / num_chunks;
      const int64_t end = head_rows * (chunk + 1) / num_chunks;
      compute_rows(cells, first, begin, static_cast<int>(end - begin), state);
    }
  }

  // Rows [begin, begin + count) of the key head whose rows start at `first`.
  void compute_rows(const Cells<T>& cells, int64_t first, int64_t begin, int count,
                    const State& state) {
    const int64_t last_end = end_of((begin + count - 1) / args.group);
    const int64_t num_cells = std::min(cells.end, last_end) - cells.begin;
    if (num_cells <= 0) return;
    const int64_t num_tiles = (num_cells + TILE - 1) / TILE;
    first += begin;
    products.score(scratch.s, scratch.q + first * width(), width(), count, cells, num_tiles);
    float factor[Products::ROWS];
    with_constant<1, BLOCK_TILES>(static_cast<int>(num_tiles), [&](auto n) {
      for (int i = 0; i < count; ++i) {
        const int64_t query = (begin + i) / args.group;
        factor[i] = soften<decltype(n)::value * TILE_VECTORS>(cells, query, first + i, i, state);
      }
    });
    products.weigh(state.out + first * width(), width(), count, factor, scratch.p, cells,
                   num_tiles);
  }

  // Scores to weights, for row `i` of the chunk. Returns by what the earlier sums shrink.
  template <int N>
  float soften(const Cells<T>& cells, int64_t query, int64_t row, int i, const State& state) {
    const int64_t position = first_position + query;
    const int64_t begin = args.window ? position - args.window + 1 - cells.begin : 0;
    const int64_t end = std::min(cells.end, end_of(query)) - cells.begin;
    const VF scale = vset1(args.softcap ? args.scale / args.softcap : args.scale * LOG2_E);
    const float* s = scratch.s + i * BLOCK;
    T* p = scratch.p + i * BLOCK;
    VF x[N];
    LOADOUT_UNROLL for (int j = 0; j < N; ++j) x[j] = vmul(vload(s + j * VF_WIDTH), scale);
    if constexpr (IS_FP8) {
      LOADOUT_UNROLL for (int j = 0; j < N; ++j) {
        x[j] = vmul(x[j], vload(scratch.key_scales + j * VF_WIDTH));
      }
    }
    if (args.softcap) {
      const VF cap = vset1(args.softcap * LOG2_E);
      for (int j = 0; j < N; ++j) x[j] = vmul(vtanh(x[j]), cap);
    }
    if (begin > 0 || end < N * VF_WIDTH) {
      LOADOUT_UNROLL for (int j = 0; j < N; ++j) {
        const int64_t at = j * VF_WIDTH;
        x[j] = keep_lanes(x[j], begin - at, end - at, vset1(-INFINITY));
      }
    }
    VF top = vset1(state.largest[row]);
    LOADOUT_UNROLL for (int j = 0; j < N; ++j) top = vmax(top, x[j]);
    const VF largest = vset1(reduce_max(top));
    const float before = state.largest[row];
    float shrink = 1.0f;  // as it mostly is
    VF sum = vload(state.weights + row * VF_WIDTH);
    if (!(first_lane(largest) == before)) {
      const VF factor = vexp2(vsub(vset1(before), largest));
      shrink = first_lane(factor);
      state.largest[row] = first_lane(largest);
      sum = vmul(sum, factor);
    }
    LOADOUT_UNROLL for (int j = 0; j < N; ++j) {
      x[j] = vexp2_for<T>(vsub(x[j], largest));
      sum = vadd(sum, x[j]);
      if constexpr (IS_FP8) x[j] = vmul(x[j], vload(scratch.value_scales + j * VF_WIDTH));
      vstore(p + j * VF_WIDTH, x[j]);
    }
    vstore(state.weights + row * VF_WIDTH, sum);
    return shrink;
  }

  void locate(Cells<T>& cells, int64_t kv_head, const Range& next) {
    cells.key_size = round_up(args.cache.head_dim, P);
    if constexpr (IS_FP8) copy_scales(cells, kv_head);
    if (!args.cache.is_tiled) {
      pack_rows(cells, kv_head);
    } else if constexpr (IS_FP8) {
      widen_tiles(cells, kv_head, next);
    } else {
      locate_tiles(cells, kv_head);
    }
  }

  // Those of cells where nobody looks, which may hold anything, are 0.
  void copy_scales(const Cells<T>& cells, int64_t kv_head) {
    const KvLayer& cache = args.cache;
    const int64_t first = std::max<int64_t>(item.first_cell, cells.begin);
    const int64_t end = std::min<int64_t>(item.end_cell, cells.end);
    std::fill_n(scratch.key_scales, BLOCK, 0.0f);
    std::fill_n(scratch.value_scales, BLOCK, 0.0f);
    for (int64_t cell = first, count; cell < end; cell += count) {
      const int64_t offset = cell % cache.page_size;
      count = std::min(end - cell, cache.page_size - offset);
      const float* scales = cache.scales(pages[cell / cache.page_size], kv_head) + offset;
      std::memcpy(scratch.key_scales + cell - cells.begin, scales, count * sizeof(float));
      std::memcpy(scratch.value_scales + cell - cells.begin, scales + cache.page_size,
                  count * sizeof(float));
    }
  }

  // What comes next is asked for tile by tile: it takes about as long to come as these to widen.
  void widen_tiles(Cells<T>& cells, int64_t kv_head, const Range& next) {
    const KvLayer& cache = args.cache;
    for (int64_t tile = 0; cells.begin + tile * TILE < cells.end; ++tile) {
      const int64_t cell = first_seen(cells.begin + tile * TILE);
      const int64_t page = pages[cell / cache.page_size], offset = cell % cache.page_size;
      const C* keys = cache.keys<C>(page, kv_head) + offset * P;
      T* to = scratch.keys + tile * TILE * P;
      for (int64_t d = 0; d < cache.head_dim; d += P) {
        widen_codes(to + d * BLOCK, keys + d * cache.page_size, TILE * P);
      }
      const C* values = cache.values<C>(page, kv_head) + cache.value_at<P>(offset);
      widen_codes(scratch.values + tile * TILE * width(), values, TILE * width());
      const int64_t at = next.begin + tile * TILE;
      prefetch(next, at, std::min(at + TILE, next.end));
    }
    use_scratch(cells);
  }

  // The block lies in the scratch memory.
  void use_scratch(Cells<T>& cells) const {
    cells.key_stride = BLOCK * P;
    cells.value_stride = width() * P;
    for (int j = 0; j < BLOCK_VECTORS; ++j) cells.keys[j] = scratch.keys + j * VF_WIDTH * P;
    for (int tile = 0; tile < BLOCK_TILES; ++tile) {
      cells.values[tile] = scratch.values + tile * TILE * width();
    }
  }

  void locate_tiles(Cells<T>& cells, int64_t kv_head) {
    const KvLayer& cache = args.cache;
    cells.key_stride = cache.page_size * P;
    cells.value_stride = width() * P;
    for (int64_t tile = 0; cells.begin + tile * TILE < cells.end; ++tile) {
      const int64_t cell = cells.begin + tile * TILE, seen = first_seen(cell);
      const int64_t page = pages[seen / cache.page_size], offset = seen % cache.page_size;
      const T* keys = cache.keys<C>(page, kv_head) + offset * P;
      for (int j = 0; j < TILE_VECTORS; ++j) {
        cells.keys[tile * TILE_VECTORS + j] = keys + j * VF_WIDTH * P;
      }
      const T* values = cache.values<C>(page, kv_head) + cache.value_at<P>(offset);
      const bool is_whole = cell >= item.first_cell && cell + TILE <= item.end_cell;
      cells.values[tile] = is_whole ? values : copy_seen(values, tile, cell);
    }
    if constexpr (Products::CELLS > TILE) join_tiles(cells);
  }

  // A tile of cells, or the first that is seen: earlier pages may be another sequence's by now.
  int64_t first_seen(int64_t cell) const {
    return std::max<int64_t>(cell, item.first_cell / TILE * TILE);
  }

  // Tiles of values that are summed at once lie behind each other: those of two pages are copied.
  void join_tiles(Cells<T>& cells) {
    const int64_t size = TILE * width();
    for (int64_t tile = 1; cells.begin + tile * TILE < cells.end; tile += 2) {
      const T** pair = cells.values + tile - 1;
      if (pair[1] == pair[0] + size) continue;
      T* copies = scratch.values + (tile - 1) * size;
      for (int i = 0; i < 2; ++i) {
        if (pair[i] != copies + i * size) std::memcpy(copies + i * size, pair[i], size * sizeof(T));
        pair[i] = copies + i * size;
      }
    }
  }

  // A tile of values with zeros where nobody looks: those cells may hold anything, even NaN.
  const T* copy_seen(const T* values, int64_t tile, int64_t cell) {
    T* copy = scratch.values + tile * TILE * width();
    const int64_t first = std::max<int64_t>(item.first_cell - cell, 0);
    const int64_t end = std::min<int64_t>(item.end_cell - cell, TILE);
    for (int64_t c = 0; c < TILE; c += P) {
      const T* from = values + c * width();
      T* to = copy + c * width();
      if (c >= first && c + P <= end) {
        std::memcpy(to, from, P * width() * sizeof(T));
        continue;
      }
      std::fill_n(to, P * width(), T{});
      for (int64_t seen = std::max(c, first); seen < std::min(c + P, end); ++seen) {
        for (int64_t d = 0; d < width(); ++d) to[d * P + seen - c] = from[d * P + seen - c];
      }
    }
    return copy;
  }

  // Pages in rows: the block is copied into tiles.
  void pack_rows(Cells<T>& cells, int64_t kv_head) {
    const KvLayer& cache = args.cache;
    const int64_t num_tiles = (cells.end - cells.begin + TILE - 1) / TILE;
    std::fill_n(scratch.keys, BLOCK * width(), T{});
    std::fill_n(scratch.values, num_tiles * TILE * width(), T{});
    for (int64_t c = std::max<int64_t>(item.first_cell - cells.begin, 0);
         c < cells.end - cells.begin; ++c) {
      const int64_t cell = cells.begin + c;
      const int64_t page = pages[cell / cache.page_size], offset = cell % cache.page_size;
      const C* k = cache.keys<C>(page, kv_head) + offset * cache.head_dim;
      const C* v = cache.values<C>(page, kv_head) + offset * cache.head_dim;
      for (int64_t d = 0; d < cache.head_dim; ++d) {
        scratch.keys[(d / P * BLOCK + c) * P + d % P] = widened(k[d]);
        scratch.values[(c / P * width() + d) * P + c % P] = widened(v[d]);
      }
    }
    use_scratch(cells);
  }

  static T widened(C element) {
    if constexpr (IS_FP8) {
      return from_float<T>(to_float(element));
    } else {
      return element;
    }
  }

  // What comes after key head `head` of these cells: the next head, the next block, or the
  // beginning of the following item.
  Range after(const Cells<T>& cells, int64_t head, int64_t end) const {
    const auto block = [](int64_t begin, int64_t end) {
      return std::min<int64_t>(begin / BLOCK * BLOCK + BLOCK, end);
    };
    if (head + 1 < item.num_heads) return {pages, cells.begin, cells.end, item.first_head + head + 1};
    if (cells.end < end) return {pages, cells.end, block(cells.end, end), item.first_head};
    if (!following) return {pages, 0, 0, 0};
    const int64_t begin = start_of(*following, following->first_part);
    return {pages_of(*following), begin, block(begin, following->end_cell), following->first_head};
  }

  static int64_t start_of(const AttentionItem& item, int64_t part) {
    constexpr int64_t CELLS = Products::CELLS;
    return std::max<int64_t>(part * item.part_cells, item.first_cell / CELLS * CELLS);
  }

  // Asks for cells [begin, end) of a range: into the second cache, because the first one is full of
  // widened cells. Plain tiles, which are twice as long, come in time without.
  void prefetch(const Range& range, int64_t begin, int64_t end) const {
    const KvLayer& cache = args.cache;
    constexpr int64_t LINE = 64 / sizeof(C);
    const int64_t pairs_of_line = std::max<int64_t>(1, LINE / (cache.page_size * P));
    const auto fetch = [](const auto* at) { asm volatile("prefetcht1 %0" : : "m"(*at)); };
    for (int64_t cell = begin; cell < end; cell += TILE) {
      const int64_t page = range.pages[cell / cache.page_size], offset = cell % cache.page_size;
      const C* keys = cache.keys<C>(page, range.kv_head) + offset * P;
      const C* values = cache.values<C>(page, range.kv_head) + cache.value_at<P>(offset);
      for (int64_t d = 0; d < cache.head_dim; d += P * pairs_of_line) {
        fetch(keys + d * cache.page_size);
      }
      for (int64_t at = 0; at < TILE * cache.head_dim; at += LINE) fetch(values + at);
      const float* scales = cache.scales(page, range.kv_head) + offset;
      fetch(scales);
      fetch(scales + cache.page_size);
    }
  }

  // Sinks count here, and so once, however many parts there were.
  void write(const State& state) const {
    const int64_t size = args.cache.head_dim;
    for (int64_t r = 0; r < num_rows; ++r) {
      T* row = static_cast<T*>(args.out) + token(r) * args.out_stride + query_head(r) * size;
      float sum = reduce_add(vload(state.weights + r * VF_WIDTH));
      if (args.sinks) sum += sink_weight(query_head(r), state.largest[r]);
      const VF scale = vset1(1.0f / sum);
      for_vectors(size, [&](int64_t d, auto lanes) {
        vstore(row + d, vmul(vload(state.out + r * width() + d), scale), lanes);
      });
    }
  }

  // Relative to the largest score, as the other weights are; 2^127 if all scores are far below.
  float sink_weight(int64_t query_head, float largest) const {
    const float score = args.sinks[query_head] * LOG2_E - largest;
    return first_lane(vexp2(vmin(vset1(127.0f), vset1(score))));
  }

  void run() {
    pack_queries();
    if (item.slot >= 0) return run_split();
    compute_part(item.first_part, scratch.total);
    for (int64_t part = 1; part < item.num_parts; ++part) {
      compute_part(item.first_part + part, scratch.part);
      scratch.total.merge(scratch.part, num_rows);
    }
    write(scratch.total);
  }

  // Whoever completes the last part merges all of them, in order.
  void run_split() {
    const int64_t first = item.first_cell / item.part_cells;
    const int32_t count = (item.end_cell - 1) / item.part_cells + 1 - first;
    const auto partial = [&](int64_t part) {
      const int64_t size = State::size(args.split_rows, width());
      return State(args.partials + (item.slot * MAX_PARTS + part) * size, args.split_rows, width());
    };
    State own = partial(item.first_part - first);
    compute_part(item.first_part, own);
    if (args.arrived[item.slot].fetch_add(1, std::memory_order_acq_rel) + 1 < count) return;
    args.arrived[item.slot].store(0, std::memory_order_relaxed);
    State total = partial(0);
    for (int32_t part = 1; part < count; ++part) total.merge(partial(part), num_rows);
    write(total);
  }
};

}  // namespace

template <typename T, typename C>
void attend(const AttendArgs& args, const Slice& slice) {
  if (slice.thread >= args.max_threads) return;
  const int64_t width = round_up(args.cache.head_dim, TILE);
  typename Attention<T, C>::Memory scratch(args.scratch + slice.thread * args.scratch_bytes,
                                           args.block_rows, width);
  typename Attention<T, C>::Products products;
  const int64_t num_items = *args.num_items;
  for (int64_t i; (i = slice.take()) < num_items;) {
    const int64_t next = slice.counter->load(std::memory_order_relaxed);
    const AttentionItem* following = next < num_items ? &args.items[next] : nullptr;
    Attention<T, C>(args, scratch, products, args.items[i], following).run();
  }
}

}  // namespace loadout

LOADOUT_EXPORT(attend_float, loadout::AttendArgs, (loadout::attend<float, float>))
LOADOUT_EXPORT(attend_bf16, loadout::AttendArgs, (loadout::attend<loadout::bf16, loadout::bf16>))
LOADOUT_EXPORT(attend_fp8_float, loadout::AttendArgs, (loadout::attend<float, loadout::e4m3>))
LOADOUT_EXPORT(attend_fp8_bf16, loadout::AttendArgs,
               (loadout::attend<loadout::bf16, loadout::e4m3>))
