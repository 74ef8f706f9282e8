// The gradient of a mask or bias: dz summed to its shape in a fixed order, without atomics. No
// torch here.
//
// Letters: a bias row is one row of the bias (all its dimensions but the last); each sums `reduced`
// rows of the scores. The reduced rows are cut into chunks by shape alone, so the order never
// depends on the card.

#pragma once

#include "backward.cuh"
#include "primitives.cuh"
#include "rows.cuh"

namespace sms_plugin {

constexpr int kBiasThreads = 128;

template <typename Acc>
struct BiasGradOut {
  Acc* partial;            // [chunks, bias rows, bias cols]
  int64_t rows_per_chunk;  // reduced rows that one chunk sums
};

// Stores the N sums of a vector, four at a time where the row allows it.
template <typename Columns, int N, typename Acc>
__device__ __forceinline__ void store_sums(Acc* __restrict__ row,  // [cols]
                                           int64_t first, int64_t cols, const Acc (&sums)[N]) {
  constexpr int kPerStore = kVectorSize<Acc>;
  if constexpr (!Columns::kIsSpread && N % kPerStore == 0) {
    if (misalignment(row) == 0 && first + N <= cols) {
#pragma unroll
      for (int c = 0; c < N / kPerStore; ++c) {
        Acc part[kPerStore];
#pragma unroll
        for (int k = 0; k < kPerStore; ++k) part[k] = sums[c * kPerStore + k];
        *reinterpret_cast<Vector<Acc>*>(row + first + c * kPerStore) = pack<Acc>(part);
      }
      return;
    }
  }
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const int64_t column = first + k * Columns::kStep;
    if (column < cols) row[column] = sums[k];
  }
}

// One vector of dz, given the row's dot; columns removed by causality are 0 and aren't read.
template <typename Load, typename Acc>
__device__ __forceinline__ void add_dz(const Load& load, const Acc* dots,  // [rows]
                                       const DeviceRowLayout& reduced, const CausalLimit& causal,
                                       const RowOffsets& kept, int64_t reduced_row, int64_t first,
                                       int64_t cols, Acc (&sums)[Load::N]) {
  RowOffsets offsets = reduced.template offsets<3>(reduced_row);
#pragma unroll
  for (int k = 0; k < 3; ++k) offsets.operand[k] += kept.operand[k];
  const int64_t row = offsets.operand[2];
  const int64_t end = causal.is_causal ? causal.visible(row % causal.queries) : cols;
  if (first >= end) return;
  const auto in = load.template row<ShiftedColumns>(cols, offsets, 0);
  Acc dz[Load::N];  // with care: a dot that was taken with it doesn't show that it was
  vector_dz<true>(load, load_vector<ShiftedColumns>(load, in, first, end), dots[row], dz);
#pragma unroll
  for (int k = 0; k < Load::N; ++k) sums[k] += dz[k];
}

// A thread owns a vector of columns of a bias row and walks its chunk of the reduced rows in order.
// Reads grad and probs once, writes one partial a chunk. Chosen when the bias has a value for each
// column. Safe: each partial is written by one thread.
template <typename Load, typename Acc = typename Load::Acc>
__global__ void __launch_bounds__(kBiasThreads, 6)
    bias_grad_by_column(const Load load, const Acc* __restrict__ dots,  // [rows]
                        const __grid_constant__ DeviceRowLayout kept,
                        const __grid_constant__ DeviceRowLayout reduced, const CausalLimit causal,
                        const BiasGradOut<Acc> out, int64_t vectors) {
  constexpr int N = Load::N;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kBiasThreads + threadIdx.x;
  const int64_t chunk = blockIdx.y;
  if (index >= kept.rows * vectors) return;
  const int64_t bias_row = index / vectors;
  const int64_t first = (index - bias_row * vectors) * N;
  const RowOffsets offsets = kept.template offsets<3>(bias_row);

  Acc sums[N] = {};
  const int64_t begin = chunk * out.rows_per_chunk;
  const int64_t end = min(begin + out.rows_per_chunk, reduced.rows);
#pragma unroll 2
  for (int64_t r = begin; r < end; ++r) {
    add_dz(load, dots, reduced, causal, offsets, r, first, kept.cols, sums);
  }
  store_sums<ShiftedColumns>(out.partial + (chunk * kept.rows + bias_row) * kept.cols, first,
                             kept.cols, sums);
}

// A block owns a bias row of one column and sums every column of its chunk of the reduced rows.
// Reads grad and probs once, writes one partial a chunk. Chosen when the bias broadcasts over the
// columns. Safe: each partial is written by one block.
template <typename Load, typename Acc = typename Load::Acc>
__global__ void __launch_bounds__(kBiasThreads, 6)
    bias_grad_by_row(const Load load, const Acc* __restrict__ dots,  // [rows]
                     const __grid_constant__ DeviceRowLayout kept,
                     const __grid_constant__ DeviceRowLayout reduced, const CausalLimit causal,
                     const BiasGradOut<Acc> out, int64_t vectors) {
  constexpr int N = Load::N;
  using Reduction = RowReduction<kBiasThreads, Acc>;
  __shared__ typename Reduction::Shared shared;
  const int64_t bias_row = blockIdx.x;
  const int64_t chunk = blockIdx.y;
  const RowOffsets offsets = kept.template offsets<3>(bias_row);

  Acc sums[N] = {};
  const int64_t begin = chunk * out.rows_per_chunk;
  const int64_t end = min(begin + out.rows_per_chunk, reduced.rows);
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t v = threadIdx.x; v < vectors; v += kBiasThreads) {
      add_dz(load, dots, reduced, causal, offsets, r, v * N, kept.cols, sums);
    }
  }
  const Acc total = Reduction::sum(tree_sum(sums), shared);
  if (threadIdx.x == 0) out.partial[chunk * kept.rows + bias_row] = total;
}

// A thread owns one value of the bias: sums its chunks in order and rounds once to the bias's
// dtype.
template <typename Out, typename Acc>
__global__ void __launch_bounds__(kBiasThreads, 6)
    bias_grad_combine(const Acc* __restrict__ partial,  // [chunks, values]
                      Out* __restrict__ grad,           // [values]
                      int64_t chunks, int64_t values) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kBiasThreads + threadIdx.x;
  if (index >= values) return;
  Acc sum = 0;
  for (int64_t c = 0; c < chunks; ++c) sum += partial[c * values + index];
  grad[index] = from_accumulator<Out>(sum);
}

}  // namespace sms_plugin
