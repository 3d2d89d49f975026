// Runs a list of operations: one parallel region for all of them, a barrier after each.
#include <omp.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <atomic>
#include <memory>
#include <vector>

#include "barrier.h"
#include "slice.h"

namespace {

struct alignas(64) Counter {
  std::atomic<int64_t> value;
};

struct Op {
  loadout::SliceFunction function;
  const void* args;
};

// Per thread of a team, the processors that it may run on: `num_words` of 64 bits each.
struct Places {
  std::vector<uint64_t> masks;
  int64_t num_words;
  int num_threads;
  uint64_t id;  // never given twice, as addresses are; 0 is nobody's
};

std::atomic<uint64_t> last_places{0};
// Not std::shared_ptr: its counts ask for a symbol of glibc 2.32, which Linux of 2020 lacks.
thread_local std::unique_ptr<const Places> places_of_my_teams;
thread_local uint64_t my_places = 0;  // those that this thread has taken

// A team's threads come and go with its size, so that each sees to itself.
void take_place(const Places* places, int thread, int num_threads) {
#if defined(__linux__)
  if (!places || places->id == my_places || places->num_threads != num_threads) return;
  const uint64_t* mask = places->masks.data() + thread * places->num_words;
  // A processor that is gone meanwhile leaves the thread where it was: slower, not wrong.
  sched_setaffinity(0, places->num_words * sizeof(uint64_t),
                    reinterpret_cast<const cpu_set_t*>(mask));
  my_places = places->id;
#endif
}

// Calls back into the program that runs the operations, in the thread that does.
struct CallArgs {
  void (*function)();
};

void call(const CallArgs& args, const loadout::Slice& slice) {
  if (slice.thread == 0) args.function();
}

}  // namespace

LOADOUT_EXPORT(call, CallArgs, call)

// Programs that the calling thread runs from now on with `num_threads` threads have thread i on the
// processors of masks[i]. Whoever has told OpenMP where its threads belong has decided already.
extern "C" __attribute__((visibility("default"))) void loadout_place_threads(const uint64_t* masks,
                                                                              int64_t num_words,
                                                                              int num_threads) {
  if (omp_get_proc_bind() != omp_proc_bind_false) return;
  places_of_my_teams = std::make_unique<const Places>(
      Places{{masks, masks + num_words * num_threads}, num_words, num_threads, ++last_places});
}

// `counters` has one zeroed Counter per operation, and is zeroed again at the end.
// `seconds` is null, or gets the time of each operation, barrier included.
extern "C" __attribute__((visibility("default"))) void loadout_run(const Op* ops, int64_t num_ops,
                                                                    Counter* counters,
                                                                    int num_threads,
                                                                    double* seconds) {
  const Places* places = places_of_my_teams.get();  // only this thread, busy here, replaces it
  loadout::Barrier barrier;
#pragma omp parallel num_threads(num_threads)
  {
    const int thread = omp_get_thread_num();
    const int count = omp_get_num_threads();
    take_place(places, thread, count);
    double before = seconds && thread == 0 ? omp_get_wtime() : 0;
    for (int64_t i = 0; i < num_ops; ++i) {
      ops[i].function(ops[i].args, loadout::Slice{thread, count, &counters[i].value});
      barrier.wait(count);
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
