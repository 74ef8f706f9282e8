// Backward rows: dz = probs * (grad_probs - sum of probs * grad_probs), and its sums for a bias.
// Included once per instruction set, behind its target pragma.

#pragma once

#include <cstdint>
#include <cstring>

#include "convert_impl.h"
#include "reduce_impl.h"
#include "row_kernels.h"
#include "workspace.h"

namespace sms_plugin {
namespace {

// Rows that are added up before their sum joins the others': errors grow with the logarithm.
constexpr int64_t kRowsPerRun = 32;

template <typename T>
inline void add_to(T* sums, const T* values, int64_t count) {  // [count], [count]
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) sums[j] += values[j];
}

template <typename T, typename S>
class BackwardRows {
 public:
  explicit BackwardRows(const BackwardCall& call)
      : call_(call),
        scale_(static_cast<T>(call.scale)),
        run_(call.dz_sums != nullptr ? call.kept.cols : 0) {}

  void run(int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t kept = unit / call_.chunks;
      const int64_t chunk = unit % call_.chunks;
      const int64_t first = chunk * call_.reduced.rows / call_.chunks;
      const int64_t last = (chunk + 1) * call_.reduced.rows / call_.chunks;
      if (call_.dz_sums == nullptr) {
        for (int64_t r = first; r < last; ++r) row(kept, r, nullptr);
      } else {
        sum_rows(kept, first, last, static_cast<T*>(call_.dz_sums) + unit * call_.kept.cols);
      }
    }
  }

 private:
  void sum_rows(int64_t kept, int64_t first, int64_t last, T* sums) {  // [cols]
    const int64_t cols = call_.kept.cols;
    for (int64_t begin = first; begin < last; begin += kRowsPerRun) {
      T* target = begin == first ? sums : run_.data();
      std::memset(target, 0, cols * sizeof(T));
      const int64_t end = last < begin + kRowsPerRun ? last : begin + kRowsPerRun;
      for (int64_t r = begin; r < end; ++r) row(kept, r, target);
      if (target != sums) add_to(sums, target, cols);
    }
  }

  void row(int64_t kept, int64_t reduced, T* sums) {  // [cols] or null
    const int64_t cols = call_.kept.cols;
    const int64_t index = offset(2, kept, reduced);
    const S* grad_probs = static_cast<const S*>(call_.grad_probs) + offset(0, kept, reduced);
    const S* probs = static_cast<const S*>(call_.probs) + offset(1, kept, reduced);
    const int64_t query = call_.causal.is_causal ? index % call_.causal.queries : 0;
    const int64_t visible = call_.causal.visible(query);
    const T dot = row_dot(grad_probs, probs, visible);
    S* grad_scores = nullptr;
    if (call_.grad_scores != nullptr) {
      grad_scores = static_cast<S*>(call_.grad_scores) + index * cols;
      std::memset(grad_scores + visible, 0, (cols - visible) * sizeof(S));
    }
    for (int64_t c = 0; c < visible; c += kStride) {
      const int64_t count = visible - c < kStride ? visible - c : kStride;
      finish(grad_probs + c, probs + c, dot, count, grad_scores ? grad_scores + c : nullptr,
             sums ? sums + c : nullptr);
    }
  }

  int64_t offset(int operand, int64_t kept, int64_t reduced) const {
    return call_.kept.offset(operand, kept) + call_.reduced.offset(operand, reduced);
  }

  // Sum of probs * grad_probs; nothing is added where probs is 0, whatever the gradient holds.
  T row_dot(const S* grad_probs, const S* probs, int64_t visible) {  // [visible], [visible]
    T wide_grad[kStride];
    T wide_probs[kStride];
    T products[kStride];
    RowSum<T> sum;
    for (int64_t c = 0; c < visible; c += kStride) {
      const int64_t count = visible - c < kStride ? visible - c : kStride;
      const T* g = widen(grad_probs + c, count, wide_grad);
      const T* p = widen(probs + c, count, wide_probs);
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) products[j] = p[j] != 0 ? p[j] * g[j] : 0;
      sum.add_columns(products, count);
    }
    return static_cast<T>(sum.total());
  }

  void finish(const S* grad_probs, const S* probs, T dot, int64_t count,  // [count], [count]
              S* grad_scores, T* sums) {  // [count] or null, [count] or null
    T wide_grad[kStride];
    T wide_probs[kStride];
    const T* g = widen(grad_probs, count, wide_grad);
    const T* p = widen(probs, count, wide_probs);
    if (grad_scores != nullptr) {
      T dz[kStride];
      const T scale = scale_;
      // probs, which may be subnormal, come last: nothing else underflows in a way that matters.
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) {
        dz[j] = p[j] != 0 ? p[j] * (scale * (g[j] - dot)) : 0;
      }
      narrow(dz, static_cast<T>(1), count, grad_scores);
    }
    if (sums != nullptr) {
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) {
        sums[j] = p[j] != 0 ? mul_add(p[j], g[j] - dot, sums[j]) : sums[j];
      }
    }
  }

  const BackwardCall& call_;
  const T scale_;
  Workspace<T> run_;  // one row of sums
};

template <typename T, typename S>
void backward_rows(const BackwardCall& call, int64_t begin, int64_t end) {
  BackwardRows<T, S>(call).run(begin, end);
}

template <typename T>
void store_bias_rows(const BiasStoreCall& call, int64_t begin, int64_t end) {
  const int64_t cols = call.cols;
  Workspace<T> row(round_up(cols, kBlock));
  T* total = row.data();
  for (int64_t k = begin; k < end; ++k) {
    const T* sums = static_cast<const T*>(call.dz_sums) + k * call.chunks * cols;
    std::memcpy(total, sums, cols * sizeof(T));
    for (int64_t c = 1; c < call.chunks; ++c) add_to(total, sums + c * cols, cols);
    if (!call.cols_kept) {
      RowSum<T> sum;
      sum.add_columns(total, cols);
      total[0] = static_cast<T>(sum.total());
    }
    const int64_t count = call.cols_kept ? cols : 1;
    const T one = 1;
    switch (call.dtype) {
      case Dtype::kFloat16:
        narrow(total, one, count, static_cast<Half*>(call.grad_bias) + k * count);
        break;
      case Dtype::kBFloat16:
        narrow(total, one, count, static_cast<BFloat16*>(call.grad_bias) + k * count);
        break;
      case Dtype::kFloat32:
        narrow(total, one, count, static_cast<float*>(call.grad_bias) + k * count);
        break;
      default:
        narrow(total, one, count, static_cast<double*>(call.grad_bias) + k * count);
    }
  }
}

}  // namespace
}  // namespace sms_plugin
