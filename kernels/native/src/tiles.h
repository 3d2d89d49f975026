// The tile registers of AMX: matrices of up to 16 rows of 64 bytes, and products of two of them.
//
// A product adds 32 terms to each of 16 by 16 sums: the terms of even inputs and of odd ones are
// summed apart, in order, from zero, then both are added to each other and to the sum. So a sum's
// bits depend on the order of its products alone: not on how many rows or columns share them, nor on
// which operand is the left one, nor on terms of zero after its last one.
//
// gcc's intrinsics tell the compiler neither what they read nor what they write; these do.
#pragma once

#if defined(__AMX_BF16__)

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simd.h"

namespace loadout {

constexpr int TILE_ROWS = 16;
constexpr int TILE_COLUMNS = 16;  // of sums
constexpr int TILE_INPUTS = 32;   // of one product
constexpr int TILE_BYTES = 64;    // of a whole row
constexpr int PAIR_BYTES = 4;     // two inputs of one row or column

// How products use the eight registers: sums in 0 to 3, left operands in 4 and 5, right ones in 6
// and 7.
constexpr int LEFT = 4, RIGHT = 6;

// The shapes of all registers, as the processor reads them. 0 rows: the register is not used.
class alignas(64) TileLayout {
 public:
  void set(int tile, int rows, int row_bytes) {
    rows_[tile] = static_cast<uint8_t>(rows);
    row_bytes_[tile] = static_cast<uint16_t>(rows ? row_bytes : 0);
  }

 private:
  uint8_t palette_ = 1, start_row_ = 0, reserved_[14] = {};
  uint16_t row_bytes_[16] = {};
  uint8_t rows_[16] = {};
};

// This thread's tile registers, until the object's end.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  ~Tiles() {
    if (key_) asm volatile("tilerelease" ::: "memory");
  }

  // Shapes the registers as `fill(layout)` says, unless `key` is that of the last call. Loads take
  // 50 ns.
  template <typename Fill>
  void shape(uint64_t key, Fill fill) {
    if (key == key_) return;
    TileLayout layout;
    fill(layout);
    asm volatile("ldtilecfg %0" ::"m"(layout) : "memory");
    key_ = key;
  }

 private:
  uint64_t key_ = 0;  // nobody's
};

// Vectors of this thread, until the object's end, take denormal numbers for zero and make none, as
// products of tiles always do.
class NoDenormals {
 public:
  NoDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  NoDenormals(const NoDenormals&) = delete;
  NoDenormals& operator=(const NoDenormals&) = delete;
  ~NoDenormals() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
};

template <int TILE>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

// Rows `stride` bytes apart.
template <int TILE>
inline void tile_load(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(TILE) : "memory");
}

// The same of rows that nobody reads again before others have displaced them in the first cache.
template <int TILE>
inline void tile_stream(const void* p, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
inline void tile_store(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(TILE) : "memory");
}

// TO += L * R. A row of L has inputs side by side; a row of R has four bytes of each column. Sums are
// floats of inputs in bf16, or int32 of signed bytes in L and unsigned ones in R.
template <typename Sum, int TO, int L, int R>
inline void tile_dot() {
  if constexpr (std::is_same_v<Sum, float>)
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(TO), "i"(L), "i"(R));
  else
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(TO), "i"(L), "i"(R));
}

// To be called at least once in 64 products. A core that adds no vectors of floats for 0.4 us
// switches off a part that stores of tiles need as well, and the next store waits 0.3 us for it
// (measured on a Xeon of 2024). Products of tiles do not keep it on.
inline void keep_vectors_on() {
  VF zero = vzero();
  asm volatile("vaddps %0, %0, %0" : "+v"(zero));
}

}  // namespace loadout

#endif
