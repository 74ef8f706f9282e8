// Backward rows: dz = probs * (grad_probs - sum of probs * grad_probs), and its sums for a bias.
// Included once per instruction set, behind its target pragma.

#pragma once

#include <cstdint>
#include <cstring>

#include "convert_impl.h"
#include "reduce_impl.h"
#include "row_cursor.h"
#include "row_kernels.h"
#include "workspace.h"

namespace sms_plugin {
namespace {

// Rows that are added up before their sum joins the others': errors grow with the logarithm.
constexpr int64_t kRowsPerRun = 32;

template <typename T>
inline void add_to(T* sums, const T* values, int64_t count) {  // [count], [count]
  for_each_group(count, [=](int64_t j, int n) SMS_PLUGIN_INLINE_LAMBDA {
    store(load<T>(sums + j, n) + load<T>(values + j, n), n, sums + j);
  });
}

template <typename T, typename S>
inline void store_row(const T* values, int64_t count, S* result) {  // [count], [count]
  for_each_group(count, [=](int64_t j, int n) SMS_PLUGIN_INLINE_LAMBDA {
    store(load<T>(values + j, n), n, result + j);
  });
}

// Stores row number `row` of a result in its dtype.
template <typename T>
inline void store_as(Dtype dtype, const T* values,  // [count]
                     int64_t count, void* result,   // [rows, count]
                     int64_t row) {
  switch (dtype) {
    case Dtype::kFloat16:
      return store_row(values, count, static_cast<Half*>(result) + row * count);
    case Dtype::kBFloat16:
      return store_row(values, count, static_cast<BFloat16*>(result) + row * count);
    case Dtype::kFloat32:
      return store_row(values, count, static_cast<float*>(result) + row * count);
    default:
      return store_row(values, count, static_cast<double*>(result) + row * count);
  }
}

template <typename T, typename S>
class BackwardRows {
 public:
  explicit BackwardRows(const BackwardCall& call)
      : call_(call),
        scale_(static_cast<T>(call.scale)),
        total_(call.sums != nullptr ? call.kept.cols : 0),
        run_(call.sums != nullptr ? call.kept.cols : 0) {}

  void run(int64_t begin, int64_t end) {
    RowCursor kept(call_.kept, begin / call_.chunks);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t chunk = unit % call_.chunks;
      const int64_t first = chunk * call_.reduced.rows / call_.chunks;
      const int64_t last = (chunk + 1) * call_.reduced.rows / call_.chunks;
      if (call_.sums == nullptr) {
        rows(kept, first, last, nullptr);
      } else {
        sum_rows(kept, first, last, unit);
      }
      if (chunk + 1 == call_.chunks) kept.advance();
    }
  }

 private:
  void sum_rows(const RowCursor& kept, int64_t first, int64_t last, int64_t unit) {
    const int64_t cols = call_.kept.cols;
    T* total = total_.data();
    for (int64_t begin = first; begin < last; begin += kRowsPerRun) {
      T* target = begin == first ? total : run_.data();
      std::memset(target, 0, cols * sizeof(T));
      rows(kept, begin, last < begin + kRowsPerRun ? last : begin + kRowsPerRun, target);
      if (target != total) add_to(total, target, cols);
    }
    if (call_.sum_cols != cols) {
      total[0] = static_cast<T>(sum_columns<T>(
          cols, [=](int64_t j, int n) SMS_PLUGIN_INLINE_LAMBDA { return load<T>(total + j, n); }));
    }
    store_as(call_.sums_dtype, total, call_.sum_cols, call_.sums, unit);
  }

  // Reduced rows [first, last) of one kept row.
  void rows(const RowCursor& kept, int64_t first, int64_t last, T* sums) {  // [cols] or null
    RowCursor reduced(call_.reduced, first);
    for (int64_t r = first; r < last; ++r, reduced.advance()) row(kept, reduced, sums);
  }

  void row(const RowCursor& kept, const RowCursor& reduced, T* sums) {  // [cols] or null
    const int64_t cols = call_.kept.cols;
    const auto offset = [&](int k) { return kept.offset(k) + reduced.offset(k); };
    const S* grad_probs = static_cast<const S*>(call_.grad_probs) + offset(0);
    const S* probs = static_cast<const S*>(call_.probs) + offset(1);
    const int64_t index = offset(2);
    const int64_t query = call_.causal.is_causal ? index % call_.causal.queries : 0;
    const int64_t visible = call_.causal.visible(query);
    const T dot = row_dot(grad_probs, probs, visible);
    S* grad_scores = nullptr;
    if (call_.grad_scores != nullptr) {
      grad_scores = static_cast<S*>(call_.grad_scores) + index * cols;
      if (visible < cols) std::memset(grad_scores + visible, 0, (cols - visible) * sizeof(S));
    }
    if (sums == nullptr) {
      finish<true, false>(grad_probs, probs, dot, visible, grad_scores, sums);
    } else if (grad_scores == nullptr) {
      finish<false, true>(grad_probs, probs, dot, visible, grad_scores, sums);
    } else {
      finish<true, true>(grad_probs, probs, dot, visible, grad_scores, sums);
    }
  }

  // Sum of probs * grad_probs; nothing is added where probs is 0, whatever the gradient holds.
  static T row_dot(const S* grad_probs, const S* probs, int64_t visible) {  // [visible], [visible]
    const double dot = sum_columns<T>(visible, [=](int64_t j, int n) SMS_PLUGIN_INLINE_LAMBDA {
      const Lanes<T> p = load<T>(probs + j, n);
      return where_nonzero(p, p * load<T>(grad_probs + j, n));
    });
    return static_cast<T>(dot);
  }

  template <bool kStores, bool kSums>
  void finish(const S* grad_probs, const S* probs, T dot, int64_t count,  // [count], [count]
              S* grad_scores, T* sums) {  // [count] if kStores, [count] if kSums
    const Lanes<T> dots = splat(dot);
    const Lanes<T> scale = splat(scale_);
    for_each_group(count, [=](int64_t j, int n) SMS_PLUGIN_INLINE_LAMBDA {
      const Lanes<T> p = load<T>(probs + j, n);
      const Lanes<T> difference = load<T>(grad_probs + j, n) - dots;
      // probs, which may be subnormal, come last: nothing else underflows in a way that matters.
      if constexpr (kStores) {
        store(where_nonzero(p, p * (scale * difference)), n, grad_scores + j);
      }
      if constexpr (kSums) {
        store(load<T>(sums + j, n) + where_nonzero(p, p * difference), n, sums + j);
      }
    });
  }

  const BackwardCall& call_;
  const T scale_;
  Workspace<T> total_, run_;  // one row each: the sums of a unit, those of its current rows
};

template <typename T, typename S>
void backward_rows(const BackwardCall& call, int64_t begin, int64_t end) {
  BackwardRows<T, S>(call).run(begin, end);
}

template <typename T>
void add_chunks(const ChunkCall& call, int64_t begin, int64_t end) {
  Workspace<T> row(call.cols);
  T* total = row.data();
  for (int64_t k = begin; k < end; ++k) {
    const T* sums = static_cast<const T*>(call.sums) + k * call.chunks * call.cols;
    std::memcpy(total, sums, call.cols * sizeof(T));
    for (int64_t c = 1; c < call.chunks; ++c) add_to(total, sums + c * call.cols, call.cols);
    store_as(call.total_dtype, total, call.cols, call.total, k);
  }
}

}  // namespace
}  // namespace sms_plugin
