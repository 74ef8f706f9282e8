// Forward rows: z into a buffer, its maximum, exponentials and their sum, one rounding at the
// store. Included once per instruction set, behind its target pragma.

#pragma once

#include <cstdint>
#include <cstring>

#include "convert_impl.h"
#include "reduce_impl.h"
#include "row_kernels.h"
#include "workspace.h"

namespace sms_plugin {
namespace {

// `count` columns of an additive operand in the accumulator's type.
template <typename T>
inline const T* load_additive(const Operand& operand, int64_t offset, int64_t stride, int64_t count,
                              T* buffer) {  // [count]
  switch (operand.dtype) {
    case Dtype::kFloat16:
      return gather(static_cast<const Half*>(operand.data) + offset, stride, count, buffer);
    case Dtype::kBFloat16:
      return gather(static_cast<const BFloat16*>(operand.data) + offset, stride, count, buffer);
    case Dtype::kFloat32:
      return gather(static_cast<const float*>(operand.data) + offset, stride, count, buffer);
    default:
      return gather(static_cast<const double*>(operand.data) + offset, stride, count, buffer);
  }
}

// Selection, not arithmetic: whatever lies under a masked position is dropped.
template <typename T>
inline void remove_masked(const uint8_t* mask, int64_t stride, int64_t count, T removed,
                          T* values) {  // [count]
  if (stride == 1) {
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) values[j] = mask[j] ? removed : values[j];
  } else {
    for (int64_t j = 0; j < count; ++j) values[j] = mask[j * stride] ? removed : values[j];
  }
}

template <typename T>
inline void fill(T* values, int64_t begin, int64_t end, T value) {
  for (int64_t j = begin; j < end; ++j) values[j] = value;
}

// Where one row of each operand starts, in elements.
struct RowOffsets {
  int64_t scores, mask, bias;
};

template <typename T, typename S>
class ForwardRows {
 public:
  explicit ForwardRows(const ForwardCall& call)
      : call_(call),
        scale_(static_cast<T>(call.scale * kEighth)),
        has_bool_mask_(call.mask.data != nullptr && call.mask.dtype == Dtype::kBool),
        has_float_mask_(call.mask.data != nullptr && call.mask.dtype != Dtype::kBool),
        z_(round_up(call.layout.cols, kBlock)) {}

  void run(int64_t begin, int64_t end) {
    const RowLayout& layout = call_.layout;
    for (int64_t row = begin; row < end; ++row) {
      const RowOffsets at = {layout.offset(0, row), layout.offset(1, row), layout.offset(2, row)};
      const int64_t query = call_.causal.is_causal ? row % layout.sizes[0] : 0;
      const int64_t visible = call_.causal.visible(query);
      S* probs = static_cast<S*>(call_.probs) + row * layout.cols;
      const bool is_dead = !softmax(at, visible, probs);
      const int64_t written = is_dead ? 0 : visible;
      std::memset(probs + written, 0, (layout.cols - written) * sizeof(S));
    }
  }

 private:
  // probs of the visible columns; false if no key is kept.
  bool softmax(const RowOffsets& at, int64_t visible, S* probs) {  // [visible]
    T* z = z_.data();
    for (int64_t c = 0; c < visible; c += kStride) {
      load(at, c, visible - c < kStride ? visible - c : kStride, z + c);
    }
    const int64_t padded = round_up(visible, kLanes);
    fill(z, visible, padded, -infinity<T>());
    const T largest = row_max(z, padded);
    if (largest == -infinity<T>()) {
      if (!has_nan(z, visible)) return false;
      store_nan(at, visible, probs);
      return true;
    }
#pragma omp simd
    for (int64_t j = 0; j < padded; ++j) z[j] = exp_of_eighths(z[j] - largest);
    RowSum<T> sum;
    sum.add_columns(z, visible);
    const double total = sum.total();
    if (largest > Traits<T>::kMaxEighths || total != total) {
      store_nan(at, visible, probs);
    } else {
      narrow(z, static_cast<T>(1 / total), visible, probs);
    }
    return true;
  }

  // z of `count` columns from `first` on: scores * scale + bias + mask, in eighths.
  void load(const RowOffsets& at, int64_t first, int64_t count, T* z) {  // [count]
    T wide[kStride];
    const S* scores = static_cast<const S*>(call_.scores) + at.scores + first;
    const T* sum = widen(scores, count, wide);
    T factor = scale_;
    if (call_.bias.data != nullptr) {
      add(call_.bias, at.bias, call_.layout.col_strides[2], first, count, sum, factor, z);
      sum = z;
      factor = 1;
    }
    if (has_float_mask_) {
      add(call_.mask, at.mask, call_.layout.col_strides[1], first, count, sum, factor, z);
    } else if (sum != z) {
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) z[j] = sum[j] * factor;
    }
    if (has_bool_mask_) remove(at.mask, first, count, -infinity<T>(), z);
  }

  // z = sum * factor + operand, rounded once.
  void add(const Operand& operand, int64_t offset, int64_t stride, int64_t first, int64_t count,
           const T* sum, T factor, T* z) {  // [count], [count]
    T buffer[kStride];
    const T* addend = load_additive(operand, offset + first * stride, stride, count, buffer);
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) {
      z[j] = mul_add(sum[j], factor, addend[j] * static_cast<T>(kEighth));
    }
  }

  void remove(int64_t offset, int64_t first, int64_t count, T removed, T* values) {  // [count]
    const int64_t stride = call_.layout.col_strides[1];
    const uint8_t* mask = static_cast<const uint8_t*>(call_.mask.data) + offset + first * stride;
    remove_masked(mask, stride, count, removed, values);
  }

  static bool has_nan(const T* z, int64_t count) {  // [count]
    bool found = false;
    for (int64_t j = 0; j < count; ++j) found |= z[j] != z[j];
    return found;
  }

  // A row that diverged: NaN, but 0 where the mask or causality removed the position.
  void store_nan(const RowOffsets& at, int64_t visible, S* probs) {  // [visible]
    T* z = z_.data();
    fill(z, 0, visible, static_cast<T>(__builtin_nan("")));
    if (has_bool_mask_) remove(at.mask, 0, visible, static_cast<T>(0), z);
    narrow(z, static_cast<T>(1), visible, probs);
  }

  const ForwardCall& call_;
  const T scale_;  // in eighths
  const bool has_bool_mask_, has_float_mask_;
  Workspace<T> z_;  // one row
};

template <typename T, typename S>
void forward_rows(const ForwardCall& call, int64_t begin, int64_t end) {
  ForwardRows<T, S>(call).run(begin, end);
}

}  // namespace
}  // namespace sms_plugin
