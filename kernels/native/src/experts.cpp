// Mixtures of experts: who computes a token, in which order, and the sum of what they make. See
// kernels/experts/reference.py, which defines each.
#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"
#include "slice.h"

namespace loadout {

namespace {

constexpr int64_t MAX_EXPERTS = 1024;
constexpr float LEAST_SUM = 1e-20f;
constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr float BEST = std::numeric_limits<float>::infinity();

enum Scoring : int64_t { SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN };

// values[i] = e^values[i] / sum of all.
void softmax(float* values, int64_t size) {
  const float most = *std::max_element(values, values + size);
  const VF top = vset1(most);
  for_vectors(size, [&](int64_t at, auto lanes) {
    vstore(values + at, vexp(vsub(vload(values + at, lanes), top)), lanes);
  });
  float sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += values[i];
  for (int64_t i = 0; i < size; ++i) values[i] /= sum;
}

void sigmoid(float* values, int64_t size) {
  const VF one = vset1(1.0f);
  for_vectors(size, [&](int64_t at, auto lanes) {
    const VF x = vload(values + at, lanes);
    vstore(values + at, vdiv(one, vadd(one, vexp(vsub(vzero(), x)))), lanes);
  });
}

// The place of the first largest.
int64_t largest(const float* values, int64_t size) {
  return std::max_element(values, values + size) - values;
}

}  // namespace

struct RouteArgs {
  const float* logits;         // [T, num_experts]
  const float* bias;           // [num_experts] or null
  const float* expert_scales;  // [num_experts] or null
  int32_t* experts;            // [T, num_chosen]
  float* weights;              // [T, num_chosen]
  const int32_t* count;
  int64_t num_experts;
  int64_t num_chosen;
  int64_t num_groups;
  int64_t num_chosen_groups;
  int64_t scoring;
  int64_t is_normalised;
  float scale;
};

namespace {

// Puts scores of all but the best groups of neighbours at NONE.
void keep_best_groups(const RouteArgs& args, float* ranked) {
  const int64_t size = args.num_experts / args.num_groups;
  float sums[MAX_EXPERTS];
  bool is_chosen[MAX_EXPERTS] = {};
  for (int64_t g = 0; g < args.num_groups; ++g) {
    float first = NONE, second = NONE;
    for (int64_t i = g * size; i < (g + 1) * size; ++i) {
      second = std::max(second, std::min(first, ranked[i]));
      first = std::max(first, ranked[i]);
    }
    sums[g] = first + second;
  }
  for (int64_t chosen = 0; chosen < args.num_chosen_groups; ++chosen) {
    const int64_t g = largest(sums, args.num_groups);
    is_chosen[g] = true;
    sums[g] = NONE;
  }
  for (int64_t i = 0; i < args.num_experts; ++i)
    if (!is_chosen[i / size]) ranked[i] = NONE;
}

void route_token(const RouteArgs& args, int64_t t) {
  const int64_t num_experts = args.num_experts, num_chosen = args.num_chosen;
  const float* logits = args.logits + t * num_experts;
  int32_t* experts = args.experts + t * num_chosen;
  float* weights = args.weights + t * num_chosen;
  float scores[MAX_EXPERTS], ranked[MAX_EXPERTS];
  std::copy_n(logits, num_experts, scores);
  if (args.scoring == SOFTMAX) softmax(scores, num_experts);
  if (args.scoring == SIGMOID) sigmoid(scores, num_experts);
  const bool has_groups = args.num_chosen_groups < args.num_groups;
  // Scores ascend with logits, which are further apart.
  std::copy_n(args.bias || has_groups ? scores : logits, num_experts, ranked);
  if (args.bias)
    for (int64_t i = 0; i < num_experts; ++i) ranked[i] += args.bias[i];
  // NaN goes first, so that the token becomes NaN.
  for (int64_t i = 0; i < num_experts; ++i)
    if (std::isnan(ranked[i])) ranked[i] = BEST;
  if (has_groups) keep_best_groups(args, ranked);
  for (int64_t j = 0; j < num_chosen; ++j) {
    const int64_t expert = largest(ranked, num_experts);
    ranked[expert] = NONE;
    experts[j] = static_cast<int32_t>(expert);
    weights[j] = scores[expert];
  }
  if (args.scoring == SOFTMAX_OF_CHOSEN) softmax(weights, num_chosen);
  float sum = 0;
  for (int64_t j = 0; j < num_chosen; ++j) sum += weights[j];
  for (int64_t j = 0; j < num_chosen; ++j) {
    if (args.is_normalised) weights[j] /= sum + LEAST_SUM;
    weights[j] *= args.scale;
    if (args.expert_scales) weights[j] *= args.expert_scales[experts[j]];
  }
}

}  // namespace

void route(const RouteArgs& args, const Slice& slice) {
  const auto mine = slice.range(*args.count);
  for (int64_t t = mine.begin; t < mine.end; ++t) route_token(args, t);
}

struct SortPairsArgs {
  const int32_t* experts;  // [T, num_chosen]
  int64_t* tokens;         // [T * num_chosen]
  int32_t* starts;         // [num_experts + 1]
  int32_t* rows;           // [T, num_chosen]
  int32_t* num_pairs;
  const int32_t* count;
  int64_t num_experts;  // of which pairs are kept, from first_expert on
  int64_t num_chosen;
  int64_t first_expert;
};

// Pairs of other experts have row -1.
void sort_pairs(const SortPairsArgs& args, const Slice& slice) {
  if (slice.take() != 0) return;  // one thread: a step has few pairs
  const int64_t num_experts = args.num_experts, num_pairs = *args.count * args.num_chosen;
  const auto own = [&](int64_t p) { return args.experts[p] - args.first_expert; };
  const auto is_own = [&](int64_t p) { return own(p) >= 0 && own(p) < num_experts; };
  int32_t* starts = args.starts;
  std::fill_n(starts, num_experts + 1, 0);
  for (int64_t p = 0; p < num_pairs; ++p)
    if (is_own(p)) ++starts[own(p) + 1];
  for (int64_t e = 0; e < num_experts; ++e) starts[e + 1] += starts[e];
  int32_t next[MAX_EXPERTS];
  std::copy_n(starts, num_experts, next);
  for (int64_t p = 0; p < num_pairs; ++p) {
    args.rows[p] = -1;
    if (!is_own(p)) continue;
    const int32_t row = next[own(p)]++;
    args.rows[p] = row;
    args.tokens[row] = p / args.num_chosen;
  }
  *args.num_pairs = starts[num_experts];
}

struct CombineArgs {
  const void* x;         // [P, size]
  const int32_t* rows;   // [T, num_chosen]; -1: another rank's
  const float* weights;  // [T, num_chosen]
  const void* shared;    // [T, size] or null
  const float* shared_logits;  // [T] or null
  void* out;             // [T, size]; may be `shared`
  const int32_t* count;
  int64_t size;
  int64_t num_chosen;
};

template <typename T>
void combine(const CombineArgs& args, const Slice& slice) {
  const int64_t size = args.size;
  const auto mine = slice.range(*args.count);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const int32_t* rows = args.rows + t * args.num_chosen;
    const float* weights = args.weights + t * args.num_chosen;
    const T* x = static_cast<const T*>(args.x);
    const T* shared = args.shared ? static_cast<const T*>(args.shared) + t * size : nullptr;
    const float gate =
        args.shared_logits ? 1.0f / (1.0f + std::exp(-args.shared_logits[t])) : 1.0f;
    T* out = static_cast<T*>(args.out) + t * size;
    for_vectors(size, [&](int64_t at, auto lanes) {
      VF sum = vzero();
      for (int64_t j = 0; j < args.num_chosen; ++j)
        if (rows[j] >= 0)
          sum = vfma(vset1(weights[j]), vload(x + rows[j] * size + at, lanes), sum);
      if (shared) sum = vfma(vset1(gate), vload(shared + at, lanes), sum);
      vstore(out + at, sum, lanes);
    });
  }
}

}  // namespace loadout

LOADOUT_EXPORT(route, loadout::RouteArgs, loadout::route)
LOADOUT_EXPORT(sort_pairs, loadout::SortPairsArgs, loadout::sort_pairs)
LOADOUT_EXPORT(combine_float, loadout::CombineArgs, loadout::combine<float>)
LOADOUT_EXPORT(combine_bf16, loadout::CombineArgs, loadout::combine<loadout::bf16>)
