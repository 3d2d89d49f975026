// Products with weights in few bits; see quantised.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "linear.h"
#include "panels.h"
#include "simd.h"
#include "slice.h"

namespace loadout {

// How weights are kept; as `kernels/quantised/pack.py` packs them.
struct QuantisedForm {
  const float* table;  // value of each code
  int64_t group_size;  // inputs that share a scale; of int8, a multiple of 4
  int64_t scales;      // the dtype of scales and offsets: 0 float32, 1 bfloat16, 2 float16
  int64_t has_offsets;
};

// Inputs rounded to int8: written by `quantise_inputs`, and read by the product that comes next.
struct Int8Inputs {
  int8_t* codes;  // [T, in_features to whole eights], zero beyond the last input
  float* scales;  // [T]
  int32_t* sums;  // [T, chunks]: the sum of each chunk's codes
};

struct QuantisedArgs {
  LinearArgs linear;
  QuantisedForm form;
  Int8Inputs inputs;  // only of products of int8, which read them for x
};

struct ExpertsQuantisedArgs {
  ExpertsLinearArgs experts;
  QuantisedForm form;
  Int8Inputs inputs;
};

struct QuantiseInputsArgs {
  const void* x;  // [T, in_features], rows x_stride elements apart
  Int8Inputs out;
  const int32_t* num_tokens;
  int64_t x_stride;
  int64_t in_features;
  int64_t group_size;
};

// Some inputs of one group, of a panel: a product's shortest sums.
struct Chunk {
  const char* scales;  // of PANEL outputs; offsets come next
  const char* codes;
  int64_t first, size;  // inputs
};

// Where a panel's chunks lie. Codes lie in words of `span` inputs of one output, `word_bytes` each.
class Chunks {
 public:
  Chunks(const QuantisedForm& form, int64_t in_features, int64_t most, int span, int word_bytes)
      : in_features_(in_features),
        group_size_(form.group_size),
        chunk_size_(std::min(most, form.group_size)),
        of_group_((form.group_size + most - 1) / most),
        chunk_bytes_(chunk_size_ / span * word_bytes * PANEL),
        scale_bytes_(PANEL * (form.scales ? 2 : 4)),
        header_bytes_(scale_bytes_ * (form.has_offsets ? 2 : 1)) {
    const int64_t words = (group_size_ + span - 1) / span;
    group_bytes_ = header_bytes_ + words * word_bytes * PANEL;
    const int64_t groups = (in_features + group_size_ - 1) / group_size_;
    panel_bytes_ = groups * group_bytes_;
    const int64_t last = in_features - (groups - 1) * group_size_;
    count_ = (groups - 1) * of_group_ + (last + chunk_size_ - 1) / chunk_size_;
  }

  int64_t count() const { return count_; }
  int64_t panel_bytes() const { return panel_bytes_; }
  int64_t scale_bytes() const { return scale_bytes_; }

  Chunk find(const char* panel, int64_t number) const {
    // Divisions take as long as some words.
    const int64_t group = of_group_ == 1 ? number : number / of_group_;
    const int64_t part = number - group * of_group_;
    const char* start = panel + group * group_bytes_;
    const int64_t in_group = part * chunk_size_, first = group * group_size_ + in_group;
    const int64_t end = std::min((group + 1) * group_size_, in_features_);
    return {start, start + header_bytes_ + part * chunk_bytes_, first,
            std::min(chunk_size_, end - first)};
  }

 private:
  const int64_t in_features_, group_size_, chunk_size_, of_group_, chunk_bytes_, scale_bytes_,
      header_bytes_;
  int64_t group_bytes_, panel_bytes_, count_;
};

// The v-th vector of a panel's scales or offsets.
inline VF load_scales(const char* scales, int64_t dtype, int v) {
  if (dtype == 0) return vload(reinterpret_cast<const float*>(scales) + v * VF_WIDTH);
  const char* halves = scales + v * VF_WIDTH * 2;
  if (dtype == 1) return vload(reinterpret_cast<const bf16*>(halves));
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
#else
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
#endif
}

// A panel's vectors of scales or offsets from the `first` on.
template <int VECTORS>
inline void load_scales(const char* scales, int64_t dtype, int first, VF (&out)[VECTORS]) {
  const auto load = [&](auto of_dtype) {
    LOADOUT_UNROLL for (int v = 0; v < VECTORS; ++v)
      out[v] = load_scales(scales, of_dtype, first + v);
  };
  if (dtype == 0) return load(std::integral_constant<int64_t, 0>());
  if (dtype == 1) return load(std::integral_constant<int64_t, 1>());
  load(std::integral_constant<int64_t, 2>());
}

// Computes all rows by all panels. A product has `most_rows` of an item, `panel_bytes`, and `multiply`,
// whose arguments are those with the panels' weights, the rows, the panel, and the bytes from it to
// the one that this thread takes next.
template <typename Product>
void multiply_items(Product& product, const LinearArgs& args, const Slice& slice) {
  const int64_t tokens = *args.num_tokens, most = product.most_rows();
  const int64_t blocks = (tokens + most - 1) / most, panels = num_panels(args);
  const int64_t items = blocks * panels;
  for (int64_t item = slice.take(), next; item < items; item = next) {
    next = slice.take();
    const int64_t block = item / panels, panel = item % panels;
    const int64_t step = next < items ? next % panels - panel : 0;
    product.multiply(args, tokens * block / blocks, tokens * (block + 1) / blocks, panel,
                     step * product.panel_bytes());
  }
}

// The same of the rows of experts, each by its expert's panels.
template <typename Product>
void multiply_items(Product& product, const ExpertsLinearArgs& args, const Slice& slice) {
  const int64_t panels = num_panels(args.linear);
  ExpertItems items(args, product.most_rows());
  for (ExpertItem item = items.find(slice.take()), next; item.expert >= 0; item = next) {
    next = items.find(slice.take());
    LinearArgs own = args.linear;
    const int64_t first_panel = item.expert * panels;
    own.weights = static_cast<const char*>(own.weights) + first_panel * product.panel_bytes();
    if (own.bias) own.bias += first_panel * PANEL;
    const int64_t step =
        next.expert >= 0 ? next.expert * panels + next.panel - first_panel - item.panel : 0;
    product.multiply(own, item.first, item.last, item.panel, step * product.panel_bytes());
  }
}

}  // namespace loadout
