// Mixers with a recurrent state, and the gates of attention's heads, as kernels/recurrence/reference
// defines them. A row reads its sequence's state from one slot and writes it to another.
#include <algorithm>
#include <cmath>

#include "simd.h"
#include "slice.h"

namespace loadout {

// The rows of a step: row r has the segments from firsts[r] to firsts[r + 1], and segment s the
// tokens from starts[s] to starts[s + 1]. Each segment of a row reads the state that the one before
// has written.
struct StateRows {
  const int32_t* num_rows;
  const int32_t* firsts;  // [R + 1]
  const int32_t* starts;  // [S + 1]
  const int32_t* read;    // [S], slots
  const int32_t* written;
};

// Copies runs of columns to other places.
struct CopyRunsArgs {
  const void* x;
  void* out;
  const int32_t* num_tokens;
  const int64_t* runs;  // [num_runs, 3]: from, to, length
  int64_t num_runs;
  int64_t x_stride;
  int64_t out_stride;
};

template <typename T>
void copy_runs(const CopyRunsArgs& args, const Slice& slice) {
  const auto mine = slice.range(*args.num_tokens);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const T* x = static_cast<const T*>(args.x) + t * args.x_stride;
    T* out = static_cast<T*>(args.out) + t * args.out_stride;
    for (int64_t i = 0; i < args.num_runs; ++i) {
      const int64_t* run = args.runs + 3 * i;
      std::memcpy(out + run[1], x + run[0], run[2] * sizeof(T));
    }
  }
}

// x[t] = round(x[t] * round(sigmoid(gate[t]))).
struct GateHeadsArgs {
  void* x;           // [T, size]
  const void* gate;  // [T, size]
  const int32_t* num_tokens;
  int64_t size;
};

inline VF vsigmoid(VF x) { return vdiv(vset1(1.0f), vadd(vset1(1.0f), vexp(vsub(vzero(), x)))); }

template <typename T>
void gate_heads(const GateHeadsArgs& args, const Slice& slice) {
  const auto mine = slice.range(*args.num_tokens);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    T* x = static_cast<T*>(args.x) + t * args.size;
    const T* gate = static_cast<const T*>(args.gate) + t * args.size;
    for_vectors(args.size, [&](int64_t at, auto lanes) {
      const VF open = rounded<T>(vsigmoid(vload(gate + at, lanes)));
      vstore(x + at, vmul(vload(x + at, lanes), open), lanes);
    });
  }
}

// out[t] = silu(round(sum over j of weight[j] * x[t - size + 1 + j])), the tokens before the row's
// first being the state's.
struct CausalConvArgs {
  const void* x;        // [T, channels], rows stride apart
  void* out;            // [T, channels]
  const float* weight;  // [size, channels]
  float* states;        // [slots, size - 1, channels]
  StateRows rows;
  int64_t channels;
  int64_t size;
  int64_t stride;
};

constexpr int64_t CONV_BLOCK = 256;
constexpr int64_t MAX_KERNEL = 8;

template <typename T, typename Lanes>
void convolve(const CausalConvArgs& args, int64_t segment, int64_t channel, Lanes lanes) {
  const int64_t before = args.size - 1, start = args.rows.starts[segment];
  const int64_t count = args.rows.starts[segment + 1] - start;
  const int64_t slot_size = before * args.channels;
  const float* read = args.states + args.rows.read[segment] * slot_size + channel;
  float* written = args.states + args.rows.written[segment] * slot_size + channel;
  const T* x = static_cast<const T*>(args.x) + start * args.stride + channel;
  T* out = static_cast<T*>(args.out) + start * args.channels + channel;
  VF weight[MAX_KERNEL], inputs[MAX_KERNEL];
  for (int64_t j = 0; j < args.size; ++j) {
    weight[j] = vload(args.weight + j * args.channels + channel, lanes);
  }
  for (int64_t j = 0; j < before; ++j) inputs[j] = vload(read + j * args.channels, lanes);
  for (int64_t t = 0; t < count; ++t) {
    inputs[before] = vload(x + t * args.stride, lanes);
    VF sum = vzero();
    for (int64_t j = 0; j < args.size; ++j) sum = vfma(weight[j], inputs[j], sum);
    sum = rounded<T>(sum);
    vstore(out + t * args.channels, vmul(sum, vsigmoid(sum)), lanes);
    for (int64_t j = 0; j < before; ++j) inputs[j] = inputs[j + 1];
  }
  for (int64_t j = 0; j < before; ++j) vstore(written + j * args.channels, inputs[j], lanes);
}

template <typename T>
void causal_conv(const CausalConvArgs& args, const Slice& slice) {
  const int64_t num_blocks = (args.channels + CONV_BLOCK - 1) / CONV_BLOCK;
  const int64_t num_items = *args.rows.num_rows * num_blocks;
  for (int64_t item; (item = slice.take()) < num_items;) {
    const int64_t row = item / num_blocks, first = item % num_blocks * CONV_BLOCK;
    for (int64_t segment = args.rows.firsts[row]; segment < args.rows.firsts[row + 1]; ++segment) {
      for_vectors(std::min(CONV_BLOCK, args.channels - first), [&](int64_t at, auto lanes) {
        convolve<T>(args, segment, first + at, lanes);
      });
    }
  }
}

// The gated delta rule.
struct DeltaRuleArgs {
  const void* qkv;  // [T, 2 * key heads * key size + value heads * value size]
  const void* b;    // [T, value heads], rows stride apart, as a's
  const void* a;
  void* out;          // [T, value heads * value size]
  const float* rate;  // [value heads], below 0: the decay's logarithm is rate * softplus(a + bias)
  const float* bias;
  float* states;  // [slots, value heads, key size, value size]
  StateRows rows;
  int64_t num_key_heads;
  int64_t num_value_heads;
  int64_t key_size;
  int64_t value_size;
  int64_t stride;
};

constexpr int64_t MAX_KEY_SIZE = 256;
constexpr float L2_EPS = 1e-6f;

// One token of a head: its query and key, of length 1, and the factors of its state and its delta.
struct HeadToken {
  float q[MAX_KEY_SIZE];
  float k[MAX_KEY_SIZE];
  float decay;
  float beta;
};

template <typename T>
void normalise(const T* x, float* out, int64_t size, float scale) {
  VF squares = vzero();
  for_vectors(size, [&](int64_t at, auto lanes) {
    const VF value = vload(x + at, lanes);
    squares = vfma(value, value, squares);
  });
  const VF factor = vset1(scale / std::sqrt(reduce_add(squares) + L2_EPS));
  for_vectors(size, [&](int64_t at, auto lanes) {
    vstore(out + at, vmul(vload(x + at, lanes), factor), lanes);
  });
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

template <typename T>
void read_token(const DeltaRuleArgs& args, int64_t t, int64_t head, HeadToken& token) {
  const int64_t size = args.key_size, keys_size = args.num_key_heads * size;
  const int64_t width = 2 * keys_size + args.num_value_heads * args.value_size;
  const int64_t key_head = head / (args.num_value_heads / args.num_key_heads);
  const T* q = static_cast<const T*>(args.qkv) + t * width + key_head * size;
  normalise(q, token.q, size, 1.0f / std::sqrt(static_cast<float>(size)));
  normalise(q + keys_size, token.k, size, 1.0f);
  const float a = to_float(static_cast<const T*>(args.a)[t * args.stride + head]);
  const float b = to_float(static_cast<const T*>(args.b)[t * args.stride + head]);
  token.decay = std::exp(args.rate[head] * softplus(a + args.bias[head]));
  token.beta = to_float(from_float<T>(1.0f / (1.0f + std::exp(-b))));
}

// NUM vectors of the state's columns, which lie `stride` apart: read from one place, and written to
// another one or the same.
template <int NUM, typename T, typename Lanes>
void update(const HeadToken& token, const float* read, float* written, int64_t size, int64_t stride,
            const T* value, T* out, Lanes lanes) {
  VF sums[NUM], delta[NUM];
  LOADOUT_UNROLL
  for (int i = 0; i < NUM; ++i) sums[i] = vzero();
  for (int64_t j = 0; j < size; ++j) {
    const VF k = vset1(token.k[j]);
    LOADOUT_UNROLL
    for (int i = 0; i < NUM; ++i) {
      sums[i] = vfma(k, vload(read + j * stride + i * VF_WIDTH, lanes), sums[i]);
    }
  }
  const VF decay = vset1(token.decay), beta = vset1(token.beta);
  LOADOUT_UNROLL
  for (int i = 0; i < NUM; ++i) {
    delta[i] = vmul(beta, vsub(vload(value + i * VF_WIDTH, lanes), vmul(decay, sums[i])));
    sums[i] = vzero();
  }
  for (int64_t j = 0; j < size; ++j) {
    const VF k = vset1(token.k[j]), q = vset1(token.q[j]);
    LOADOUT_UNROLL
    for (int i = 0; i < NUM; ++i) {
      const int64_t at = j * stride + i * VF_WIDTH;
      const VF state = vfma(k, delta[i], vmul(decay, vload(read + at, lanes)));
      vstore(written + at, state, lanes);
      sums[i] = vfma(q, state, sums[i]);
    }
  }
  LOADOUT_UNROLL
  for (int i = 0; i < NUM; ++i) vstore(out + i * VF_WIDTH, sums[i], lanes);
}

constexpr int DELTA_VECTORS = 4;

template <typename T>
void delta_segment(const DeltaRuleArgs& args, int64_t segment, int64_t head) {
  const int64_t size = args.value_size, keys_size = args.num_key_heads * args.key_size;
  const int64_t width = 2 * keys_size + args.num_value_heads * size;
  const int64_t head_size = args.key_size * size;
  const int64_t slot_size = args.num_value_heads * head_size;
  const float* read = args.states + args.rows.read[segment] * slot_size + head * head_size;
  float* written = args.states + args.rows.written[segment] * slot_size + head * head_size;
  const int64_t start = args.rows.starts[segment], end = args.rows.starts[segment + 1];
  HeadToken token;
  const auto columns = [&](int64_t first, auto lanes, auto num) {
    for (int64_t t = start; t < end; ++t) {
      read_token<T>(args, t, head, token);
      const T* value = static_cast<const T*>(args.qkv) + t * width + 2 * keys_size + head * size;
      T* out = static_cast<T*>(args.out) + (t * args.num_value_heads + head) * size;
      update<decltype(num)::value>(token, (t == start ? read : written) + first, written + first,
                                   args.key_size, size, value + first, out + first, lanes);
    }
  };
  constexpr int64_t block = DELTA_VECTORS * VF_WIDTH;
  int64_t first = 0;
  for (; first + block <= size; first += block) {
    columns(first, AllLanes{}, std::integral_constant<int, DELTA_VECTORS>{});
  }
  for_vectors(size - first, [&](int64_t at, auto lanes) {
    columns(first + at, lanes, std::integral_constant<int, 1>{});
  });
}

template <typename T>
void delta_rule(const DeltaRuleArgs& args, const Slice& slice) {
  const int64_t num_items = *args.rows.num_rows * args.num_value_heads;
  for (int64_t item; (item = slice.take()) < num_items;) {
    const int64_t row = item / args.num_value_heads;
    for (int64_t segment = args.rows.firsts[row]; segment < args.rows.firsts[row + 1]; ++segment) {
      delta_segment<T>(args, segment, item % args.num_value_heads);
    }
  }
}

// x[t] = round(round(weight * round(x[t] / sqrt(mean(x[t]^2) + eps))) * silu(gate[t])), of each head.
struct GatedNormArgs {
  void* x;             // [T, num_heads, size]
  const void* gate;    // [T, num_heads, size], rows gate_stride apart
  const void* weight;  // [size], or one of each token
  const int32_t* num_tokens;
  int64_t num_heads;
  int64_t size;
  int64_t gate_stride;
  int64_t weight_stride;  // 0: all tokens have one weight
  float eps;
};

template <typename T>
void gated_norm(const GatedNormArgs& args, const Slice& slice) {
  const int64_t size = args.size;
  const auto mine = slice.range(*args.num_tokens * args.num_heads);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const int64_t t = i / args.num_heads, head = i % args.num_heads;
    T* x = static_cast<T*>(args.x) + i * size;
    const T* gate = static_cast<const T*>(args.gate) + t * args.gate_stride + head * size;
    const T* weight = static_cast<const T*>(args.weight) + t * args.weight_stride;
    VF squares = vzero();
    for_vectors(size, [&](int64_t at, auto lanes) {
      const VF value = vload(x + at, lanes);
      squares = vfma(value, value, squares);
    });
    const VF scale = vset1(1.0f / std::sqrt(reduce_add(squares) / size + args.eps));
    for_vectors(size, [&](int64_t at, auto lanes) {
      const VF normed = rounded<T>(vmul(vload(x + at, lanes), scale));
      const VF scaled = rounded<T>(vmul(normed, vload(weight + at, lanes)));
      const VF open = vload(gate + at, lanes);
      vstore(x + at, vmul(scaled, vmul(open, vsigmoid(open))), lanes);
    });
  }
}

}  // namespace loadout

LOADOUT_EXPORT(copy_runs_float, loadout::CopyRunsArgs, loadout::copy_runs<float>)
LOADOUT_EXPORT(copy_runs_bf16, loadout::CopyRunsArgs, loadout::copy_runs<loadout::bf16>)
LOADOUT_EXPORT(gate_heads_float, loadout::GateHeadsArgs, loadout::gate_heads<float>)
LOADOUT_EXPORT(gate_heads_bf16, loadout::GateHeadsArgs, loadout::gate_heads<loadout::bf16>)
LOADOUT_EXPORT(causal_conv_float, loadout::CausalConvArgs, loadout::causal_conv<float>)
LOADOUT_EXPORT(causal_conv_bf16, loadout::CausalConvArgs, loadout::causal_conv<loadout::bf16>)
LOADOUT_EXPORT(delta_rule_float, loadout::DeltaRuleArgs, loadout::delta_rule<float>)
LOADOUT_EXPORT(delta_rule_bf16, loadout::DeltaRuleArgs, loadout::delta_rule<loadout::bf16>)
LOADOUT_EXPORT(gated_norm_float, loadout::GatedNormArgs, loadout::gated_norm<float>)
LOADOUT_EXPORT(gated_norm_bf16, loadout::GatedNormArgs, loadout::gated_norm<loadout::bf16>)
