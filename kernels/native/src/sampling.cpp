// Chooses tokens from rows of logits: the largest, or one that is drawn by its probability.
//
// A token's weight is 2^((logit - largest) * log2(e) / temperature): 1 for the largest, and 0 for -inf.
// Weights are summed in double. A row's token depends on the row alone, whatever the threads.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "simd.h"
#include "slice.h"

namespace loadout {

namespace {

constexpr int64_t BLOCK = 256;  // tokens that are summed on their own, so that one block is walked
constexpr int64_t NOT_FINITE = -2;
constexpr float LOG2_E = 1.44269504f;

// A token that may be drawn where top_k, top_p or min_p cut.
struct Candidate {
  float weight;
  int32_t token;
};

// The order of candidates. Logits that differ by little may have the same weight.
struct IsBefore {
  const float* logits;

  bool operator()(const Candidate& a, const Candidate& b) const {
    if (a.weight != b.weight) return a.weight > b.weight;
    const float first = logits[a.token], second = logits[b.token];
    return first != second ? first > second : a.token < b.token;
  }
};

#if defined(__AVX512F__)

using Lanes = __mmask16;
inline Lanes where_nan(VF x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
inline Lanes where_equal(VF x, VF y) { return _mm512_cmp_ps_mask(x, y, _CMP_EQ_OQ); }
inline Lanes where_least(VF x, VF least) { return _mm512_cmp_ps_mask(x, least, _CMP_GE_OQ); }

struct DoubleSum {
  __m512d sum = _mm512_setzero_pd();
  void add(VF x) {
    sum = _mm512_add_pd(sum, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
    sum = _mm512_add_pd(sum, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
  }
  double total() const { return _mm512_reduce_add_pd(sum); }
};

// Writes -inf where the bits of two bytes are 0.
inline void keep_lanes_of(float* p, const uint8_t* bits) {
  uint16_t kept;
  std::memcpy(&kept, bits, sizeof kept);
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>(~kept), vset1(-INFINITY));
}

#else

using Lanes = uint32_t;
inline Lanes bits_of(VF mask) { return static_cast<Lanes>(_mm256_movemask_ps(mask)); }
inline Lanes where_nan(VF x) { return bits_of(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }
inline Lanes where_equal(VF x, VF y) { return bits_of(_mm256_cmp_ps(x, y, _CMP_EQ_OQ)); }
inline Lanes where_least(VF x, VF least) { return bits_of(_mm256_cmp_ps(x, least, _CMP_GE_OQ)); }

struct DoubleSum {
  __m256d sum = _mm256_setzero_pd();
  void add(VF x) {
    sum = _mm256_add_pd(sum, _mm256_cvtps_pd(_mm256_castps256_ps128(x)));
    sum = _mm256_add_pd(sum, _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
  }
  double total() const {
    alignas(32) double lanes[4];
    _mm256_store_pd(lanes, sum);
    return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  }
};

// Writes -inf where the bits of a byte are 0.
inline void keep_lanes_of(float* p, const uint8_t* bits) {
  const VI lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const VI kept = _mm256_and_si256(_mm256_set1_epi32(*bits), lane);
  _mm256_maskstore_ps(p, _mm256_cmpeq_epi32(kept, _mm256_setzero_si256()), vset1(-INFINITY));
}

#endif

// Calls visit(lanes, first token, how many) for all vectors of tokens [begin, end): those of a last
// vector that have no token are -inf.
template <typename Visit>
inline void for_tokens(const float* logits, int64_t begin, int64_t end, const Visit& visit) {
  int64_t at = begin;
  for (; at + VF_WIDTH <= end; at += VF_WIDTH) visit(vload(logits + at), at, VF_WIDTH);
  if (at == end) return;
  const int count = static_cast<int>(end - at);
  visit(keep_lanes(vload(logits + at, count), 0, count, vset1(-INFINITY)), at, count);
}

// The largest logit; NaN if any is not a number.
float largest(const float* logits, int64_t size) {
  VF most = vset1(-INFINITY);
  Lanes lost = 0;
  for_tokens(logits, 0, size, [&](VF x, int64_t, int) {
    most = vmax(most, x);
    lost |= where_nan(x);
  });
  return lost ? NAN : reduce_max(most);
}

int64_t find(const float* logits, int64_t size, float value) {
  const VF wanted = vset1(value);
  for (int64_t at = 0; at < size; at += VF_WIDTH) {
    const int count = static_cast<int>(std::min<int64_t>(VF_WIDTH, size - at));
    Lanes lanes = where_equal(count == VF_WIDTH ? vload(logits + at) : vload(logits + at, count),
                              wanted);
    lanes &= (1u << count) - 1;
    if (lanes) return at + __builtin_ctz(lanes);
  }
  return 0;
}

// A row's weights.
struct Weights {
  const float* logits;
  int64_t size;
  VF most, factor;

  Weights(const float* logits, int64_t size, float most, float temperature)
      : logits(logits),
        size(size),
        most(vset1(most)),
        // Where it were infinite, the largest logit's product would be no number.
        factor(vset1(std::min(LOG2_E / temperature, FLT_MAX))) {}

  VF of(VF x) const { return vexp2(vmul(vsub(x, most), factor)); }

  double sum(int64_t begin, int64_t end) const {
    DoubleSum sum;
    for_tokens(logits, begin, end, [&](VF x, int64_t, int) { sum.add(of(x)); });
    return sum.total();
  }
};

// The first token whose cumulative weight exceeds `number` of their total, of all tokens.
int64_t draw(const Weights& weights, double number, double* sums) {
  const int64_t blocks = (weights.size + BLOCK - 1) / BLOCK;
  double total = 0;
  for (int64_t i = 0; i < blocks; ++i) {
    sums[i] = weights.sum(i * BLOCK, std::min((i + 1) * BLOCK, weights.size));
    total += sums[i];
  }
  const double wanted = number * total;
  double before = 0;
  int64_t block = -1;
  for (int64_t i = 0; i < blocks; ++i) {
    if (sums[i] == 0) continue;
    // Where rounding leaves none that exceeds it, the last block that has any weight.
    if (block >= 0) before += sums[block];
    block = i;
    if (before + sums[i] > wanted) break;
  }
  const int64_t begin = block * BLOCK, end = std::min(begin + BLOCK, weights.size);
  alignas(64) float found[BLOCK];
  for_tokens(weights.logits, begin, end, [&](VF x, int64_t at, int count) {
    vstore(found + at - begin, weights.of(x), count);
  });
  int64_t token = begin;
  for (int64_t i = begin; i < end; ++i) {
    const float weight = found[i - begin];
    if (weight == 0) continue;
    token = i;
    before += weight;
    if (before > wanted) break;
  }
  return token;
}

// The least weight that is collected at first, and the factor to the next one.
constexpr float FIRST_LEAST = 1.0f / 1024, NEXT_LEAST = 1.0f / 256, LAST_LEAST = 1e-30f;

// Writes the tokens whose weight is `least` or more, and returns how many, with the sum of all
// weights, and the sum of theirs.
int64_t collect(const Weights& weights, float least, Candidate* out, double& total, double& mass) {
  const VF bound = vset1(least);
  DoubleSum sum;
  int64_t count = 0;
  mass = 0;
  for_tokens(weights.logits, 0, weights.size, [&](VF x, int64_t at, int) {
    const VF found = weights.of(x);
    sum.add(found);
    Lanes lanes = where_least(found, bound);
    if (!lanes) return;
    alignas(64) float values[VF_WIDTH];
    vstore(values, found);
    for (; lanes; lanes &= lanes - 1) {
      const int lane = __builtin_ctz(lanes);
      out[count++] = {values[lane], static_cast<int32_t>(at + lane)};
      mass += values[lane];
    }
  });
  total = sum.total();
  return count;
}

struct Cut {
  int64_t top_k;
  float top_p, min_p;
};

// As `draw`, of the tokens that a cut leaves: the top_k most likely; of these the first ones whose
// share of their sum reaches top_p; of these the ones with min_p of the largest weight. Returns the
// number of tokens that were sorted, too.
int64_t draw_cut(const Weights& weights, const Cut& cut, double number, Candidate* found,
                 int64_t& num_sorted) {
  const bool has_k = cut.top_k > 0;
  float least = has_k ? FIRST_LEAST : std::max(FIRST_LEAST, cut.min_p);
  double total, mass;
  int64_t count;
  for (;; least = least > LAST_LEAST ? least * NEXT_LEAST : FLT_MIN) {
    count = collect(weights, least, found, total, mass);
    if (least == FLT_MIN) break;
    if (has_k ? count >= cut.top_k
              : least <= cut.min_p || (cut.top_p < 1 && mass >= cut.top_p * total))
      break;
  }
  const IsBefore is_before{weights.logits};
  if (has_k && count > cut.top_k) {
    std::nth_element(found, found + cut.top_k, found + count, is_before);
    count = cut.top_k;
  }
  std::sort(found, found + count, is_before);
  num_sorted = count;
  if (has_k) {
    total = 0;
    for (int64_t i = 0; i < count; ++i) total += found[i].weight;
  }
  double kept = 0;
  int64_t end = 0;
  for (; end < count; ++end) {
    const float weight = found[end].weight;
    const bool is_cut = (cut.top_p < 1 && !(kept < cut.top_p * total)) ||
                        weight < cut.min_p * found[0].weight;
    if (end > 0 && is_cut) break;
    kept += weight;
  }
  const double wanted = number * kept;
  double before = 0;
  int64_t i = 0;
  for (; i + 1 < end; ++i) {
    before += found[i].weight;
    if (before > wanted) break;
  }
  return found[i].token;
}

}  // namespace

// tokens[i] = the token of row i, or NOT_FINITE where its largest logit is infinite or any is not a
// number.
struct ChooseArgs {
  const float* logits;        // [num_rows, vocab_size], rows stride apart
  const float* temperatures;  // [num_rows]; 0: the largest logit's token, the first of equal ones
  const double* numbers;      // [num_rows], of [0, 1)
  const int64_t* top_k;       // [num_rows]; 0: all tokens
  const float* top_p;         // [num_rows]; 1: all tokens
  const float* min_p;         // [num_rows]; 0: all tokens
  int64_t* tokens;            // [num_rows]
  int64_t* num_sorted;        // [num_rows]: tokens that were sorted
  void* spaces;               // [num_spaces, vocab_size] of 8 bytes: one for each thread that works
  int64_t num_rows;
  int64_t vocab_size;
  int64_t stride;
  int64_t num_spaces;
};

void choose(const ChooseArgs& args, const Slice& slice) {
  static_assert(sizeof(Candidate) == 8 && sizeof(double) == 8, "as spaces have");
  if (slice.thread >= args.num_spaces) return;
  const int64_t size = args.vocab_size;
  char* space = static_cast<char*>(args.spaces) + slice.thread * size * 8;
  for (int64_t row = slice.take(); row < args.num_rows; row = slice.take()) {
    const float* logits = args.logits + row * args.stride;
    const float most = largest(logits, size), temperature = args.temperatures[row];
    args.num_sorted[row] = 0;
    if (!std::isfinite(most)) {
      args.tokens[row] = NOT_FINITE;
      continue;
    }
    if (temperature == 0) {
      args.tokens[row] = find(logits, size, most);
      continue;
    }
    const Weights weights(logits, size, most, temperature);
    const Cut cut{args.top_k[row], args.top_p[row], args.min_p[row]};
    const bool is_cut = cut.top_k > 0 || cut.top_p < 1 || cut.min_p > 0;
    args.tokens[row] = is_cut ? draw_cut(weights, cut, args.numbers[row],
                                         reinterpret_cast<Candidate*>(space), args.num_sorted[row])
                              : draw(weights, args.numbers[row], reinterpret_cast<double*>(space));
  }
}

// Sets logits to -inf whose tokens' bits are 0.
struct KeepAllowedArgs {
  float* logits;         // [N, vocab_size], rows stride apart
  const int64_t* rows;   // [num_rows]: rows of the logits
  const uint8_t* masks;  // [num_rows, mask_bytes]: the bits of tokens, the least first
  int64_t num_rows;
  int64_t vocab_size;
  int64_t stride;
  int64_t mask_bytes;
};

void keep_allowed(const KeepAllowedArgs& args, const Slice& slice) {
  for (int64_t i = slice.take(); i < args.num_rows; i = slice.take()) {
    float* logits = args.logits + args.rows[i] * args.stride;
    const uint8_t* bits = args.masks + i * args.mask_bytes;
    int64_t at = 0;
    for (; at + VF_WIDTH <= args.vocab_size; at += VF_WIDTH) keep_lanes_of(logits + at, bits + at / 8);
    for (; at < args.vocab_size; ++at)
      if (!(bits[at / 8] >> (at % 8) & 1)) logits[at] = -INFINITY;
  }
}

}  // namespace loadout

LOADOUT_EXPORT(choose, loadout::ChooseArgs, loadout::choose)
LOADOUT_EXPORT(keep_allowed, loadout::KeepAllowedArgs, loadout::keep_allowed)
