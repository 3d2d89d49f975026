// Element-wise work between the projections. Each rounds where the decoder's torch modules round.
#include <algorithm>
#include <limits>

#include "simd.h"
#include "slice.h"

namespace loadout {

// out[i] = source[rows[i]], or the last row of the source for one behind it. Of a part of a source,
// which begins with row `first_row` of the whole, zeros for rows that it does not have.
struct GatherArgs {
  const void* source;  // [S, size], rows source_stride apart
  void* out;           // [count, size]
  const int64_t* rows;
  const int32_t* count;
  int64_t size;
  int64_t source_stride;
  int64_t last_row;
  int64_t first_row;
  int64_t is_part;
};

template <typename T>
void gather(const GatherArgs& args, const Slice& slice) {
  const auto mine = slice.range(*args.count);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    T* out = static_cast<T*>(args.out) + i * args.size;
    const int64_t found = args.rows[i] - args.first_row, place = std::min(found, args.last_row);
    if (args.is_part && (found < 0 || found > args.last_row)) {
      std::memset(out, 0, args.size * sizeof(T));
      continue;
    }
    const T* row = static_cast<const T*>(args.source) + place * args.source_stride;
    std::memcpy(out, row, args.size * sizeof(T));
  }
}

// hidden[i] = round(hidden[i] + round(delta_scale * delta[i])), times sum_scale, rounded (delta
// null: as it is); out[i] = hidden[i] / sqrt(mean(hidden[i]^2) + eps) * weight, rounded before the
// product, too, unless the weight is wide; nothing without a weight. Centred: of hidden[i] -
// mean(hidden[i]), and then plus the bias.
struct RmsNormArgs {
  void* hidden;        // [count, size]
  const void* delta;   // [count, size], rows delta_stride apart, or null
  const void* weight;  // [size], of floats if it is wide, or null; or one of each count
  const float* bias;   // [size], of a centred norm, or null; or one of each count
  void* out;           // [count, size], rows out_stride apart; may be `hidden`
  const int32_t* count;
  int64_t rows_per_count;
  int64_t size;
  int64_t delta_stride;
  int64_t out_stride;
  int64_t weight_stride;  // 0: all rows have one weight
  int64_t bias_stride;    // as of weights
  int64_t is_wide;
  int64_t is_centred;
  float eps;
  float delta_scale;
  float sum_scale;
};

// Adds, and returns the sum of squares.
template <typename T, bool IS_SCALED>
VF add_delta(const RmsNormArgs& args, T* hidden, const T* delta) {
  const VF delta_scale = vset1(args.delta_scale), sum_scale = vset1(args.sum_scale);
  const int64_t size = args.size;
  VF squares = vzero();
  for_vectors(size, [&](int64_t at, auto lanes) {
    VF x = vload(hidden + at, lanes);
    if (delta) {
      VF added = vload(delta + at, lanes);
      if constexpr (IS_SCALED) added = rounded<T>(vmul(added, delta_scale));
      x = rounded<T>(vadd(x, added));
      if constexpr (IS_SCALED) x = rounded<T>(vmul(x, sum_scale));
      vstore(hidden + at, x, lanes);
    }
    squares = vfma(x, x, squares);
  });
  return squares;
}

// out = x * scale * the weight that begins at `first`: [size].
template <typename T, typename Args>
void scale_by_weight(const Args& args, const T* x, int64_t first, VF scale, T* out) {
  if (args.is_wide) {
    const float* weight = static_cast<const float*>(args.weight) + first;
    for_vectors(args.size, [&](int64_t at, auto lanes) {
      const VF normed = vmul(vload(x + at, lanes), scale);
      vstore(out + at, vmul(normed, vload(weight + at, lanes)), lanes);
    });
    return;
  }
  const T* weight = static_cast<const T*>(args.weight) + first;
  for_vectors(args.size, [&](int64_t at, auto lanes) {
    const VF normed = rounded<T>(vmul(vload(x + at, lanes), scale));
    vstore(out + at, vmul(normed, vload(weight + at, lanes)), lanes);
  });
}

template <typename T>
void centred_norm(const RmsNormArgs& args, const T* hidden, const float* weight, const float* bias,
                  T* out) {
  const int64_t size = args.size;
  VF sum = vzero();
  for_vectors(size, [&](int64_t at, auto lanes) { sum = vadd(sum, vload(hidden + at, lanes)); });
  const float mean = reduce_add(sum) / size;
  const VF middle = vset1(mean);
  VF differences = vzero();
  int64_t whole = 0;
  for (; whole + VF_WIDTH <= size; whole += VF_WIDTH) {
    const VF difference = vsub(vload(hidden + whole, AllLanes{}), middle);
    differences = vfma(difference, difference, differences);
  }
  float squares = reduce_add(differences);
  for (; whole < size; ++whole) {  // lanes without an element would be that far from the mean, too
    const float difference = to_float(hidden[whole]) - mean;
    squares += difference * difference;
  }
  const VF scale = vset1(1.0f / std::sqrt(squares / size + args.eps));
  for_vectors(size, [&](int64_t at, auto lanes) {
    const VF normed = vmul(vsub(vload(hidden + at, lanes), middle), scale);
    const VF made = vmul(normed, vload(weight + at, lanes));
    vstore(out + at, bias ? vadd(made, vload(bias + at, lanes)) : made, lanes);
  });
}

template <typename T>
void rms_norm(const RmsNormArgs& args, const Slice& slice) {
  const int64_t size = args.size;
  const bool is_scaled = args.delta_scale != 1.0f || args.sum_scale != 1.0f;
  const auto mine = slice.range(*args.count * args.rows_per_count);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    T* hidden = static_cast<T*>(args.hidden) + i * size;
    T* out = static_cast<T*>(args.out) + i * args.out_stride;
    const T* delta = static_cast<const T*>(args.delta);
    if (delta) delta += i * args.delta_stride;
    const VF squares = is_scaled ? add_delta<T, true>(args, hidden, delta)
                                 : add_delta<T, false>(args, hidden, delta);
    if (!args.weight) continue;
    const int64_t first = i / args.rows_per_count * args.weight_stride;
    if (args.is_centred) {
      const float* bias = args.bias ? args.bias + i / args.rows_per_count * args.bias_stride : nullptr;
      centred_norm(args, hidden, static_cast<const float*>(args.weight) + first, bias, out);
      continue;
    }
    const VF scale = vset1(1.0f / std::sqrt(reduce_add(squares) / size + args.eps));
    scale_by_weight(args, hidden, first, scale, out);
  }
}

// out[t] = the sum of squares of x[t].
struct SumSquaresArgs {
  const void* x;  // [count, size], rows x_stride apart
  float* out;     // [count], out_stride apart
  const int32_t* count;
  int64_t size;
  int64_t x_stride;
  int64_t out_stride;
};

template <typename T>
void sum_squares(const SumSquaresArgs& args, const Slice& slice) {
  const auto mine = slice.range(*args.count);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const T* x = static_cast<const T*>(args.x) + t * args.x_stride;
    VF squares = vzero();
    for_vectors(args.size, [&](int64_t at, auto lanes) {
      const VF each = vload(x + at, lanes);
      squares = vfma(each, each, squares);
    });
    args.out[t * args.out_stride] = reduce_add(squares);
  }
}

// x[t] = x[t] / sqrt(sums[t] / num_summed + eps) * weight, rounded as rms_norm does.
struct NormBySumArgs {
  void* x;             // [count, size], rows x_stride apart
  const void* weight;  // [size], of floats if it is wide; or one of each row
  const float* sums;   // [count], sums_stride apart
  const int32_t* count;
  int64_t size;
  int64_t x_stride;
  int64_t weight_stride;  // 0: all rows have one weight
  int64_t sums_stride;
  int64_t num_summed;
  int64_t is_wide;
  float eps;
};

template <typename T>
void norm_by_sum(const NormBySumArgs& args, const Slice& slice) {
  const auto mine = slice.range(*args.count);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const float mean = args.sums[t * args.sums_stride] / args.num_summed;
    scale_by_weight(args, static_cast<T*>(args.x) + t * args.x_stride, t * args.weight_stride,
                    vset1(1.0f / std::sqrt(mean + args.eps)),
                    static_cast<T*>(args.x) + t * args.x_stride);
  }
}

// out[t] = round(activation(gate[t])) * up[t].
struct GatedArgs {
  const void* gate;  // [T, size], rows gate_stride apart
  const void* up;    // [T, size], rows up_stride apart
  void* out;         // [T, size], rows out_stride apart
  const int32_t* num_tokens;
  int64_t size;
  int64_t gate_stride;
  int64_t up_stride;
  int64_t out_stride;
};

// x * sigmoid(logit).
inline VF times_sigmoid(VF x, VF logit) {
  return vdiv(x, vadd(vset1(1.0f), vexp(vsub(vzero(), logit))));
}

struct Silu {
  template <typename T>
  static VF apply(VF x) { return times_sigmoid(x, x); }
};

// 0.5 x (1 + tanh(u)) = x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
struct GeluTanh {
  template <typename T>
  static VF apply(VF x) {
    const VF cubic = vmul(vmul(x, x), vset1(2 * 0.7978845608f * 0.044715f));
    return times_sigmoid(x, vmul(x, vadd(cubic, vset1(2 * 0.7978845608f))));
  }
};

// x * sigmoid(1.702 x).
struct QuickGelu {
  template <typename T>
  static VF apply(VF x) { return times_sigmoid(x, vmul(x, vset1(1.702f))); }
};

// x times the share of the normal distribution below x. The share above |x| is by formula 7.1.26 of
// Abramowitz and Stegun, within 8e-8; of a result that is rounded to bf16, within 2^-10 of itself.
struct Gelu {
  template <typename T>
  static VF apply(VF x) {
    const VF one = vset1(1.0f), size = vmax(vsub(vzero(), x), x);
    const VF t = vreciprocal_for<T>(vfma(size, vset1(0.3275911f * 0.7071067812f), one));
    VF above = vset1(0.5f * 1.061405429f);
    above = vfma(above, t, vset1(0.5f * -1.453152027f));
    above = vfma(above, t, vset1(0.5f * 1.421413741f));
    above = vfma(above, t, vset1(0.5f * -0.284496736f));
    above = vfma(above, t, vset1(0.5f * 0.254829592f));
    const VF power = vmul(vmul(x, x), vset1(-0.5f * 1.44269504f));
    above = vmul(vmul(above, t), vexp2_for<T>(power));
    return vmul(x, vselect_below(x, vzero(), above, vsub(one, above)));
  }
};

template <typename T, typename Activation>
void gated(const GatedArgs& args, const Slice& slice) {
  const int64_t size = args.size;
  const auto mine = slice.range(*args.num_tokens);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const T* gate = static_cast<const T*>(args.gate) + t * args.gate_stride;
    const T* up = static_cast<const T*>(args.up) + t * args.up_stride;
    T* out = static_cast<T*>(args.out) + t * args.out_stride;
    for_vectors(size, [&](int64_t at, auto lanes) {
      const VF active = rounded<T>(Activation::template apply<T>(vload(gate + at, lanes)));
      vstore(out + at, vmul(active, vload(up + at, lanes)), lanes);
    });
  }
}

// out[t] = activation(x[t]).
struct ActivateArgs {
  const void* x;  // [T, size], rows x_stride apart
  void* out;      // [T, size], rows out_stride apart
  const int32_t* num_tokens;
  int64_t size;
  int64_t x_stride;
  int64_t out_stride;
};

template <typename T, typename Activation>
void activate(const ActivateArgs& args, const Slice& slice) {
  const auto mine = slice.range(*args.num_tokens);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const T* x = static_cast<const T*>(args.x) + t * args.x_stride;
    T* out = static_cast<T*>(args.out) + t * args.out_stride;
    for_vectors(args.size, [&](int64_t at, auto lanes) {
      vstore(out + at, Activation::template apply<T>(vload(x + at, lanes)), lanes);
    });
  }
}

// x[t] = round(x[t] + rows[types[t]]) + table[first_row + positions[t]], in place; a part that is
// null is left out, and null types are 0.
struct AddRowsArgs {
  void* x;               // [T, size]
  const void* rows;      // [K, size], or null
  const int64_t* types;  // [T], below K, or null
  const void* table;     // [S, size], or null
  const int64_t* positions;
  const int32_t* num_tokens;
  int64_t size;
  int64_t first_row;
};

template <typename T>
void add_rows(const AddRowsArgs& args, const Slice& slice) {
  const auto mine = slice.range(*args.num_tokens);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    T* x = static_cast<T*>(args.x) + t * args.size;
    const T* row = static_cast<const T*>(args.rows);
    if (row && args.types) row += args.types[t] * args.size;
    const T* own = static_cast<const T*>(args.table);
    if (own) own += (args.first_row + args.positions[t]) * args.size;
    for_vectors(args.size, [&](int64_t at, auto lanes) {
      VF sum = vload(x + at, lanes);
      if (row) sum = rounded<T>(vadd(sum, vload(row + at, lanes)));
      if (own) sum = vadd(sum, vload(own + at, lanes));
      vstore(x + at, sum, lanes);
    });
  }
}

// out[t] = (up + 1) * gate * sigmoid(alpha * gate), both bounded first, rounded once.
struct ClampedSwigluArgs {
  GatedArgs gated;
  float alpha;
  float limit;
};

template <typename T>
void clamped_swiglu(const ClampedSwigluArgs& args, const Slice& slice) {
  const GatedArgs& own = args.gated;
  const VF one = vset1(1.0f), most = vset1(args.limit), least = vset1(-args.limit);
  const VF alpha = vset1(-args.alpha);
  const auto mine = slice.range(*own.num_tokens);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const T* gate = static_cast<const T*>(own.gate) + t * own.gate_stride;
    const T* up = static_cast<const T*>(own.up) + t * own.up_stride;
    T* out = static_cast<T*>(own.out) + t * own.out_stride;
    for_vectors(own.size, [&](int64_t at, auto lanes) {
      const VF g = vmin(most, vload(gate + at, lanes));
      const VF u = vmax(least, vmin(most, vload(up + at, lanes)));
      const VF active = vdiv(g, vadd(one, vexp(vmul(g, alpha))));
      vstore(out + at, vmul(vadd(u, one), active), lanes);
    });
  }
}

// x[i] = round(scale * x[i]), or, with a cap, cap * tanh(scale * x[i] / cap), -inf staying as it is.
struct ScaleArgs {
  void* x;  // [count, size]
  const int32_t* count;
  int64_t size;
  float scale;
  float softcap;  // 0: none
};

template <typename T>
void scale_rows(const ScaleArgs& args, const Slice& slice) {
  const VF scale = vset1(args.scale), cap = vset1(args.softcap);
  const auto mine = slice.range(*args.count);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    T* row = static_cast<T*>(args.x) + i * args.size;
    for_vectors(args.size, [&](int64_t at, auto lanes) {
      VF x = vmul(vload(row + at, lanes), scale);
      if (args.softcap) {
        const VF capped = vmul(vtanh(vdiv(x, cap)), cap);
        x = vselect_below(x, vset1(-std::numeric_limits<float>::max()), x, capped);
      }
      vstore(row + at, x, lanes);
    });
  }
}

}  // namespace loadout

LOADOUT_EXPORT(gather_float, loadout::GatherArgs, loadout::gather<float>)
LOADOUT_EXPORT(gather_bf16, loadout::GatherArgs, loadout::gather<loadout::bf16>)
LOADOUT_EXPORT(rms_norm_float, loadout::RmsNormArgs, loadout::rms_norm<float>)
LOADOUT_EXPORT(rms_norm_bf16, loadout::RmsNormArgs, loadout::rms_norm<loadout::bf16>)
LOADOUT_EXPORT(sum_squares_float, loadout::SumSquaresArgs, loadout::sum_squares<float>)
LOADOUT_EXPORT(sum_squares_bf16, loadout::SumSquaresArgs, loadout::sum_squares<loadout::bf16>)
LOADOUT_EXPORT(norm_by_sum_float, loadout::NormBySumArgs, loadout::norm_by_sum<float>)
LOADOUT_EXPORT(norm_by_sum_bf16, loadout::NormBySumArgs, loadout::norm_by_sum<loadout::bf16>)
LOADOUT_EXPORT(swiglu_float, loadout::GatedArgs, (loadout::gated<float, loadout::Silu>))
LOADOUT_EXPORT(swiglu_bf16, loadout::GatedArgs, (loadout::gated<loadout::bf16, loadout::Silu>))
LOADOUT_EXPORT(geglu_float, loadout::GatedArgs, (loadout::gated<float, loadout::GeluTanh>))
LOADOUT_EXPORT(geglu_bf16, loadout::GatedArgs, (loadout::gated<loadout::bf16, loadout::GeluTanh>))
LOADOUT_EXPORT(exact_geglu_float, loadout::GatedArgs, (loadout::gated<float, loadout::Gelu>))
LOADOUT_EXPORT(exact_geglu_bf16, loadout::GatedArgs, (loadout::gated<loadout::bf16, loadout::Gelu>))
LOADOUT_EXPORT(silu_float, loadout::ActivateArgs, (loadout::activate<float, loadout::Silu>))
LOADOUT_EXPORT(silu_bf16, loadout::ActivateArgs, (loadout::activate<loadout::bf16, loadout::Silu>))
LOADOUT_EXPORT(gelu_tanh_float, loadout::ActivateArgs, (loadout::activate<float, loadout::GeluTanh>))
LOADOUT_EXPORT(gelu_tanh_bf16, loadout::ActivateArgs,
               (loadout::activate<loadout::bf16, loadout::GeluTanh>))
LOADOUT_EXPORT(gelu_float, loadout::ActivateArgs, (loadout::activate<float, loadout::Gelu>))
LOADOUT_EXPORT(gelu_bf16, loadout::ActivateArgs, (loadout::activate<loadout::bf16, loadout::Gelu>))
LOADOUT_EXPORT(quick_gelu_float, loadout::ActivateArgs, (loadout::activate<float, loadout::QuickGelu>))
LOADOUT_EXPORT(quick_gelu_bf16, loadout::ActivateArgs,
               (loadout::activate<loadout::bf16, loadout::QuickGelu>))
LOADOUT_EXPORT(add_rows_float, loadout::AddRowsArgs, loadout::add_rows<float>)
LOADOUT_EXPORT(add_rows_bf16, loadout::AddRowsArgs, loadout::add_rows<loadout::bf16>)
LOADOUT_EXPORT(clamped_swiglu_float, loadout::ClampedSwigluArgs, loadout::clamped_swiglu<float>)
LOADOUT_EXPORT(clamped_swiglu_bf16, loadout::ClampedSwigluArgs,
               loadout::clamped_swiglu<loadout::bf16>)
LOADOUT_EXPORT(scale_rows_float, loadout::ScaleArgs, loadout::scale_rows<float>)
LOADOUT_EXPORT(scale_rows_bf16, loadout::ScaleArgs, loadout::scale_rows<loadout::bf16>)
