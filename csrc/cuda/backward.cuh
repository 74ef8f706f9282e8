// Backward kernels: dz = p * (g - sum(p * g)), nothing at p == 0. No torch here.

#pragma once

#include "mapping.cuh"
#include "primitives.cuh"
#include "row_writer.cuh"
#include "rows.cuh"

namespace sms_plugin {

// What happens at load of the backward: a vector of gradients and one of probs, kept packed.
template <typename T>
struct GradAndProbs {
  using Scalar = T;
  using Acc = Accumulator<T>;
  static constexpr int N = kVectorSize<T>;
  static constexpr Table kTable = sizeof(T) == 8 ? Table::kCoarse : Table::kFine;
  static constexpr int kMaxVectors = 4;
  static constexpr int kResidentThreads = 1024;
  static constexpr int64_t kMaxResident = sizeof(T) == 8 ? 512 : 2048;  // vectors a row, no spills
  struct Held {
    Vector<T> grad;
    Vector<T> probs;
  };

  const T* grad_probs;  // strided [rows, cols]
  const T* probs;       // strided [rows, cols]

  struct Row {
    const T* grad_probs;   // [cols]
    const T* probs;        // [cols]
    uint32_t grad_shift;   // misalignment of grad_probs
    uint32_t probs_shift;  // misalignment of probs
  };

  __device__ __forceinline__ Row row(const RowOffsets& offsets) const {
    const T* grad = grad_probs + offsets.operand[0];
    const T* p = probs + offsets.operand[1];
    return {grad, p, misalignment(grad), misalignment(p)};
  }

  template <typename Index>
  __device__ __forceinline__ Held load(const Row& row, Index first, Index end) const {
    const T zero = from_accumulator<T>(Acc{0});
    return {load_vector(row.grad_probs, first, end, row.grad_shift, zero),
            load_vector(row.probs, first, end, row.probs_shift, zero)};
  }

  __device__ __forceinline__ Held removed() const { return {zero_vector<T>(), zero_vector<T>()}; }

  static __device__ __forceinline__ void between_passes(Held& held) {
    keep_packed(held.grad);
    keep_packed(held.probs);
  }

  // Where probs is 0 the incoming gradient may be infinite: it must not be touched.
  __device__ __forceinline__ Acc product(const Held& held, int k) const {
    const Acc p = to_accumulator<Acc>(element(held.probs, k));
    return p == Acc{0} ? Acc{0} : p * to_accumulator<Acc>(element(held.grad, k));
  }

  __device__ __forceinline__ Acc dz(const Held& held, int k, Acc dot) const {
    const Acc p = to_accumulator<Acc>(element(held.probs, k));
    return p == Acc{0} ? Acc{0} : p * (to_accumulator<Acc>(element(held.grad, k)) - dot);
  }
};

// What happens at the store of the backward.
template <typename T>
struct StoreGradScores {
  using Acc = Accumulator<T>;
  static constexpr int N = kVectorSize<T>;
  T* grad_scores;  // [rows, cols], contiguous
  Acc* dots;       // [rows], or null if no bias needs them
  Acc scale;

  __device__ __forceinline__ T* row(int64_t row, int64_t cols) const {
    return grad_scores + row * cols;
  }

  __device__ __forceinline__ void store_dot(int64_t row, Acc dot) const {
    if (dots != nullptr) dots[row] = dot;
  }

  // The values to store for columns [first, first + N).
  __device__ __forceinline__ Vector<T> finish(const Acc (&dz)[N]) const {
    Acc scaled[N];
#pragma unroll
    for (int k = 0; k < N; ++k) scaled[k] = dz[k] * scale;
    return pack<T>(scaled);
  }
};

// dz itself, unscaled.
template <typename T>
struct StoreDz {
  __device__ __forceinline__ Vector<T> finish(const Accumulator<T> (&dz)[kVectorSize<T>]) const {
    return pack<T>(dz);
  }
};

template <typename Load, typename Acc = typename Load::Acc>
__device__ __forceinline__ Acc vector_dot(const Load& load, const typename Load::Held& held) {
  Acc products[Load::N];
#pragma unroll
  for (int k = 0; k < Load::N; ++k) products[k] = load.product(held, k);
  return tree_sum(products);
}

template <typename Load, typename Store, typename Acc = typename Load::Acc>
__device__ __forceinline__ auto vector_dz(const Load& load, const typename Load::Held& held,
                                          const Store& store, Acc dot) {
  Acc dz[Load::N];
#pragma unroll
  for (int k = 0; k < Load::N; ++k) dz[k] = load.dz(held, k, dot);
  return store.finish(dz);
}

// kLanes threads own a row and keep grad and probs in registers, kVectors vectors of each, striped.
// Reads the visible part of both once, writes all of grad_scores once.
// Chosen for rows of up to kLanes * kVectors vectors (mapping.cuh).
// Safe: a row belongs to its threads alone; inactive groups take part in shuffles with an empty
// row.
template <typename Load, typename Store, int kLanes, int kVectors, int kThreads>
__global__ void __launch_bounds__(kThreads, min_blocks<Load>(kThreads))
    softmax_backward(const Load load, const Store store,
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

  const RowOffsets offsets = layout.template offsets<2>(row);
  const typename Load::Row in = load.row(offsets);
  const int cols = is_active ? static_cast<int>(layout.cols) : 0;
  const RowWriter<Scalar, kLanes> out(store.row(row, layout.cols), cols);
  const int end = is_active ? static_cast<int>(causal.visible(offsets.query)) : 0;

  typename Load::Held held[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int first = v * kStripe + lane * N;
    held[v] = first < end ? load.load(in, first, end) : load.removed();
  }
  if (!out.needs_all_lanes()) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int first = v * kStripe + lane * N;
      if (first >= end && first < cols) out.store(first, zero_vector<Scalar>());
    }
  }

  Acc dots[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    dots[v] = v * kStripe < end ? vector_dot(load, held[v]) : Acc{0};
  }
  const Acc dot = Reduction::sum(tree_sum(dots), shared);
  if (is_active && lane == 0) store.store_dot(row, dot);

#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    Load::between_passes(held[v]);
    const int first = v * kStripe + lane * N;
    Vector<Scalar> grad = zero_vector<Scalar>();
    if (first < end) grad = vector_dz(load, held[v], store, dot);
    if (first < end || (out.needs_all_lanes() && v * kStripe < layout.cols)) out.store(first, grad);
  }
}

// A block owns a row that doesn't fit in registers and reads it twice, once from the L2 if it fits.
// With kHasDz it writes dz beside grad_scores: the gradient of a bias as large as the scores.
// Chosen for rows beyond Load::kMaxResident; any length.
// Safe: a row belongs to its block alone.
template <typename Load, typename Store, int kThreads, bool kHasDz>
__global__ void __launch_bounds__(kThreads, 1)
    softmax_backward_streaming(const Load load, const Store store,
                               const __grid_constant__ DeviceRowLayout layout,
                               const CausalLimit causal,
                               typename Load::Scalar* dz) {  // [rows, cols] if kHasDz
  using Scalar = typename Load::Scalar;
  using Acc = typename Load::Acc;
  using Reduction = RowReduction<kThreads, Acc>;
  constexpr int N = Load::N;
  constexpr int64_t kStep = int64_t{kThreads} * N;
  __shared__ typename Reduction::Shared shared;

  const int64_t row = blockIdx.x;
  const RowOffsets offsets = layout.template offsets<2>(row);
  const typename Load::Row in = load.row(offsets);
  const int64_t cols = layout.cols;
  const RowWriter<Scalar, kThreads> out(store.row(row, cols), cols);
  const RowWriter<Scalar, kThreads> dz_out(kHasDz ? dz + row * cols : store.row(row, cols), cols);
  const int64_t end = causal.visible(offsets.query);
  const int64_t start = int64_t{threadIdx.x} * N;

  constexpr int kSums = kStreamingSums<Acc>;
  Acc sums[kSums] = {};
  for (int64_t base = start; base < end; base += kSums * kStep) {
#pragma unroll
    for (int u = 0; u < kSums; ++u) {
      const int64_t first = base + u * kStep;
      if (first < end) sums[u] += vector_dot(load, load.load(in, first, end));
    }
  }
  const Acc dot = Reduction::sum(tree_sum(sums), shared);
  if (threadIdx.x == 0) store.store_dot(row, dot);

  // Whole warps: all lanes of one are needed to store a row behind a boundary.
  const int64_t lane_first = int64_t{threadIdx.x % kWarpSize} * N;
#pragma unroll 4
  for (int64_t base = start - lane_first; base < cols; base += kStep) {
    const int64_t first = base + lane_first;
    Vector<Scalar> grad = zero_vector<Scalar>();
    Vector<Scalar> unscaled = zero_vector<Scalar>();
    if (first < end) {
      const typename Load::Held held = load.load(in, first, end);
      grad = vector_dz(load, held, store, dot);
      if constexpr (kHasDz) unscaled = vector_dz(load, held, StoreDz<Scalar>{}, dot);
    }
    out.store(first, grad);
    if constexpr (kHasDz) dz_out.store(first, unscaled);
  }
}

}  // namespace sms_plugin
