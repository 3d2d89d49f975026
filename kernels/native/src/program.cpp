// Runs a list of operations: one parallel region for all of them, a barrier after each.
#include <omp.h>

#include "slice.h"

namespace {

struct alignas(64) Counter {
  std::atomic<int64_t> value;
};

struct Op {
  loadout::SliceFunction function;
  const void* args;
};

}  // namespace

// `counters` has one zeroed Counter per operation, and is zeroed again at the end.
// `seconds` is null, or gets the time of each operation, barrier included.
extern "C" __attribute__((visibility("default"))) void loadout_run(const Op* ops, int64_t num_ops,
                                                                    Counter* counters,
                                                                    int num_threads,
                                                                    double* seconds) {
#pragma omp parallel num_threads(num_threads)
  {
    const int thread = omp_get_thread_num();
    const int count = omp_get_num_threads();
    double before = seconds && thread == 0 ? omp_get_wtime() : 0;
    for (int64_t i = 0; i < num_ops; ++i) {
      ops[i].function(ops[i].args, loadout::Slice{thread, count, &counters[i].value});
#pragma omp barrier
      if (seconds && thread == 0) {
        const double now = omp_get_wtime();
        seconds[i] = now - before;
        before = now;
      }
    }
    const auto mine = loadout::Slice{thread, count, nullptr}.range(num_ops);
    for (int64_t i = mine.begin; i < mine.end; ++i)
      counters[i].value.store(0, std::memory_order_relaxed);
  }
}
