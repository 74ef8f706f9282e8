// The backward and the gradient of a bias in one pass over grad_probs and probs. No torch here.

#pragma once

#include "backward.cuh"
#include "bias_grad.cuh"

namespace sms_plugin {

// kLanes threads own a bias row. They walk the rows of its chunk in order (the batch, mostly),
// write grad_scores of each, and sum dz in registers, kVectors vectors each, striped. Reads grad
// and probs once; writes grad_scores once and one sum a chunk: a partial one in the accumulator, or
// the gradient itself if there is one chunk and its dtype is that of the scores. Chosen when the
// bias has a value for each column and a row fits in registers (mapping.cuh). Safe: a bias row
// belongs to its threads alone; the two buffers of the reduction alternate, so that the barrier of
// the next row separates reading one from writing it again.
template <typename Load, typename Store, int kLanes, int kVectors, int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads > 640 ? 1 : 640 / kThreads)
    softmax_backward_biased(const Load load, const Store store,
                            const __grid_constant__ DeviceRowLayout kept,
                            const __grid_constant__ DeviceRowLayout reduced,
                            const CausalLimit causal, const BiasGradOut<typename Load::Acc> out,
                            typename Load::Scalar* grad_bias) {  // [bias rows, cols], or null
  using Scalar = typename Load::Scalar;
  using Acc = typename Load::Acc;
  using Reduction = RowReduction<kLanes, Acc>;
  constexpr int N = Load::N;
  constexpr int kStripe = kLanes * N;
  __shared__ typename Reduction::Shared shared[2];

  const int lane = threadIdx.x % kLanes;
  int64_t bias_row = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  const bool is_active = bias_row < kept.rows;
  if (!is_active) bias_row = 0;
  const RowOffsets kept_offsets = kept.template offsets<3>(bias_row);
  const int cols = is_active ? static_cast<int>(kept.cols) : 0;
  const int64_t begin = blockIdx.y * out.rows_per_chunk;
  const int64_t chunk_end = min(begin + out.rows_per_chunk, reduced.rows);

  Acc sums[kVectors][N] = {};
  for (int64_t r = begin; r < chunk_end; ++r) {
    RowOffsets offsets = reduced.template offsets<3>(r);
#pragma unroll
    for (int k = 0; k < 3; ++k) offsets.operand[k] += kept_offsets.operand[k];
    const int64_t row = offsets.operand[2];
    const typename Load::Row in = load.row(offsets);
    const RowWriter<Scalar, kLanes> writer(store.row(row, kept.cols), cols);
    const int64_t visible = causal.is_causal ? causal.visible(row % causal.queries) : kept.cols;
    const int end = is_active ? static_cast<int>(visible) : 0;

    typename Load::Held held[kVectors];
    Acc dots[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int first = v * kStripe + lane * N;
      held[v] = first < end ? load.load(in, first, end) : load.removed();
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) dots[v] = vector_dot(load, held[v]);
    const Acc dot = Reduction::sum(tree_sum(dots), shared[r % 2]);
    if (is_active && lane == 0) store.store_dot(row, dot);

#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Load::between_passes(held[v]);
      const int first = v * kStripe + lane * N;
      Acc dz[N];
#pragma unroll
      for (int k = 0; k < N; ++k) {
        dz[k] = load.dz(held[v], k, dot);
        sums[v][k] += dz[k];
      }
      if (first < cols || writer.needs_all_lanes()) writer.store(first, store.finish(dz));
    }
  }

  if (grad_bias != nullptr) {
    const RowWriter<Scalar, kLanes> writer(grad_bias + bias_row * kept.cols, cols);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int first = v * kStripe + lane * N;
      if (first < cols || writer.needs_all_lanes()) writer.store(first, pack<Scalar>(sums[v]));
    }
    return;
  }
  Acc* partial = out.partial + (blockIdx.y * kept.rows + bias_row) * kept.cols;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int first = v * kStripe + lane * N;
    if (first < cols) store_sums(partial, first, cols, sums[v]);
  }
}

}  // namespace sms_plugin
