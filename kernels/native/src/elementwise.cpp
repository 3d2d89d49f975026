// Element-wise work between the projections. Each rounds where the decoder's torch modules round.
#include "simd.h"
#include "slice.h"

namespace loadout {

// hidden[t] = embedding[token_ids[t]].
struct EmbedArgs {
  const void* embedding;  // [vocab, size]
  void* hidden;           // [T, size]
  const int64_t* token_ids;
  const int32_t* num_tokens;
  int64_t size;
};

template <typename T>
void embed(const EmbedArgs& args, const Slice& slice) {
  const auto mine = slice.range(*args.num_tokens);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const T* row = static_cast<const T*>(args.embedding) + args.token_ids[t] * args.size;
    std::memcpy(static_cast<T*>(args.hidden) + t * args.size, row, args.size * sizeof(T));
  }
}

// With row(i) = rows ? rows[i] : i:
//   sum = hidden[row(i)] + delta[row(i)], rounded (delta null: hidden[row(i)])
//   out[i] = round(sum / sqrt(mean(sum^2) + eps)) * weight
// and hidden[i] = sum where rows is null.
struct RmsNormArgs {
  void* hidden;         // [T, size]
  const void* delta;    // [T, size] or null
  const void* weight;   // [size]
  void* out;            // [count, size]
  const int64_t* rows;  // [count] or null
  const int32_t* count;
  int64_t size;
  float eps;
};

template <typename T>
void rms_norm(const RmsNormArgs& args, const Slice& slice) {
  const int64_t size = args.size;
  const T* weight = static_cast<const T*>(args.weight);
  const auto mine = slice.range(*args.count);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const int64_t row = args.rows ? args.rows[i] : i;
    T* hidden = static_cast<T*>(args.hidden) + row * size;
    T* out = static_cast<T*>(args.out) + i * size;
    const T* delta = args.delta ? static_cast<const T*>(args.delta) + row * size : nullptr;
    T* sum = args.rows ? out : hidden;
    VF squares = vzero();
    for_vectors(size, [&](int64_t at, auto lanes) {
      VF x = vload(hidden + at, lanes);
      if (delta) x = rounded<T>(vadd(x, vload(delta + at, lanes)));
      if (delta || args.rows) vstore(sum + at, x, lanes);
      squares = vfma(x, x, squares);
    });
    const VF scale = vset1(1.0f / std::sqrt(reduce_add(squares) / size + args.eps));
    for_vectors(size, [&](int64_t at, auto lanes) {
      const VF normed = rounded<T>(vmul(vload(sum + at, lanes), scale));
      vstore(out + at, vmul(normed, vload(weight + at, lanes)), lanes);
    });
  }
}

// out[t] = round(silu(gate)) * up, where gate_up[t] holds both side by side.
struct SwigluArgs {
  const void* gate_up;  // [T, 2 * size]
  void* out;            // [T, size]
  const int32_t* num_tokens;
  int64_t size;
};

template <typename T>
void swiglu(const SwigluArgs& args, const Slice& slice) {
  const int64_t size = args.size;
  const VF one = vset1(1.0f);
  const auto mine = slice.range(*args.num_tokens);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const T* gate = static_cast<const T*>(args.gate_up) + t * 2 * size;
    const T* up = gate + size;
    T* out = static_cast<T*>(args.out) + t * size;
    for_vectors(size, [&](int64_t at, auto lanes) {
      const VF g = vload(gate + at, lanes);
      const VF silu = rounded<T>(vdiv(g, vadd(one, vexp(vsub(vzero(), g)))));
      vstore(out + at, vmul(silu, vload(up + at, lanes)), lanes);
    });
  }
}

}  // namespace loadout

LOADOUT_EXPORT(embed_float, loadout::EmbedArgs, loadout::embed<float>)
LOADOUT_EXPORT(embed_bf16, loadout::EmbedArgs, loadout::embed<loadout::bf16>)
LOADOUT_EXPORT(rms_norm_float, loadout::RmsNormArgs, loadout::rms_norm<float>)
LOADOUT_EXPORT(rms_norm_bf16, loadout::RmsNormArgs, loadout::rms_norm<loadout::bf16>)
LOADOUT_EXPORT(swiglu_float, loadout::SwigluArgs, loadout::swiglu<float>)
LOADOUT_EXPORT(swiglu_bf16, loadout::SwigluArgs, loadout::swiglu<loadout::bf16>)
