// Element-wise work between the projections. Each rounds where the decoder's torch modules round.
#include "simd.h"
#include "slice.h"

namespace loadout {

// out[i] = source[rows[i]].
struct GatherArgs {
  const void* source;  // [S, size]
  void* out;           // [count, size]
  const int64_t* rows;
  const int32_t* count;
  int64_t size;
};

template <typename T>
void gather(const GatherArgs& args, const Slice& slice) {
  const auto mine = slice.range(*args.count);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const T* row = static_cast<const T*>(args.source) + args.rows[i] * args.size;
    std::memcpy(static_cast<T*>(args.out) + i * args.size, row, args.size * sizeof(T));
  }
}

// hidden[i] = hidden[i] + delta[i], rounded (delta null: as it is);
// out[i] = round(hidden[i] / sqrt(mean(hidden[i]^2) + eps)) * weight.
struct RmsNormArgs {
  void* hidden;        // [count, size]
  const void* delta;   // [count, size] or null
  const void* weight;  // [size]
  void* out;           // [count, size]
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
    T* hidden = static_cast<T*>(args.hidden) + i * size;
    T* out = static_cast<T*>(args.out) + i * size;
    const T* delta = args.delta ? static_cast<const T*>(args.delta) + i * size : nullptr;
    VF squares = vzero();
    for_vectors(size, [&](int64_t at, auto lanes) {
      VF x = vload(hidden + at, lanes);
      if (delta) x = rounded<T>(vadd(x, vload(delta + at, lanes)));
      if (delta) vstore(hidden + at, x, lanes);
      squares = vfma(x, x, squares);
    });
    const VF scale = vset1(1.0f / std::sqrt(reduce_add(squares) / size + args.eps));
    for_vectors(size, [&](int64_t at, auto lanes) {
      const VF normed = rounded<T>(vmul(vload(hidden + at, lanes), scale));
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

LOADOUT_EXPORT(gather_float, loadout::GatherArgs, loadout::gather<float>)
LOADOUT_EXPORT(gather_bf16, loadout::GatherArgs, loadout::gather<loadout::bf16>)
LOADOUT_EXPORT(rms_norm_float, loadout::RmsNormArgs, loadout::rms_norm<float>)
LOADOUT_EXPORT(rms_norm_bf16, loadout::RmsNormArgs, loadout::rms_norm<loadout::bf16>)
LOADOUT_EXPORT(swiglu_float, loadout::SwigluArgs, loadout::swiglu<float>)
LOADOUT_EXPORT(swiglu_bf16, loadout::SwigluArgs, loadout::swiglu<loadout::bf16>)
