// Backward kernels: dz = p * (g - sum(p * g)), nothing at p == 0. No torch here.

#pragma once

#include "mapping.cuh"
#include "primitives.cuh"
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
  static constexpr int64_t kMaxResident = sizeof(T) == 8 ? 512 : 2048;  // vectors a row, no spills
  struct Held {
    Vector<T> grad;
    Vector<T> probs;
  };

  const T* grad_probs;  // strided [rows, cols]
  const T* probs;       // strided [rows, cols]

  struct Row {
    const T* grad_probs;  // [cols]
    const T* probs;       // [cols]
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

// What happens at the store of the backward: grad_scores, and the dot of each row if a bias needs it.
template <typename T>
struct StoreGradScores {
  using Acc = Accumulator<T>;
  static constexpr int N = kVectorSize<T>;
  T* grad_scores;  // [rows, cols]
  Acc* dots;       // [rows], or null
  Acc scale;

  struct Row {
    T* grad_scores;  // [cols]
    Acc* dot;
    uint32_t shift;  // misalignment of grad_scores
  };

  __device__ __forceinline__ Row row(int64_t row, int64_t cols) const {
    T* start = grad_scores + row * cols;
    return {start, dots == nullptr ? nullptr : dots + row, misalignment(start)};
  }

  __device__ __forceinline__ void store_dot(const Row& row, Acc dot) const {
    if (row.dot != nullptr) *row.dot = dot;
  }

  template <typename Index>
  __device__ __forceinline__ void store(const Row& row, Index first, Index cols,
                                        const Acc (&dz)[N]) const {
    Acc scaled[N];
#pragma unroll
    for (int k = 0; k < N; ++k) scaled[k] = dz[k] * scale;
    store_vector(row.grad_scores, first, cols, row.shift, pack<T>(scaled));
  }

  template <typename Index>
  __device__ __forceinline__ void store_zeros(const Row& row, Index first, Index cols) const {
    store_vector(row.grad_scores, first, cols, row.shift, zero_vector<T>());
  }
};

template <typename Load, typename Acc = typename Load::Acc>
__device__ __forceinline__ Acc vector_dot(const Load& load, const typename Load::Held& held) {
  Acc products[Load::N];
#pragma unroll
  for (int k = 0; k < Load::N; ++k) products[k] = load.product(held, k);
  return tree_sum(products);
}

template <typename Load, typename Store, typename Index, typename Acc = typename Load::Acc>
__device__ __forceinline__ void vector_store_dz(const Load& load, const typename Load::Held& held,
                                                const Store& store, const typename Store::Row& out,
                                                Acc dot, Index first, Index cols) {
  Acc dz[Load::N];
#pragma unroll
  for (int k = 0; k < Load::N; ++k) dz[k] = load.dz(held, k, dot);
  store.store(out, first, cols, dz);
}

// kLanes threads own a row and keep grad and probs in registers, kVectors vectors of each, striped.
// Reads the visible part of both once, writes all of grad_scores once.
// Chosen for rows of up to kLanes * kVectors vectors (mapping.cuh).
// Safe: a row belongs to its threads alone; inactive groups take part in shuffles with an empty row.
template <typename Load, typename Store, int kLanes, int kVectors, int kThreads>
__global__ void __launch_bounds__(kThreads)
    softmax_backward(const Load load, const Store store,
                     const __grid_constant__ DeviceRowLayout layout, const CausalLimit causal) {
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
  const typename Store::Row out = store.row(row, layout.cols);
  const int cols = is_active ? static_cast<int>(layout.cols) : 0;
  const int end = is_active ? static_cast<int>(causal.visible(offsets.query)) : 0;

  typename Load::Held held[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int first = v * kStripe + lane * N;
    held[v] = first < end ? load.load(in, first, end) : load.removed();
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int first = v * kStripe + lane * N;
    if (first >= end && first < cols) store.store_zeros(out, first, cols);
  }

  Acc dots[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    dots[v] = v * kStripe < end ? vector_dot(load, held[v]) : Acc{0};
  }
  const Acc dot = Reduction::sum(tree_sum(dots), shared);
  if (is_active && lane == 0) store.store_dot(out, dot);

#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    Load::between_passes(held[v]);
    const int first = v * kStripe + lane * N;
    if (first < end) vector_store_dz(load, held[v], store, out, dot, first, cols);
  }
}

// A block owns a row that doesn't fit in registers and reads it twice, once from the L2 if it fits.
// Chosen for rows beyond Load::kMaxResident; any length.
// Safe: a row belongs to its block alone.
template <typename Load, typename Store, int kThreads>
__global__ void __launch_bounds__(kThreads)
    softmax_backward_streaming(const Load load, const Store store,
                               const __grid_constant__ DeviceRowLayout layout,
                               const CausalLimit causal) {
  using Acc = typename Load::Acc;
  using Reduction = RowReduction<kThreads, Acc>;
  constexpr int N = Load::N;
  constexpr int64_t kStep = int64_t{kThreads} * N;
  __shared__ typename Reduction::Shared shared;

  const int64_t row = blockIdx.x;
  const RowOffsets offsets = layout.template offsets<2>(row);
  const typename Load::Row in = load.row(offsets);
  const typename Store::Row out = store.row(row, layout.cols);
  const int64_t cols = layout.cols;
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
  if (threadIdx.x == 0) store.store_dot(out, dot);

#pragma unroll 4
  for (int64_t first = start; first < cols; first += kStep) {
    if (first < end) {
      vector_store_dz(load, load.load(in, first, end), store, out, dot, first, cols);
    } else {
      store.store_zeros(out, first, cols);
    }
  }
}

}  // namespace sms_plugin
