// Where keys and values lie: `kernels/attention/kv_cache.py` defines the two layouts.
#pragma once

#include "pairs.h"

namespace loadout {

// One layer of the cache.
struct KvLayer {
  void* data;  // [num_pages, num_kv_heads, 2 (keys, values), page_size * head_dim]
  int64_t page_size;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t is_tiled;

  template <typename T>
  T* keys(int64_t page, int64_t kv_head) const {
    return static_cast<T*>(data) + (page * num_kv_heads + kv_head) * 2 * page_size * head_dim;
  }
  template <typename T>
  T* values(int64_t page, int64_t kv_head) const {
    return keys<T>(page, kv_head) + page_size * head_dim;
  }

  // Element `dim` of the key at `offset` in a page; consecutive dims of one pair are neighbours.
  template <typename T>
  int64_t key_at(int64_t offset, int64_t dim) const {
    constexpr int P = Pair<T>::SIZE;
    if (!is_tiled) return offset * head_dim + dim;
    return (dim / P * page_size + offset) * P + dim % P;
  }
  // Element 0 of the value at `offset` in a page. In tiles the others lie a pair apart, in rows
  // side by side.
  template <typename T>
  int64_t value_at(int64_t offset) const {
    constexpr int P = Pair<T>::SIZE;
    return is_tiled ? offset / P * P * head_dim + offset % P : offset * head_dim;
  }
};

// A step's rows: row r's queries are tokens [query_starts[r], query_starts[r + 1]), the last of the
// context_lengths[r] tokens that its sequence has; position j lies in page
// page_table[r * page_table_stride + j / page_size]. Everything is read when the operation runs.
struct Rows {
  const int32_t* count;
  const int32_t* query_starts;
  const int32_t* context_lengths;
  const int32_t* page_table;
  int64_t page_table_stride;
};

}  // namespace loadout
