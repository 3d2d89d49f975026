// Element-wise work between the projections.
#include "simd.h"
#include "slice.h"

namespace loadout {

// x[t] = silu(gate) * up, where gate_up[t] holds both side by side.
struct SwigluArgs {
  const void* gate_up;  // [T, 2 * size]
  void* out;            // [T, size]
  const int32_t* num_tokens;
  int64_t size;
};

template <typename T>
void swiglu(const SwigluArgs& args, const Slice& slice) {
  const int64_t size = args.size;
  const auto mine = slice.range(*args.num_tokens);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const T* gate = static_cast<const T*>(args.gate_up) + t * 2 * size;
    const T* up = gate + size;
    T* out = static_cast<T*>(args.out) + t * size;
    for (int64_t i = 0; i < size; i += VF_WIDTH) {
      const int n = size - i < VF_WIDTH ? static_cast<int>(size - i) : VF_WIDTH;
      const VF g = vload(gate + i, n);
      const VF sigmoid = vdiv(vset1(1.0f), vadd(vset1(1.0f), vexp(vsub(vzero(), g))));
      vstore(out + i, vmul(vmul(g, sigmoid), vload(up + i, n)), n);
    }
  }
}

}  // namespace loadout

LOADOUT_EXPORT(swiglu_float, loadout::SwigluArgs, loadout::swiglu<float>)
LOADOUT_EXPORT(swiglu_bf16, loadout::SwigluArgs, loadout::swiglu<loadout::bf16>)
