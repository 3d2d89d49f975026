// Sums, columns and rows that the processes of several ranks exchange, through memory that they share.
//
// Ranks are in groups, each with a part of the memory. Each thread of a rank exchanges with the same thread of all others, piece by piece: it copies its
// piece to its own memory there, says so, waits until all others have, and reads theirs. A thread has
// two memories and takes them in turns: when it overwrites one, all have come to the round after the
// one in which they read it.
//
// A rank that does not come in time, or exchanges something else, fails the memory of all groups. Every
// exchange returns at once from then on, with anything as its result, and whoever ran the program asks.
#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

#include "lora.h"
#include "simd.h"
#include "slice.h"

namespace loadout {

// `kernels/ranks/memory.py` has the same sizes and faults.
constexpr int64_t MEMBER_BYTES = 128;  // two cache lines, because processors fetch them in pairs
constexpr int64_t PIECE_BYTES = 64 << 10;
constexpr int64_t SHARE_BYTES = 2 * (MEMBER_BYTES + PIECE_BYTES);  // both memories of a thread
enum Fault : uint32_t { NONE, CLOSED, TIMEOUT, DISAGREEMENT };

struct RanksArgs {
  // The fault of all groups.
  std::atomic<uint32_t>* fault;
  // The group's: a line of each thread, by rank; and the share of each.
  uint8_t* memory;
  int64_t rank;  // in the group
  int64_t num_ranks;
  int64_t max_threads;
  int64_t timeout_ms;
  // As long as ranks that do the same work are apart: to be woken takes 50 us and more. Who waits
  // longer leaves the processor to others.
  int64_t spin_ns;
};

// How many pieces a thread has given, and, where nobody polls, the nanoseconds that it has spent in
// exchanges.
struct alignas(MEMBER_BYTES) Line {
  std::atomic<uint32_t> round;
  std::atomic<int32_t> num_sleeping;
  alignas(MEMBER_BYTES / 2) std::atomic<int64_t> spent_ns;
};
static_assert(sizeof(Line) == MEMBER_BYTES && sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

// Stands before each piece.
struct Header {
  int64_t num_items;
  int64_t num_threads;
};

// One thread's part of an exchange of `num_items`.
class Round {
 public:
  Round(const RanksArgs& args, const Slice& slice, int64_t num_items)
      : args_(args),
        thread_(slice.thread),
        header_{num_items, slice.num_threads},
        round_(thread_ < args.max_threads
                   ? line(args.rank).round.load(std::memory_order_relaxed) : 0) {}

  bool has_failed() const { return fault().load(std::memory_order_relaxed) != NONE; }

  // The piece of a rank in this round, PIECE_BYTES.
  uint8_t* piece(int64_t rank) const { return share(rank) + MEMBER_BYTES; }

  // Gives this thread's piece. Returns true when those of all others are there; false when the memory
  // has failed.
  bool meet() {
    write_header();
    say_done();
    for (int64_t rank = 0; rank < args_.num_ranks; ++rank) {
      if (rank == args_.rank) continue;
      if (!wait(line(rank), round_ + 1)) return false;
      if (!has_header(rank)) return fail(DISAGREEMENT);
    }
    return true;
  }

  // Waits until the other of two ranks has taken the piece whose memory is this round's.
  bool wait_for_place() { return wait(line(other()), round_ - 1); }

  // Gives this thread's piece to the other of two ranks, and waits for nobody.
  void give() {
    write_header();
    say_done();
  }

  // Waits for the piece of the other of two ranks.
  bool wait_for_piece() {
    if (!wait(line(other()), round_ + 1)) return false;
    return has_header(other()) || fail(DISAGREEMENT);
  }

  // Says that this thread has taken the other's piece.
  void take() { say_done(); }

  int64_t other() const { return 1 - args_.rank; }

  void next_round() { ++round_; }

  // Whether the memory has a share for this thread.
  bool has_place() { return thread_ < args_.max_threads || fail(DISAGREEMENT); }

  void add_spent(int64_t nanoseconds) {
    line(args_.rank).spent_ns.fetch_add(nanoseconds, std::memory_order_relaxed);
  }

 private:
  static constexpr int SPINS = 64;  // between two looks at the clock
  static constexpr int64_t SLEEP_NS = 50'000'000;  // then it looks whether the memory has failed

  std::atomic<uint32_t>& fault() const { return *args_.fault; }

  Line& line(int64_t rank) const {
    return reinterpret_cast<Line*>(args_.memory)[rank * args_.max_threads + thread_];
  }

  void write_header() { std::memcpy(share(args_.rank), &header_, sizeof header_); }
  bool has_header(int64_t rank) const {
    return !std::memcmp(share(rank), &header_, sizeof header_);
  }

  void say_done() {
    Line& own = line(args_.rank);
    own.round.store(round_ + 1);
    if (own.num_sleeping.load() > 0) wake_all(own.round);
  }

  uint8_t* share(int64_t rank) const {
    const int64_t lines_bytes = MEMBER_BYTES * args_.num_ranks * args_.max_threads;
    const int64_t index = rank * args_.max_threads + thread_;
    return args_.memory + lines_bytes + index * SHARE_BYTES + (round_ & 1) * (SHARE_BYTES / 2);
  }

  static bool has_come(const Line& other, uint32_t round) {
    return static_cast<int32_t>(other.round.load() - round) >= 0;
  }

  bool wait(Line& other, uint32_t round) {
    if (has_come(other, round)) return true;
    const auto spins_until =
        std::chrono::steady_clock::now() + std::chrono::nanoseconds(args_.spin_ns);
    do {
      for (int i = 0; i < SPINS; ++i) {
        if (has_come(other, round)) return true;
        _mm_pause();
      }
    } while (std::chrono::steady_clock::now() < spins_until);
    // Sleeps are counted, and not time: all ranks may have been stopped together.
    int64_t left_ns = args_.timeout_ms * 1'000'000;
    other.num_sleeping.fetch_add(1);
    while (!has_failed()) {
      const uint32_t seen = other.round.load();
      if (static_cast<int32_t>(seen - round) >= 0) break;
      if (left_ns <= 0) fail(TIMEOUT);
      if (!sleep(other.round, seen)) left_ns -= SLEEP_NS;
    }
    other.num_sleeping.fetch_sub(1);
    return has_come(other, round);
  }

  bool fail(Fault cause) {
    uint32_t none = NONE;
    fault().compare_exchange_strong(none, cause);
    return false;
  }

#if defined(__linux__)
  // Unless the round is not the one that was seen any more. Returns whether it was woken before the
  // end of the time.
  bool sleep(std::atomic<uint32_t>& round, uint32_t seen) {
    const timespec most{0, SLEEP_NS};
    return syscall(SYS_futex, &round, FUTEX_WAIT, seen, &most) == 0 || errno != ETIMEDOUT;
  }
  void wake_all(std::atomic<uint32_t>& round) { syscall(SYS_futex, &round, FUTEX_WAKE, INT_MAX); }
#else
  bool sleep(std::atomic<uint32_t>&, uint32_t) {
    std::this_thread::sleep_for(std::chrono::nanoseconds(SLEEP_NS));
    return false;
  }
  void wake_all(std::atomic<uint32_t>&) {}
#endif

  const RanksArgs& args_;
  const int64_t thread_;
  const Header header_;
  uint32_t round_;
};

// Calls body(row, column, place, n) for the runs of items [begin, end) that are of one row of `width`
// items; `place` is the number of items before.
template <typename Body>
inline void for_runs(int64_t begin, int64_t end, int64_t width, Body body) {
  for (int64_t at = begin; at < end;) {
    const int64_t row = at / width, column = at % width;
    const int64_t n = std::min(width - column, end - at);
    body(row, column, at - begin, n);
    at += n;
  }
}

// Calls step(begin, end, round) for each piece of [0, num_items), until it returns false.
template <typename T, typename Step>
inline void in_pieces(const RanksArgs& ranks, const Slice& slice, int64_t num_items, Step step) {
  constexpr int64_t LINE_ITEMS = 64 / sizeof(T), PIECE_ITEMS = PIECE_BYTES / sizeof(T);
  const auto lines = slice.range((num_items + LINE_ITEMS - 1) / LINE_ITEMS);
  const int64_t last = std::min(num_items, lines.end * LINE_ITEMS);
  Round round(ranks, slice, num_items);
  const bool counts = slice.thread == 0;  // one thread speaks for all
  std::chrono::steady_clock::time_point began;
  if (counts) began = std::chrono::steady_clock::now();
  for (int64_t begin = lines.begin * LINE_ITEMS; begin < last; begin += PIECE_ITEMS) {
    if (round.has_failed() || !round.has_place()) return;
    if (!step(begin, std::min(begin + PIECE_ITEMS, last), round)) return;
    round.next_round();
  }
  if (!counts) return;
  const std::chrono::nanoseconds spent = std::chrono::steady_clock::now() - began;
  round.add_spent(spent.count());
}

// Gives pieces of [0, num_items) to `write(begin, end, own)`, and, when all ranks have given theirs, to
// `read(begin, end, round)`.
template <typename T, typename Write, typename Read>
inline void exchange(const RanksArgs& ranks, const Slice& slice, int64_t num_items, Write write,
                     Read read) {
  in_pieces<T>(ranks, slice, num_items, [&](int64_t begin, int64_t end, Round& round) {
    write(begin, end, reinterpret_cast<T*>(round.piece(ranks.rank)));
    if (!round.meet()) return false;
    read(begin, end, round);
    return true;
  });
}

// x = the sum of all ranks' x, in fp32, in the order of ranks, rounded once: of [count, size], rows
// stride apart.
template <typename T>
void sum_rows(const RanksArgs& ranks, const Slice& slice, T* x, int64_t count, int64_t size,
              int64_t stride) {
  const auto row_of = [&](int64_t row) { return x + row * stride; };
  exchange<T>(
      ranks, slice, count * size,
      [&](int64_t begin, int64_t end, T* own) {
        for_runs(begin, end, size, [&](int64_t row, int64_t column, int64_t place, int64_t n) {
          std::memcpy(own + place, row_of(row) + column, n * sizeof(T));
        });
      },
      [&](int64_t begin, int64_t end, const Round& round) {
        for_runs(begin, end, size, [&](int64_t row, int64_t column, int64_t place, int64_t n) {
          T* out = row_of(row) + column;
          for_vectors(n, [&](int64_t at, auto lanes) {
            const auto term = [&](int64_t rank) {
              return vload(reinterpret_cast<const T*>(round.piece(rank)) + place + at, lanes);
            };
            VF sum = term(0);
            for (int64_t rank = 1; rank < ranks.num_ranks; ++rank) sum = vadd(sum, term(rank));
            vstore(out + at, sum, lanes);
          });
        });
      });
}

struct SumRanksArgs {
  RanksArgs ranks;
  void* x;  // [count, size], rows stride apart
  const int32_t* count;
  int64_t size;
  int64_t stride;
};

template <typename T>
void sum_ranks(const SumRanksArgs& args, const Slice& slice) {
  sum_rows(args.ranks, slice, static_cast<T*>(args.x), *args.count, args.size, args.stride);
}

// The sums of the rows that shrink makes of parts of the inputs, for `lora_expand`: of all places of
// tokens, whatever the ranks of their adapters.
struct SumShrunkArgs {
  RanksArgs ranks;
  LoraPlan plan;
  void* y;  // as in LoraArgs
  int64_t num_targets;
  int64_t max_rank;
};

template <typename T>
void sum_shrunk(const SumShrunkArgs& args, const Slice& slice) {
  const int32_t num_items = *args.plan.num_items;
  if (num_items == 0) return;  // on all ranks, whose plans are equal
  const LoraItem& last = args.plan.items[num_items - 1];
  const int64_t num_places = last.first + last.count;
  sum_rows(args.ranks, slice, static_cast<T*>(args.y), args.num_targets, num_places * args.max_rank,
           args.plan.max_tokens * args.max_rank);
}

// x has the columns of all ranks, one behind the other: rank r's are [r * part, (r + 1) * part), and the
// last rank's may be fewer. Each gives its own; the others' come to rank 0, or to all.
struct ColumnsArgs {
  RanksArgs ranks;
  float* x;  // [count, size], rows stride apart
  const int32_t* count;
  int64_t size;
  int64_t stride;
  int64_t part;
  int64_t to_all;
};

void rank_columns(const ColumnsArgs& args, const Slice& slice) {
  // Calls body(its place in x, its place in the piece, items) for the runs that a rank has.
  const auto for_columns = [&](int64_t rank, int64_t begin, int64_t end, auto body) {
    const int64_t first = rank * args.part, own = std::min(args.part, args.size - first);
    for_runs(begin, end, args.part, [&](int64_t row, int64_t column, int64_t place, int64_t n) {
      n = std::min(n, own - column);
      if (n > 0) body(args.x + row * args.stride + first + column, place, n);
    });
  };
  exchange<float>(
      args.ranks, slice, *args.count * args.part,
      [&](int64_t begin, int64_t end, float* piece) {
        for_columns(args.ranks.rank, begin, end, [&](float* x, int64_t place, int64_t n) {
          std::memcpy(piece + place, x, n * sizeof(float));
        });
      },
      [&](int64_t begin, int64_t end, const Round& round) {
        if (args.ranks.rank && !args.to_all) return;
        for (int64_t rank = 0; rank < args.ranks.num_ranks; ++rank) {
          if (rank == args.ranks.rank) continue;
          const auto* piece = reinterpret_cast<const float*>(round.piece(rank));
          for_columns(rank, begin, end, [&](float* x, int64_t place, int64_t n) {
            std::memcpy(x, piece + place, n * sizeof(float));
          });
        }
      });
}

// The rows of x, which rank 0 of two hands to rank 1. Rank 0 does not wait for rank 1 but for the memory
// of pieces.
struct HandRowsArgs {
  RanksArgs ranks;
  void* x;  // [count, size], rows stride apart
  const int32_t* count;
  int64_t size;
  int64_t stride;
};

template <typename T>
void hand_rows(const HandRowsArgs& args, const Slice& slice) {
  const auto for_pieces = [&](int64_t begin, int64_t end, auto body) {
    for_runs(begin, end, args.size, [&](int64_t row, int64_t column, int64_t place, int64_t n) {
      body(static_cast<T*>(args.x) + row * args.stride + column, place, n);
    });
  };
  const auto hand = [&](int64_t begin, int64_t end, Round& round) {
    if (!round.wait_for_place()) return false;
    T* piece = reinterpret_cast<T*>(round.piece(0));
    for_pieces(begin, end, [&](const T* x, int64_t place, int64_t n) {
      std::memcpy(piece + place, x, n * sizeof(T));
    });
    round.give();
    return true;
  };
  const auto take = [&](int64_t begin, int64_t end, Round& round) {
    if (!round.wait_for_piece()) return false;
    const T* piece = reinterpret_cast<const T*>(round.piece(0));
    for_pieces(begin, end, [&](T* x, int64_t place, int64_t n) {
      std::memcpy(x, piece + place, n * sizeof(T));
    });
    round.take();
    return true;
  };
  const int64_t num_items = *args.count * args.size;
  if (args.ranks.rank == 0) in_pieces<T>(args.ranks, slice, num_items, hand);
  else in_pieces<T>(args.ranks, slice, num_items, take);
}

// The rows of x of rank 0, which all other ranks of the group get. The group may exchange sums before and
// after: so all meet, and nobody writes over a piece that another still reads.
template <typename T>
void broadcast_rows(const HandRowsArgs& args, const Slice& slice) {
  const auto for_pieces = [&](int64_t begin, int64_t end, auto body) {
    for_runs(begin, end, args.size, [&](int64_t row, int64_t column, int64_t place, int64_t n) {
      body(static_cast<T*>(args.x) + row * args.stride + column, place, n);
    });
  };
  exchange<T>(
      args.ranks, slice, *args.count * args.size,
      [&](int64_t begin, int64_t end, T* own) {
        if (args.ranks.rank) return;
        for_pieces(begin, end, [&](const T* x, int64_t place, int64_t n) {
          std::memcpy(own + place, x, n * sizeof(T));
        });
      },
      [&](int64_t begin, int64_t end, const Round& round) {
        if (!args.ranks.rank) return;
        const T* piece = reinterpret_cast<const T*>(round.piece(0));
        for_pieces(begin, end, [&](T* x, int64_t place, int64_t n) {
          std::memcpy(x, piece + place, n * sizeof(T));
        });
      });
}

}  // namespace loadout

LOADOUT_EXPORT(broadcast_rows_float, loadout::HandRowsArgs, loadout::broadcast_rows<float>)
LOADOUT_EXPORT(broadcast_rows_bf16, loadout::HandRowsArgs, loadout::broadcast_rows<loadout::bf16>)
LOADOUT_EXPORT(hand_rows_float, loadout::HandRowsArgs, loadout::hand_rows<float>)
LOADOUT_EXPORT(hand_rows_bf16, loadout::HandRowsArgs, loadout::hand_rows<loadout::bf16>)
LOADOUT_EXPORT(sum_ranks_float, loadout::SumRanksArgs, loadout::sum_ranks<float>)
LOADOUT_EXPORT(sum_ranks_bf16, loadout::SumRanksArgs, loadout::sum_ranks<loadout::bf16>)
LOADOUT_EXPORT(sum_shrunk_float, loadout::SumShrunkArgs, loadout::sum_shrunk<float>)
LOADOUT_EXPORT(sum_shrunk_bf16, loadout::SumShrunkArgs, loadout::sum_shrunk<loadout::bf16>)
LOADOUT_EXPORT(rank_columns, loadout::ColumnsArgs, loadout::rank_columns)
