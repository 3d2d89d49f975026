// Mixers with a recurrent state, and the gates of attention's heads, as kernels/recurrence/reference
// defines them. A row reads its sequence's state from one slot and writes it to another.
#include <algorithm>
#include <cmath>
#include <cstring>

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

// sum[t] = round(sum over j of weight[j] * in[t - size + 1 + j]), the tokens before the row's first
// being the state's. SILU: in = x, and out = silu(sum). GATED: x has b, c and x side by side, in =
// round(b * x), and out = c * sum.
enum class Conv { SILU, GATED };

struct CausalConvArgs {
  const void* x;        // [T, channels], or [T, 3 * channels]; rows stride apart
  void* out;            // [T, channels]
  const float* weight;  // [size, channels]
  float* states;        // [slots, size - 1, channels]
  StateRows rows;
  int64_t channels;
  int64_t size;
  int64_t stride;
};

constexpr int64_t CONV_BLOCK = 256;

// One segment's tokens, in a block of channels: token by token, so that reads follow each other.
template <Conv CONV, typename T>
void convolve(const CausalConvArgs& args, int64_t segment, int64_t first, int64_t num_channels) {
  const int64_t before = args.size - 1, start = args.rows.starts[segment];
  const int64_t count = args.rows.starts[segment + 1] - start;
  const int64_t slot_size = before * args.channels;
  const float* read = args.states + args.rows.read[segment] * slot_size + first;
  float* written = args.states + args.rows.written[segment] * slot_size + first;
  const T* x = static_cast<const T*>(args.x) + start * args.stride + first;
  T* out = static_cast<T*>(args.out) + start * args.channels + first;
  const float* weight = args.weight + first;
  // The input at a place before or after the segment's first.
  const auto input = [&](int64_t t, int64_t at, auto lanes) {
    if (t < 0) return vload(read + (before + t) * args.channels + at, lanes);
    const VF value = vload(x + t * args.stride + at, lanes);
    if (CONV == Conv::SILU) return value;
    return rounded<T>(vmul(value, vload(x + t * args.stride + 2 * args.channels + at, lanes)));
  };
  for (int64_t t = 0; t < count; ++t) {
    for_vectors(num_channels, [&](int64_t at, auto lanes) {
      VF sum = vzero();
      for (int64_t j = 0; j < args.size; ++j) {
        sum = vfma(vload(weight + j * args.channels + at, lanes), input(t - before + j, at, lanes),
                   sum);
      }
      sum = rounded<T>(sum);
      const VF factor = CONV == Conv::SILU
                            ? vsigmoid(sum)
                            : vload(x + t * args.stride + args.channels + at, lanes);
      vstore(out + t * args.channels + at, vmul(sum, factor), lanes);
    });
  }
  for (int64_t j = 0; j < before; ++j) {
    for_vectors(num_channels, [&](int64_t at, auto lanes) {
      vstore(written + j * args.channels + at, input(count - before + j, at, lanes), lanes);
    });
  }
}

template <Conv CONV, typename T>
void convolve_rows(const CausalConvArgs& args, const Slice& slice) {
  const int64_t num_blocks = (args.channels + CONV_BLOCK - 1) / CONV_BLOCK;
  const int64_t num_items = *args.rows.num_rows * num_blocks;
  for (int64_t item; (item = slice.take()) < num_items;) {
    const int64_t row = item / num_blocks, first = item % num_blocks * CONV_BLOCK;
    for (int64_t segment = args.rows.firsts[row]; segment < args.rows.firsts[row + 1]; ++segment) {
      convolve<CONV, T>(args, segment, first, std::min(CONV_BLOCK, args.channels - first));
    }
  }
}

template <typename T>
void causal_conv(const CausalConvArgs& args, const Slice& slice) {
  convolve_rows<Conv::SILU, T>(args, slice);
}

template <typename T>
void gated_conv(const CausalConvArgs& args, const Slice& slice) {
  convolve_rows<Conv::GATED, T>(args, slice);
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

// C tokens of a head that follow each other, of which `count` are there: the others change nothing.
// Queries and keys have length 1; token i's delta reaches the output and the delta of token c with
// the product of their vectors and of the decays in between.
template <int C>
struct HeadTokens {
  float q[C][MAX_KEY_SIZE];
  float k[C][MAX_KEY_SIZE];
  float beta[C];
  float decay[C];    // from the state before the first token
  float to_end[C];   // of a token's delta, to the last one
  float keys[C][C];  // with the decays from token i to token c, below the diagonal
  float outs[C][C];  // and on it
  int64_t first;     // where the tokens lie in the step
  int64_t count;
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

inline float dot(const float* a, const float* b, int64_t size) {
  VF sum = vzero();
  for_vectors(size, [&](int64_t at, auto lanes) {
    sum = vfma(vload(a + at, lanes), vload(b + at, lanes), sum);
  });
  return reduce_add(sum);
}

template <int C, typename T>
void read_tokens(const DeltaRuleArgs& args, int64_t first, int64_t count, int64_t head,
                 HeadTokens<C>& tokens) {
  const int64_t size = args.key_size, keys_size = args.num_key_heads * size;
  const int64_t width = 2 * keys_size + args.num_value_heads * args.value_size;
  const int64_t key_head = head / (args.num_value_heads / args.num_key_heads);
  const float scale = 1.0f / std::sqrt(static_cast<float>(size));
  tokens.first = first, tokens.count = count;
  float decays[C];
  for (int64_t c = 0; c < count; ++c) {
    const int64_t t = first + c;
    const T* q = static_cast<const T*>(args.qkv) + t * width + key_head * size;
    normalise(q, tokens.q[c], size, scale);
    normalise(q + keys_size, tokens.k[c], size, 1.0f);
    const float a = to_float(static_cast<const T*>(args.a)[t * args.stride + head]);
    const float b = to_float(static_cast<const T*>(args.b)[t * args.stride + head]);
    decays[c] = std::exp(args.rate[head] * softplus(a + args.bias[head]));
    tokens.beta[c] = to_float(from_float<T>(1.0f / (1.0f + std::exp(-b))));
  }
  for (int64_t c = count; c < C; ++c) {
    std::fill_n(tokens.q[c], size, 0.0f);
    std::fill_n(tokens.k[c], size, 0.0f);
    tokens.beta[c] = 0.0f, decays[c] = 1.0f;
  }
  float decay = 1.0f, to_end = 1.0f;
  for (int c = 0; c < C; ++c) tokens.decay[c] = decay *= decays[c];
  for (int c = C - 1; c >= 0; --c) tokens.to_end[c] = to_end, to_end *= decays[c];
  for (int c = 0; c < C; ++c) {
    float between = 1.0f;
    for (int i = c; i >= 0; --i) {
      tokens.outs[c][i] = between * dot(tokens.q[c], tokens.k[i], size);
      if (i < c) tokens.keys[c][i] = between * dot(tokens.k[c], tokens.k[i], size);
      between *= decays[i];
    }
  }
}

// Where a block of a state's columns is: row j begins at data + j * stride.
struct Columns {
  float* data;
  int64_t stride;
};

enum class Store { CACHED, STREAMED };

// NUM vectors of the state's columns, over the tokens: state = decay * state + k * delta, and out =
// q * state, of each. `values` and `outs` are of the first token, and token_stride apart. One pass
// over the state finds its products with all keys and queries, another one adds all deltas.
template <int C, int NUM, Store STORE, typename T, typename Lanes>
void update(const HeadTokens<C>& tokens, const Columns& read, const Columns& written, int64_t size,
            const T* values, int64_t value_stride, T* outs, int64_t out_stride, Lanes lanes) {
  VF by_key[C][NUM], by_query[C][NUM];
  LOADOUT_UNROLL
  for (int c = 0; c < C; ++c) {
    LOADOUT_UNROLL
    for (int i = 0; i < NUM; ++i) by_key[c][i] = by_query[c][i] = vzero();
  }
  for (int64_t j = 0; j < size; ++j) {
    LOADOUT_UNROLL
    for (int i = 0; i < NUM; ++i) {
      const VF state = vload(read.data + j * read.stride + i * VF_WIDTH, lanes);
      LOADOUT_UNROLL
      for (int c = 0; c < C; ++c) {
        by_key[c][i] = vfma(vset1(tokens.k[c][j]), state, by_key[c][i]);
        by_query[c][i] = vfma(vset1(tokens.q[c][j]), state, by_query[c][i]);
      }
    }
  }
  LOADOUT_UNROLL
  for (int i = 0; i < NUM; ++i) {
    VF deltas[C];
    LOADOUT_UNROLL
    for (int c = 0; c < C; ++c) {
      if (C > 1 && c >= tokens.count) {
        deltas[c] = vzero();
        continue;
      }
      VF expected = vmul(vset1(tokens.decay[c]), by_key[c][i]);
      VF out = vmul(vset1(tokens.decay[c]), by_query[c][i]);
      LOADOUT_UNROLL
      for (int m = 0; m < c; ++m) {
        expected = vfma(vset1(tokens.keys[c][m]), deltas[m], expected);
        out = vfma(vset1(tokens.outs[c][m]), deltas[m], out);
      }
      const VF value = vload(values + c * value_stride + i * VF_WIDTH, lanes);
      deltas[c] = vmul(vset1(tokens.beta[c]), vsub(value, expected));
      out = vfma(vset1(tokens.outs[c][c]), deltas[c], out);
      vstore(outs + c * out_stride + i * VF_WIDTH, out, lanes);
    }
    LOADOUT_UNROLL
    for (int c = 0; c < C; ++c) by_key[c][i] = vmul(vset1(tokens.to_end[c]), deltas[c]);
  }
  const VF decay = vset1(tokens.decay[C - 1]);
  for (int64_t j = 0; j < size; ++j) {
    LOADOUT_UNROLL
    for (int i = 0; i < NUM; ++i) {
      VF state = vmul(decay, vload(read.data + j * read.stride + i * VF_WIDTH, lanes));
      LOADOUT_UNROLL
      for (int c = 0; c < C; ++c) state = vfma(vset1(tokens.k[c][j]), by_key[c][i], state);
      float* to = written.data + j * written.stride + i * VF_WIDTH;
      if constexpr (STORE == Store::STREAMED) {
        vstream(to, state);
      } else {
        vstore(to, state, lanes);
      }
    }
  }
}

constexpr int CHUNK = VF_WIDTH / 2;  // tokens at once: their sums fit in the registers
constexpr int ROW_VECTORS = VF_WIDTH / 2;
constexpr int64_t BUFFERED_COLUMNS = 128;

// One head's segment: its state, values and outputs.
template <typename T>
struct HeadSegment {
  float* read;
  float* written;
  int64_t key_size, value_size;
  int64_t start, end;
  const T* values;  // of the step's first token
  int64_t value_stride;
  T* outs;
  int64_t out_stride;

  HeadSegment(const DeltaRuleArgs& args, int64_t segment, int64_t head)
      : key_size(args.key_size), value_size(args.value_size) {
    const int64_t keys_size = args.num_key_heads * key_size;
    const int64_t head_size = key_size * value_size, slot_size = args.num_value_heads * head_size;
    read = args.states + args.rows.read[segment] * slot_size + head * head_size;
    written = args.states + args.rows.written[segment] * slot_size + head * head_size;
    start = args.rows.starts[segment], end = args.rows.starts[segment + 1];
    values = static_cast<const T*>(args.qkv) + 2 * keys_size + head * value_size;
    value_stride = 2 * keys_size + args.num_value_heads * value_size;
    outs = static_cast<T*>(args.out) + head * value_size;
    out_stride = args.num_value_heads * value_size;
  }
};

// A segment of one token reads its state once, from memory, and writes it past the caches: but for
// a row that goes on behind a border, nothing reads it again in this step.
template <typename T>
void decode(const DeltaRuleArgs& args, int64_t head, const HeadSegment<T>& at) {
  HeadTokens<1> tokens;
  read_tokens<1, T>(args, at.start, 1, head, tokens);
  const T* values = at.values + at.start * at.value_stride;
  T* outs = at.outs + at.start * at.out_stride;
  const auto columns = [&](int64_t first, auto lanes, auto num, auto store) {
    update<1, decltype(num)::value, decltype(store)::value>(
        tokens, {at.read + first, at.value_size}, {at.written + first, at.value_size}, at.key_size,
        values + first, 0, outs + first, 0, lanes);
  };
  constexpr int64_t block = ROW_VECTORS * VF_WIDTH;
  using Rows = std::integral_constant<int, ROW_VECTORS>;
  using One = std::integral_constant<int, 1>;
  using Cached = std::integral_constant<Store, Store::CACHED>;
  using Streamed = std::integral_constant<Store, Store::STREAMED>;
  const bool is_aligned =
      at.value_size % VF_WIDTH == 0 &&
      reinterpret_cast<uintptr_t>(at.written) % (VF_WIDTH * sizeof(float)) == 0;
  int64_t first = 0;
  for (; first + block <= at.value_size; first += block) {
    if (is_aligned) {
      columns(first, AllLanes{}, Rows{}, Streamed{});
    } else {
      columns(first, AllLanes{}, Rows{}, Cached{});
    }
  }
  for_vectors(at.value_size - first, [&](int64_t offset, auto lanes) {
    columns(first + offset, lanes, One{}, Cached{});
  });
  if (is_aligned) stream_fence();
}

// A segment of several tokens keeps its state in a buffer of vectors, each contiguous over the keys.
template <typename T>
void prefill(const DeltaRuleArgs& args, int64_t head, const HeadSegment<T>& at) {
  alignas(64) float buffer[BUFFERED_COLUMNS * MAX_KEY_SIZE];
  HeadTokens<CHUNK> tokens;
  for (int64_t begin = 0; begin < at.value_size; begin += BUFFERED_COLUMNS) {
    const int64_t num_columns = std::min(BUFFERED_COLUMNS, at.value_size - begin);
    const auto of = [&](int64_t column) { return buffer + column * at.key_size; };
    for (int64_t j = 0; j < at.key_size; ++j) {
      for_vectors(num_columns, [&](int64_t column, auto lanes) {
        vstore(of(column) + j * VF_WIDTH,
               vload(at.read + j * at.value_size + begin + column, lanes));
      });
    }
    for (int64_t t = at.start; t < at.end; t += CHUNK) {
      read_tokens<CHUNK, T>(args, t, std::min<int64_t>(CHUNK, at.end - t), head, tokens);
      const T* values = at.values + t * at.value_stride + begin;
      T* outs = at.outs + t * at.out_stride + begin;
      for_vectors(num_columns, [&](int64_t column, auto lanes) {
        const Columns state{of(column), VF_WIDTH};
        update<CHUNK, 1, Store::CACHED>(tokens, state, state, at.key_size, values + column,
                                        at.value_stride, outs + column, at.out_stride, lanes);
      });
    }
    for (int64_t j = 0; j < at.key_size; ++j) {
      for_vectors(num_columns, [&](int64_t column, auto lanes) {
        vstore(at.written + j * at.value_size + begin + column,
               vload(of(column) + j * VF_WIDTH), lanes);
      });
    }
  }
}

template <typename T>
void delta_rule(const DeltaRuleArgs& args, const Slice& slice) {
  const int64_t num_items = *args.rows.num_rows * args.num_value_heads;
  for (int64_t item; (item = slice.take()) < num_items;) {
    const int64_t row = item / args.num_value_heads;
    for (int64_t segment = args.rows.firsts[row]; segment < args.rows.firsts[row + 1]; ++segment) {
      const HeadSegment<T> at(args, segment, item % args.num_value_heads);
      if (at.end - at.start == 1) {
        decode(args, item % args.num_value_heads, at);
      } else {
        prefill(args, item % args.num_value_heads, at);
      }
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
LOADOUT_EXPORT(gated_conv_float, loadout::CausalConvArgs, loadout::gated_conv<float>)
LOADOUT_EXPORT(gated_conv_bf16, loadout::CausalConvArgs, loadout::gated_conv<loadout::bf16>)
LOADOUT_EXPORT(delta_rule_float, loadout::DeltaRuleArgs, loadout::delta_rule<float>)
LOADOUT_EXPORT(delta_rule_bf16, loadout::DeltaRuleArgs, loadout::delta_rule<loadout::bf16>)
LOADOUT_EXPORT(gated_norm_float, loadout::GatedNormArgs, loadout::gated_norm<float>)
LOADOUT_EXPORT(gated_norm_bf16, loadout::GatedNormArgs, loadout::gated_norm<loadout::bf16>)
