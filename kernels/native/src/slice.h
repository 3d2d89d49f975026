// How operations share their work among threads.
#pragma once

#include <atomic>
#include <cstdint>

namespace loadout {

// One thread's view of one operation. Every operation is a function (args, slice) that all threads
// call; it allocates nothing and returns when its thread finds no more work. Whatever needs all
// threads to have finished a phase is two operations.
struct Slice {
  int thread;
  int num_threads;
  std::atomic<int64_t>* counter;  // zero when the operation starts, shared by its threads

  struct Range {
    int64_t begin, end;
  };

  // This thread's even share of `count` items.
  Range range(int64_t count) const {
    return {count * thread / num_threads, count * (thread + 1) / num_threads};
  }

  // The next item that nobody has taken: end the loop when it reaches the count. For uneven items,
  // and so that a thread whose core is taken away holds up the others by no more than the items
  // that it has taken: one, or two where the next is taken ahead to fetch its weights.
  int64_t take() const { return counter->fetch_add(1, std::memory_order_relaxed); }
};

using SliceFunction = void (*)(const void* args, const Slice& slice);

}  // namespace loadout

// Exports `function(const Args&, const Slice&)` as the C symbol `loadout_NAME`.
#define LOADOUT_EXPORT(NAME, ARGS, FUNCTION)                                            \
  extern "C" __attribute__((visibility("default"))) void loadout_##NAME(                \
      const void* args, const loadout::Slice& slice) {                                  \
    FUNCTION(*static_cast<const ARGS*>(args), slice);                                   \
  }
