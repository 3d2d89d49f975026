// Chooses tokens from rows of logits: the largest, or one that is drawn by its probability.
//
// A token's weight is 2^((logit - largest) * log2(e) / temperature): 1 for the largest, and 0 for -inf.
// Weights are summed in double. A row's token depends on the row alone, whatever the threads.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <type_traits>

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

// x where the bits of `kept` are 1, -inf elsewhere.
inline VF keep_bits(VF x, Lanes kept) { return _mm512_mask_mov_ps(vset1(-INFINITY), kept, x); }

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

// x where the bits of `kept` are 1, -inf elsewhere.
inline VF keep_bits(VF x, Lanes kept) {
  const VI lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const VI bits = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(kept)), lane);
  return _mm256_blendv_ps(vset1(-INFINITY), x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(bits, lane)));
}

#endif

// A row's tokens that may be chosen: all of them.
struct All {
  Lanes kept(int64_t, int count) const { return static_cast<Lanes>((1u << count) - 1); }
};

// Those whose bits are 1, the least bit of a byte first.
struct Allowed {
  const uint8_t* bits;

  Lanes kept(int64_t at, int count) const {
    uint32_t found = bits[at / 8];
    if (count > 8) found |= static_cast<uint32_t>(bits[at / 8 + 1]) << 8;
    return static_cast<Lanes>(found & ((1u << count) - 1));
  }
};

// Calls visit(logits, first token) for the vectors of tokens [begin, end) that have one that may be
// chosen; the others of a vector are -inf.
template <typename Tokens, typename Visit>
inline void for_tokens(const float* logits, const Tokens& tokens, int64_t begin, int64_t end,
                       const Visit& visit) {
  int64_t at = begin;
  for (; at + VF_WIDTH <= end; at += VF_WIDTH) {
    if constexpr (std::is_same_v<Tokens, All>) {
      visit(vload(logits + at), at);
    } else if (const Lanes kept = tokens.kept(at, VF_WIDTH)) {
      visit(keep_bits(vload(logits + at), kept), at);
    }
  }
  if (at == end) return;
  const int count = static_cast<int>(end - at);
  visit(keep_bits(vload(logits + at, count), tokens.kept(at, count)), at);
}

struct Largest {
  float of_all;  // NaN if any logit is not a number
  float allowed;
};

template <typename Tokens>
Largest largest(const float* logits, const Tokens& tokens, int64_t size) {
  VF most = vset1(-INFINITY), most_allowed = most;
  Lanes lost = 0;
  for_tokens(logits, All{}, 0, size, [&](VF x, int64_t at) {
    most = vmax(most, x);
    lost |= where_nan(x);
    if constexpr (!std::is_same_v<Tokens, All>) {
      const int count = static_cast<int>(std::min<int64_t>(VF_WIDTH, size - at));
      most_allowed = vmax(most_allowed, keep_bits(x, tokens.kept(at, count)));
    }
  });
  const float of_all = lost ? NAN : reduce_max(most);
  return {of_all, std::is_same_v<Tokens, All> ? of_all : reduce_max(most_allowed)};
}

template <typename Tokens>
int64_t find(const float* logits, const Tokens& tokens, int64_t size, float value) {
  const VF wanted = vset1(value);
  for (int64_t at = 0; at < size; at += VF_WIDTH) {
    const int count = static_cast<int>(std::min<int64_t>(VF_WIDTH, size - at));
    const VF found = count == VF_WIDTH ? vload(logits + at) : vload(logits + at, count);
    const Lanes lanes = where_equal(found, wanted) & tokens.kept(at, count);
    if (lanes) return at + __builtin_ctz(lanes);
  }
  return 0;
}

// The weights of a row's tokens; 0 of those that may not be chosen.
template <typename Tokens>
struct Weights {
  const float* logits;
  Tokens tokens;
  int64_t size;
  VF most, factor;

  Weights(const float* logits, const Tokens& tokens, int64_t size, float most, float temperature)
      : logits(logits),
        tokens(tokens),
        size(size),
        most(vset1(most)),
        // Where it were infinite, the largest logit's product would be no number.
        factor(vset1(std::min(LOG2_E / temperature, FLT_MAX))) {}

  VF of(VF x) const { return vexp2(vmul(vsub(x, most), factor)); }

  double sum(int64_t begin, int64_t end) const {
    DoubleSum sum;
    for_tokens(logits, tokens, begin, end, [&](VF x, int64_t) { sum.add(of(x)); });
    return sum.total();
  }
};

// The first token whose cumulative weight exceeds `number` of their total, of all tokens.
template <typename Tokens>
int64_t draw(const Weights<Tokens>& weights, double number, double* sums) {
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
  alignas(64) float found[BLOCK] = {};
  for_tokens(weights.logits, weights.tokens, begin, end, [&](VF x, int64_t at) {
    vstore(found + at - begin, weights.of(x));  // 0 behind the last token
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
template <typename Tokens>
int64_t collect(const Weights<Tokens>& weights, float least, Candidate* out, double& total,
                double& mass) {
  const VF bound = vset1(least);
  DoubleSum sum;
  int64_t count = 0;
  mass = 0;
  for_tokens(weights.logits, weights.tokens, 0, weights.size, [&](VF x, int64_t at) {
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
template <typename Tokens>
int64_t draw_cut(const Weights<Tokens>& weights, const Cut& cut, double number, Candidate* found,
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
// number, of a token that may be chosen or another, or where none may be chosen.
struct ChooseArgs {
  const float* logits;          // [num_rows, vocab_size], rows stride apart
  const uint8_t* const* masks;  // [num_rows]: the bits of tokens that may be chosen; null: all may
  const float* temperatures;    // [num_rows]; 0: the largest logit's token, the first of equal ones
  const double* numbers;        // [num_rows], of [0, 1)
  const int64_t* top_k;         // [num_rows]; 0: all tokens
  const float* top_p;           // [num_rows]; 1: all tokens
  const float* min_p;           // [num_rows]; 0: all tokens
  int64_t* tokens;              // [num_rows]
  int64_t* num_sorted;          // [num_rows]: tokens that were sorted
  void* spaces;                 // [num_spaces, vocab_size] of 8 bytes: one for each thread
  int64_t num_rows;
  int64_t vocab_size;
  int64_t stride;
  int64_t num_spaces;
};

template <typename Tokens>
int64_t choose_row(const ChooseArgs& args, int64_t row, const Tokens& tokens, char* space) {
  const int64_t size = args.vocab_size;
  const float* logits = args.logits + row * args.stride;
  const Largest most = largest(logits, tokens, size);
  const float temperature = args.temperatures[row];
  args.num_sorted[row] = 0;
  if (!std::isfinite(most.of_all) || !std::isfinite(most.allowed)) return NOT_FINITE;
  if (temperature == 0) return find(logits, tokens, size, most.allowed);
  const Weights<Tokens> weights(logits, tokens, size, most.allowed, temperature);
  const Cut cut{args.top_k[row], args.top_p[row], args.min_p[row]};
  if (cut.top_k > 0 || cut.top_p < 1 || cut.min_p > 0)
    return draw_cut(weights, cut, args.numbers[row], reinterpret_cast<Candidate*>(space),
                    args.num_sorted[row]);
  return draw(weights, args.numbers[row], reinterpret_cast<double*>(space));
}

void choose(const ChooseArgs& args, const Slice& slice) {
  static_assert(sizeof(Candidate) == 8 && sizeof(double) == 8, "as spaces have");
  if (slice.thread >= args.num_spaces) return;
  char* space = static_cast<char*>(args.spaces) + slice.thread * args.vocab_size * 8;
  for (int64_t row = slice.take(); row < args.num_rows; row = slice.take()) {
    const uint8_t* bits = args.masks[row];
    args.tokens[row] = bits ? choose_row(args, row, Allowed{bits}, space)
                            : choose_row(args, row, All{}, space);
  }
}

}  // namespace loadout

LOADOUT_EXPORT(choose, loadout::ChooseArgs, loadout::choose)
