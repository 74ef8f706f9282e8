// Forward kernels over a load functor (loads.cuh) and a store functor. No torch here.

#pragma once

#include "loads.cuh"
#include "mapping.cuh"
#include "primitives.cuh"
#include "row_writer.cuh"
#include "rows.cuh"

namespace sms_plugin {

// What happens at the store of the forward.
template <typename T>
struct StoreProbs {
  using Acc = Accumulator<T>;
  static constexpr int N = kVectorSize<T>;
  T* probs;  // [rows, cols], contiguous

  __device__ __forceinline__ T* row(int64_t row, int64_t cols) const { return probs + row * cols; }

  // The values to store for columns [first, first + N).
  __device__ __forceinline__ Vector<T> finish(const Acc (&p)[N]) const { return pack<T>(p); }
};

// What the exponentials are measured from: the row's maximum; 0 for a row that keeps nothing, so
// that all of it becomes exp(-inf); NaN for one that overflows or holds +inf. A NaN in the row
// passes through max unseen and reaches the sum.
template <typename Acc>
__device__ __forceinline__ Acc row_shift(Acc maximum) {
  if (maximum > Limits<Acc>::kMaxZ) return static_cast<Acc>(NAN);
  return maximum == negative_infinity(Acc{}) ? Acc{0} : maximum;
}

template <typename Acc>
__device__ __forceinline__ Acc row_factor(Acc sum) {
  return sum == Acc{0} ? Acc{0} : reciprocal(sum);
}

template <typename Load, typename Acc = typename Load::Acc>
__device__ __forceinline__ Acc vector_max(const Load& load, const typename Load::Held& held,
                                          Acc maximum) {
#pragma unroll
  for (int k = 0; k < Load::N; ++k) {
    const Acc z = load.z(held, k);
    maximum = z > maximum ? z : maximum;
  }
  return maximum;
}

template <typename Load, typename Acc = typename Load::Acc>
__device__ __forceinline__ Acc vector_sum(const Load& load, const typename Load::Held& held,
                                          Acc shift) {
  Acc weights[Load::N];
#pragma unroll
  for (int k = 0; k < Load::N; ++k) weights[k] = exp_of_eighth(load.z(held, k) - shift);
  return tree_sum(weights);
}

// Columns from `end` on and those removed by selection are 0 even in a NaN row.
template <typename Load, typename Store, typename Index, typename Acc = typename Load::Acc>
__device__ __forceinline__ auto vector_probs(const Load& load, const typename Load::Held& held,
                                             const Store& store, Acc shift, Acc factor, Index first,
                                             Index end) {
  // bfloat16 holds probs that float32 exponentials flush to 0: it gets them from 2^64 times as
  // large ones. The added exponent costs up to 3e-6 of accuracy, much below its half unit in the
  // last place.
  constexpr bool kHasWideRange = std::is_same_v<typename Load::Scalar, __nv_bfloat16>;
  constexpr int kExtraExponent = kHasWideRange ? 64 : 0;
  if constexpr (kHasWideRange) factor *= 0x1p-64f;
  Acc p[Load::N];
#pragma unroll
  for (int k = 0; k < Load::N; ++k) {
    p[k] = exp_of_eighth<kExtraExponent>(load.z(held, k) - shift) * factor;
    if (!load.is_selected(held, k)) p[k] = 0;
  }
  if (first + Load::N > end) {
#pragma unroll
    for (int k = 0; k < Load::N; ++k) {
      if (first + k >= end) p[k] = 0;
    }
  }
  return store.finish(p);
}

// kLanes threads own a row and keep it in registers, kVectors vectors each, striped.
// Reads the visible scores (and terms) once, writes all of probs once; exponentials are computed
// twice. Chosen for rows of up to kLanes * kVectors vectors (mapping.cuh). Safe: a row belongs to
// its threads alone; inactive groups take part in shuffles with an empty row.
template <typename Load, typename Store, int kLanes, int kVectors, int kThreads>
__global__ void __launch_bounds__(kThreads, min_blocks<Load>(kThreads))
    softmax_forward(const Load load, const Store store,
                    const __grid_constant__ DeviceRowLayout layout, const CausalLimit causal) {
  using Scalar = typename Load::Scalar;
  using Acc = typename Load::Acc;
  using Reduction = RowReduction<kLanes, Acc>;
  constexpr int N = Load::N;
  constexpr int kStripe = kLanes * N;
  __shared__ typename Reduction::Shared shared;

  const int lane = threadIdx.x % kLanes;
  int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  const bool is_active = row < layout.rows;
  if (!is_active) row = 0;

  const RowOffsets offsets = layout.template offsets<3>(row);
  const typename Load::Row in = load.row(layout, offsets);
  const int cols = is_active ? static_cast<int>(layout.cols) : 0;
  const RowWriter<Scalar, kLanes> out(store.row(row, layout.cols), cols);
  const int end = is_active ? static_cast<int>(causal.visible(offsets.query)) : 0;

  typename Load::Held held[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int first = v * kStripe + lane * N;
    held[v] = first < end ? load.load(in, first, end) : load.removed();
  }
  // These zeros depend on nothing: they are on their way while the loads arrive.
  if (!out.needs_all_lanes()) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int first = v * kStripe + lane * N;
      if (first >= end && first < cols) out.store(first, zero_vector<Scalar>());
    }
  }

  Acc maximum = negative_infinity(Acc{});
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (v * kStripe < end) maximum = vector_max(load, held[v], maximum);
  }
  const Acc shift = row_shift(Reduction::max(maximum, shared));

  Acc sums[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    Load::between_passes(held[v]);
    sums[v] = v * kStripe < end ? vector_sum(load, held[v], shift) : Acc{0};
  }
  const Acc factor = row_factor(Reduction::sum(tree_sum(sums), shared));

#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    Load::between_passes(held[v]);
    const int first = v * kStripe + lane * N;
    Vector<Scalar> probs = zero_vector<Scalar>();
    if (first < end) probs = vector_probs(load, held[v], store, shift, factor, first, end);
    if (first < end || (out.needs_all_lanes() && v * kStripe < layout.cols))
      out.store(first, probs);
  }
}

// A block owns a row that doesn't fit in registers and reads it three times, twice from the L2 if
// it fits. Chosen for rows beyond Load::kMaxResident; any length. Safe: a row belongs to its block
// alone.
template <typename Load, typename Store, int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    softmax_forward_streaming(const Load load, const Store store,
                              const __grid_constant__ DeviceRowLayout layout,
                              const CausalLimit causal) {
  using Scalar = typename Load::Scalar;
  using Acc = typename Load::Acc;
  using Reduction = RowReduction<kThreads, Acc>;
  constexpr int N = Load::N;
  constexpr int64_t kStep = int64_t{kThreads} * N;
  __shared__ typename Reduction::Shared shared;

  const int64_t row = blockIdx.x;
  const RowOffsets offsets = layout.template offsets<3>(row);
  const typename Load::Row in = load.row(layout, offsets);
  const int64_t cols = layout.cols;
  const RowWriter<Scalar, kThreads> out(store.row(row, cols), cols);
  const int64_t end = causal.visible(offsets.query);
  const int64_t start = int64_t{threadIdx.x} * N;

  Acc maximum = negative_infinity(Acc{});
#pragma unroll 4
  for (int64_t first = start; first < end; first += kStep) {
    maximum = vector_max(load, load.load(in, first, end), maximum);
  }
  const Acc shift = row_shift(Reduction::max(maximum, shared));

  constexpr int kSums = kStreamingSums<Acc>;
  Acc sums[kSums] = {};
  for (int64_t base = start; base < end; base += kSums * kStep) {
#pragma unroll
    for (int u = 0; u < kSums; ++u) {
      const int64_t first = base + u * kStep;
      if (first < end) sums[u] += vector_sum(load, load.load(in, first, end), shift);
    }
  }
  const Acc factor = row_factor(Reduction::sum(tree_sum(sums), shared));

  // Whole warps: all lanes of one are needed to store a row behind a boundary.
  const int64_t lane_first = int64_t{threadIdx.x % kWarpSize} * N;
#pragma unroll 4
  for (int64_t base = start - lane_first; base < cols; base += kStep) {
    const int64_t first = base + lane_first;
    Vector<Scalar> probs = zero_vector<Scalar>();
    if (first < end) {
      probs = vector_probs(load, load.load(in, first, end), store, shift, factor, first, end);
    }
    out.store(first, probs);
  }
}

}  // namespace sms_plugin
