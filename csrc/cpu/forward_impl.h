// Forward rows: z into a buffer with its maximum, exponentials and their sum, one rounding at the
// store. Included once per instruction set, behind its target pragma.

#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "convert_impl.h"
#include "exp_impl.h"
#include "reduce_impl.h"
#include "row_cursor.h"
#include "row_kernels.h"
#include "workspace.h"

namespace sms_plugin {
namespace {

// Columns whose additive operands and mask are fetched at a time.
constexpr int64_t kFetch = 1024;

// `count` columns of an operand as T, one after the other: in place if they are that already.
template <typename T, typename S>
inline const T* fetch_as(const S* source, int64_t stride, int64_t count,
                         T* buffer) {  // [count]
  if constexpr (sizeof(S) == sizeof(T)) {
    if (stride == 1) return source;
  }
  for_each_group(count, [=](int64_t j, int n) SMS_PLUGIN_INLINE_LAMBDA {
    S gathered[kLanes];
    const S* group = source + j;
    if (stride != 1) {
      for (int l = 0; l < n; ++l) gathered[l] = source[(j + l) * stride];
      group = gathered;
    }
    store(load<T>(group, n), n, buffer + j);
  });
  return buffer;
}

template <typename T>
inline const T* fetch(const Operand& operand, int64_t offset, int64_t stride, int64_t count,
                      T* buffer) {  // [count]
  switch (operand.dtype) {
    case Dtype::kFloat16:
      return fetch_as(static_cast<const Half*>(operand.data) + offset, stride, count, buffer);
    case Dtype::kBFloat16:
      return fetch_as(static_cast<const BFloat16*>(operand.data) + offset, stride, count, buffer);
    case Dtype::kFloat32:
      return fetch_as(static_cast<const float*>(operand.data) + offset, stride, count, buffer);
    default:
      return fetch_as(static_cast<const double*>(operand.data) + offset, stride, count, buffer);
  }
}

inline const uint8_t* fetch_mask(const Operand& operand, int64_t offset, int64_t stride,
                                 int64_t count, uint8_t* buffer) {  // [count]
  const uint8_t* source = static_cast<const uint8_t*>(operand.data) + offset;
  if (stride == 1) return source;
  for (int64_t j = 0; j < count; ++j) buffer[j] = source[j * stride];
  return buffer;
}

template <typename T, typename S>
class ForwardRows {
 public:
  explicit ForwardRows(const ForwardCall& call)
      : call_(call),
        scale_(static_cast<T>(call.scale * kEighth)),
        has_bias_(call.bias.data != nullptr),
        has_bool_mask_(call.mask.data != nullptr && call.mask.dtype == Dtype::kBool),
        has_float_mask_(call.mask.data != nullptr && call.mask.dtype != Dtype::kBool),
        z_(round_up(call.layout.cols, kLanes)) {}

  void run(int64_t begin, int64_t end) {
    const int64_t cols = call_.layout.cols;
    RowCursor at(call_.layout, begin);
    for (int64_t row = begin; row < end; ++row, at.advance()) {
      const int64_t visible = call_.causal.visible(at.innermost());
      S* probs = static_cast<S*>(call_.probs) + row * cols;
      const bool has_kept = softmax(at, visible, probs);
      const int64_t written = has_kept ? visible : 0;
      if (written < cols) std::memset(probs + written, 0, (cols - written) * sizeof(S));
    }
  }

 private:
  // probs of the visible columns; false if no key is kept.
  bool softmax(const RowCursor& at, int64_t visible, S* probs) {  // [visible]
    T* z = z_.data();
    T largest = -infinity<T>();
    for (int64_t c = 0; c < visible; c += kFetch) {
      const T found = load_z(at, c, visible - c < kFetch ? visible - c : kFetch, z + c);
      largest = found > largest ? found : largest;
    }
    if (largest == -infinity<T>()) {
      if (!has_nan(z, visible)) return false;
      store_nan(at, visible, probs);
      return true;
    }
    const Lanes<T> shift = splat(largest);
    const double total = sum_columns<T>(visible, [=](int64_t j, int) SMS_PLUGIN_INLINE_LAMBDA {
      Lanes<T> values;
      read(z + j, kLanes, values);
      values = exp_of_eighths(values - shift);
      write(values, kLanes, z + j);
      return values;
    });
    constexpr T kMaxEighths = std::numeric_limits<T>::max() / 8;  // a larger z is infinite
    if (largest > kMaxEighths || total != total) {
      store_nan(at, visible, probs);
    } else {
      store_scaled(z, static_cast<T>(1 / total), visible, probs);
    }
    return true;
  }

  // Fetches what belongs to `count` columns from `first` on and computes their z; returns the
  // largest, NaN passed over.
  T load_z(const RowCursor& at, int64_t first, int64_t count, T* z) {  // [round_up(count, kLanes)]
    T bias_buffer[kFetch], mask_buffer[kFetch];
    uint8_t flags_buffer[kFetch];
    const S* scores = static_cast<const S*>(call_.scores) + at.offset(0) + first;
    const int64_t mask_stride = call_.layout.col_strides[1];
    const int64_t mask_offset = at.offset(1) + first * mask_stride;
    const T* added[2] = {};
    int additions = 0;
    if (has_bias_) {
      const int64_t stride = call_.layout.col_strides[2];
      added[additions++] =
          fetch(call_.bias, at.offset(2) + first * stride, stride, count, bias_buffer);
    }
    if (has_float_mask_) {
      added[additions++] = fetch(call_.mask, mask_offset, mask_stride, count, mask_buffer);
    }
    const uint8_t* removed = nullptr;
    if (has_bool_mask_) {
      removed = fetch_mask(call_.mask, mask_offset, mask_stride, count, flags_buffer);
    }
    if (additions == 0) return compute_z<0>(scores, added, removed, count, z);
    if (additions == 1) return compute_z<1>(scores, added, removed, count, z);
    return compute_z<2>(scores, added, removed, count, z);
  }

  // z = scores * scale + what is added, in eighths; -inf where removed and behind the last column.
  // Returns the largest.
  template <int kAdditions>
  T compute_z(const S* scores,         // [count]
              const T* const* added,   // [kAdditions][count]
              const uint8_t* removed,  // [count] or null
              int64_t count,
              T* z) {  // [round_up(count, kLanes)]
    const Lanes<T> scale = splat(scale_);
    const Lanes<T> eighth = splat(static_cast<T>(kEighth));
    const T* first = added[0];
    const T* second = added[1];
    Lanes<T> largest = splat(-infinity<T>());
    for_each_group(count, [&](int64_t j, int n) SMS_PLUGIN_INLINE_LAMBDA {
      Lanes<T> values = load<T>(scores + j, n);
      if constexpr (kAdditions == 0) {
        values = values * scale;
      } else {  // rounded once
        values = mul_add(values, scale, load<T>(first + j, n) * eighth);
      }
      if constexpr (kAdditions == 2) values = values + load<T>(second + j, n) * eighth;
      if (removed != nullptr) values = replace_masked(removed + j, n, -infinity<T>(), values);
      if (n < kLanes) values = replace_behind(n, -infinity<T>(), values);
      write(values, kLanes, z + j);
      largest = larger(values, largest);
    });
    return combine_lanes(largest, Larger());
  }

  static void store_scaled(const T* values, T factor, int64_t count, S* probs) {  // [count]
    const Lanes<T> factors = splat(factor);
    for_each_group(count, [=](int64_t j, int n) SMS_PLUGIN_INLINE_LAMBDA {
      Lanes<T> group;
      read(values + j, kLanes, group);
      store(group * factors, n, probs + j);
    });
  }

  static bool has_nan(const T* z, int64_t count) {  // [count]
    bool found = false;
    for (int64_t j = 0; j < count; ++j) found |= z[j] != z[j];
    return found;
  }

  // A row that diverged: NaN, but 0 where the mask or causality removed the position.
  void store_nan(const RowCursor& at, int64_t visible, S* probs) {  // [visible]
    T* values = z_.data();
    for (int64_t j = 0; j < visible; ++j) values[j] = std::numeric_limits<T>::quiet_NaN();
    if (has_bool_mask_) {
      const int64_t stride = call_.layout.col_strides[1];
      const uint8_t* mask = static_cast<const uint8_t*>(call_.mask.data) + at.offset(1);
      for (int64_t j = 0; j < visible; ++j) {
        if (mask[j * stride]) values[j] = 0;
      }
    }
    store_scaled(values, static_cast<T>(1), visible, probs);
  }

  const ForwardCall& call_;
  const T scale_;  // in eighths
  const bool has_bias_, has_bool_mask_, has_float_mask_;
  Workspace<T> z_;  // one row, padded to whole registers
};

template <typename T, typename S>
void forward_rows(const ForwardCall& call, int64_t begin, int64_t end) {
  ForwardRows<T, S>(call).run(begin, end);
}

}  // namespace
}  // namespace sms_plugin
