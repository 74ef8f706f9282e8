// The backward and the gradient of a bias in one pass over grad_probs and probs. No torch here.

#pragma once

#include "backward.cuh"
#include "bias_grad.cuh"

namespace sms_plugin {

// A row on its way: what was loaded of it, and where its results go.
template <typename Load, int kVectors, typename Columns>
struct PendingRow {
  typename Load::template Row<Columns> in;
  typename Load::template Raw<Columns> raw[kVectors];
  int64_t row;
  int end;  // columns that are visible
};

// Mapping::kLanes threads own a bias row. They walk the rows of its chunk in order (the batch,
// mostly), write grad_scores of each, and sum dz in registers, kVectors vectors each, striped; the
// loads of a row are on their way while the one before it is worked on. Reads grad and probs once;
// writes grad_scores once and one sum a chunk: a partial one in the accumulator, or the gradient
// itself if there is one chunk and its dtype is that of the scores. Chosen when the bias has a
// value for each column and a row fits in registers (mapping.cuh). Safe: a bias row belongs to its
// threads alone; the buffers of the reduction alternate, so that the barrier of the next row
// separates reading one from writing it again.
template <typename Load, typename Mapping, Access kAccess>
__global__ void __launch_bounds__(Mapping::kThreads, Mapping::min_blocks())
    softmax_backward_biased(const Load load, const GradOut<typename Load::Scalar> grad_out,
                            const __grid_constant__ DeviceRowLayout kept,
                            const __grid_constant__ DeviceRowLayout reduced,
                            const CausalLimit causal, const BiasGradOut<typename Load::Acc> out,
                            typename Load::Scalar* grad_bias) {  // [bias rows, cols], or null
  using Scalar = typename Load::Scalar;
  using Acc = typename Load::Acc;
  constexpr int kLanes = Mapping::kLanes;
  constexpr int kVectors = Mapping::kVectors;
  constexpr int N = Load::N;
  constexpr int kStripe = kLanes * N;
  using Reduction = RowReduction<kLanes, Acc>;
  using Columns = RowColumns<kAccess, kLanes>;
  using Writer = RowWriter<Scalar, Columns>;
  using Pending = PendingRow<Load, kVectors, Columns>;
  __shared__ typename Reduction::Shared shared[2][2];
  __shared__ typename Writer::template Staging<Mapping::kThreads> staging;

  const int lane = Mapping::lane();
  int64_t bias_row = Mapping::row();
  const bool is_active = bias_row < kept.rows;
  if (!is_active) bias_row = 0;
  const RowOffsets kept_offsets = kept.template offsets<3>(bias_row);
  const int start = Columns::template start<N>(lane);  // the others count from it
  const int segment = Columns::template segment<kLanes, N>(lane);
  const int cols = (is_active ? static_cast<int>(kept.cols) : 0) - start;
  const int64_t begin = blockIdx.y * out.rows_per_chunk;
  const int64_t chunk_end = min(begin + out.rows_per_chunk, reduced.rows);

  const auto locate = [&](int64_t r, Pending& pending) {
    RowOffsets offsets = reduced.template offsets<3>(r);
#pragma unroll
    for (int k = 0; k < 3; ++k) offsets.operand[k] += kept_offsets.operand[k];
    pending.row = offsets.operand[2];
    pending.in = load.template row<Columns>(kept.cols, offsets, start);
    const int64_t visible =
        causal.is_causal ? causal.visible(pending.row % causal.queries) : kept.cols;
    pending.end = (is_active ? static_cast<int>(visible) : 0) - start;
  };
  const auto send = [&](int64_t r, Pending& pending) {
    locate(r, pending);
    if (!pending.in.is_inner()) return;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int first = v * kStripe;
      pending.raw[v] = load.template nothing<Columns>();
      if (Columns::kIsSpread || first < pending.end) {
        load.template fetch<Columns>(pending.in, first, pending.end, pending.raw[v]);
      }
    }
  };

  // All lanes of a warp store together.
  const int stored = Columns::kIsSpread ? static_cast<int>(kept.cols) : cols;
  Acc sums[kVectors][N] = {};
  // Values that are loaded alone take a register each on their way: more threads hide more than
  // loads ahead do.
  constexpr bool kIsAhead = !Columns::kIsSpread || kVectors * N <= 8;
  Pending pending;
  if (kIsAhead && begin < chunk_end) send(begin, pending);
  for (int64_t r = begin; r < chunk_end; ++r) {
    typename Load::Held held[kVectors];
    if constexpr (kIsAhead) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int first = v * kStripe;
        if constexpr (Columns::kIsShifted) {
          if (!pending.in.is_inner()) {
            pending.raw[v] = first < pending.end ? load.gather(pending.in, first, pending.end)
                                                 : load.template nothing<Columns>();
          }
        }
        held[v] = load.template finish<Columns>(pending.in, pending.raw[v], first, pending.end);
        const int left = pending.end - first;
        if (!Columns::kIsSpread && left > 0 && left < N) load.cut(held[v], left);
      }
    } else {
      locate(r, pending);
      const int visible = pending.end + start;
      load_row<Columns>(load, pending.in, kStripe, visible, visible - segment, pending.end, held);
    }
    const int64_t row = pending.row;
    if (kIsAhead && r + 1 < chunk_end) send(r + 1, pending);

    Acc dots[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) dots[v] = vector_dot<false>(load, held[v]);
    Acc dot = Reduction::sum(tree_sum(dots), shared[r % 2][0]);
    const bool is_careful = needs_care(dot);
    if (any_row<kLanes>(is_careful)) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        Load::between_passes(held[v]);
        dots[v] = vector_dot<true>(load, held[v]);
      }
      const Acc careful = Reduction::sum(tree_sum(dots), shared[r % 2][1]);
      if (is_careful) dot = careful;
    }
    if (is_active && lane == 0 && grad_out.dots != nullptr) grad_out.dots[row] = dot;

    const Writer writer(grad_out.grad_scores + row * kept.cols + start, cols, staging);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Load::between_passes(held[v]);
      const int first = v * kStripe;
      Acc dz[N];
      vector_dz<false>(load, held[v], dot, dz);
      if (is_careful) vector_dz<true>(load, held[v], dot, dz);
#pragma unroll
      for (int k = 0; k < N; ++k) sums[v][k] += dz[k];
      if (first < stored) {
        store_dz(writer, grad_out, first, dz);
      }
    }
  }

  if (grad_bias != nullptr) {
    const Writer writer(grad_bias + bias_row * kept.cols + start, cols, staging);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int first = v * kStripe;
      if (first < stored) {
        writer.store(first, sums[v]);
      }
    }
    return;
  }
  Acc* partial = out.partial + (blockIdx.y * kept.rows + bias_row) * kept.cols + start;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int first = v * kStripe;
    if (first < cols) store_sums<Columns>(partial, first, cols, sums[v]);
  }
}

}  // namespace sms_plugin
