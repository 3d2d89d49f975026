// Where keys and values lie: `kernels/attention/kv_cache.py` defines the two layouts.
#pragma once

#include <algorithm>

#include "pairs.h"

namespace loadout {

// One layer of the cache. C is the type of what it holds: the one that attention computes in, or
// FP8. P elements of that one lie in a pair.
struct KvLayer {
  // [num_pages, num_kv_heads, head_bytes]: 2 (keys, values), page_size * head_dim; behind codes of
  // FP8 their scales, of float: 2, page_size.
  void* data;
  int64_t page_size;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t head_bytes;
  int64_t is_tiled;

  template <typename C>
  C* keys(int64_t page, int64_t kv_head) const {
    char* head = static_cast<char*>(data) + (page * num_kv_heads + kv_head) * head_bytes;
    return reinterpret_cast<C*>(head);
  }
  template <typename C>
  C* values(int64_t page, int64_t kv_head) const {
    return keys<C>(page, kv_head) + page_size * head_dim;
  }
  // Of keys; those of values come page_size later.
  float* scales(int64_t page, int64_t kv_head) const {
    return reinterpret_cast<float*>(keys<char>(page, kv_head) + 2 * page_size * head_dim);
  }

  // Element 0 of the key at `offset` in a page. In tiles pairs of the others lie page_size pairs
  // apart, in rows side by side.
  template <int P>
  int64_t key_at(int64_t offset) const {
    return offset * (is_tiled ? P : head_dim);
  }
  // Element 0 of the value at `offset` in a page. In tiles the others lie a pair apart, in rows
  // side by side.
  template <int P>
  int64_t value_at(int64_t offset) const {
    return is_tiled ? offset / P * P * head_dim + offset % P : offset * head_dim;
  }
};

// A step's rows: row r's queries are tokens [query_starts[r], query_starts[r + 1]), the last of the
// context_lengths[r] tokens that its sequence has; position j lies in page
// page_table[r * page_table_stride + j / page_size]. Everything is read when the operation runs.
// `ends`, null or [tokens], has the position before which a token's query sees all, and 0 where it
// sees up to its own.
struct Rows {
  const int32_t* count;
  const int32_t* query_starts;
  const int32_t* context_lengths;
  const int32_t* page_table;
  int64_t page_table_stride;
  const int32_t* ends;

  // The position after the last that the query of query `i` of row r sees, which is at `position`.
  // Later queries of a row see no less.
  int64_t end(int64_t r, int64_t i, int64_t position) const {
    if (!ends) return position + 1;
    return std::max<int64_t>(position + 1, ends[query_starts[r] + i]);
  }
};

}  // namespace loadout
