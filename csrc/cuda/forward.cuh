// Forward kernels over a load functor (loads.cuh, terms.cuh). No torch here.

#pragma once

#include "exponential.cuh"
#include "loads.cuh"
#include "mapping.cuh"
#include "reductions.cuh"
#include "row_loader.cuh"
#include "row_writer.cuh"
#include "rows.cuh"

namespace sms_plugin {

template <typename Load, typename Acc = typename Load::Acc>
__device__ __forceinline__ Acc vector_sum(const Load& load, const typename Load::Held& held,
                                          const RowExponential<Load>& exponential) {
  Acc weights[Load::N];
#pragma unroll
  for (int k = 0; k < Load::N; ++k) weights[k] = exponential.regular(load.value(held, k));
  return tree_sum(weights);
}

template <typename Load, typename Acc = typename Load::Acc>
__device__ __forceinline__ Acc careful_sum(const Load& load, const typename Load::Held& held,
                                           const RowExponential<Load>& exponential) {
  Acc weights[Load::N];
#pragma unroll
  for (int k = 0; k < Load::N; ++k) weights[k] = exponential.careful(load, load.value(held, k));
  return tree_sum(weights);
}

// The sum of a vector of a regular row. What holds a float32 for each value holds its exponential
// from here on, so that it is taken once.
template <typename Load, typename Acc = typename Load::Acc>
__device__ __forceinline__ Acc take_sum(const Load& load, typename Load::Held& held,
                                        const RowExponential<Load>& exponential) {
  if constexpr (Load::kHoldsWeights) {
    Acc weights[Load::N];
#pragma unroll
    for (int k = 0; k < Load::N; ++k) {
      weights[k] = held.z[k] = exponential.regular(load.value(held, k));
    }
    return tree_sum(weights);
  } else {
    return vector_sum(load, held, exponential);
  }
}

// The largest z of a vector of an odd row, in eighths.
template <typename Load, typename Acc = typename Load::Acc>
__device__ __forceinline__ Acc odd_max(const Load& load, const typename Load::Held& held) {
  Acc maximum = negative_infinity(Acc{});
#pragma unroll
  for (int k = 0; k < Load::N; ++k) maximum = larger(maximum, load.odd_z(load.value(held, k)));
  return maximum;
}

// The probs of a vector of a regular row without NaN, after take_sum: what is removed is 0 because
// its z is -inf.
template <typename Load, typename Acc = typename Load::Acc>
__device__ __forceinline__ void vector_probs(const Load& load, const typename Load::Held& held,
                                             const RowExponential<Load>& exponential, Acc factor,
                                             Acc (&p)[Load::N]) {
#pragma unroll
  for (int k = 0; k < Load::N; ++k) {
    if constexpr (Load::kHoldsWeights) {
      p[k] = held.z[k] * factor;
    } else {
      p[k] = exponential.regular(load.value(held, k)) * factor;
    }
  }
}

// The same of any row: columns from `end` on and those removed by selection are 0 even in a NaN
// row.
template <typename Columns, typename Load, typename Index, typename Acc = typename Load::Acc>
__device__ __forceinline__ void careful_probs(const Load& load,
                                              const typename Load::template Row<Columns>& row,
                                              const typename Load::Held& held,
                                              const RowExponential<Load>& exponential, Acc factor,
                                              Index first, Index end, Acc (&p)[Load::N]) {
  const uint32_t selected = load.template selected<Columns>(row, first, end);
#pragma unroll
  for (int k = 0; k < Load::N; ++k) {
    const Acc weight = exponential.careful(load, load.value(held, k));
    p[k] = first + k * Columns::kStep >= end || !(selected >> k & 1u) ? Acc{0} : weight * factor;
  }
}

// Mapping::kLanes threads own a row and keep it in registers, kVectors vectors each, striped.
// Reads the visible scores (and terms) once, writes all of probs once; exponentials of packed rows
// are computed twice. Chosen for rows of up to kLanes * kVectors vectors (mapping.cuh). Safe: a row
// belongs to its threads alone; inactive groups take part in shuffles with an empty row.
template <typename Load, typename Mapping, Access kAccess>
__global__ void __launch_bounds__(Mapping::kThreads, Mapping::min_blocks())
    softmax_forward(const Load load,
                    typename Load::Scalar* __restrict__ probs,  // [rows, cols]
                    const __grid_constant__ DeviceRowLayout layout, const CausalLimit causal) {
  using Scalar = typename Load::Scalar;
  using Acc = typename Load::Acc;
  constexpr int kLanes = Mapping::kLanes;
  constexpr int kVectors = Mapping::kVectors;
  constexpr int N = Load::N;
  constexpr int kStripe = kLanes * N;
  using Reduction = RowReduction<kLanes, Acc>;
  using Columns = RowColumns<kAccess, kLanes>;
  using Writer = RowWriter<Scalar, Columns>;
  __shared__ typename Reduction::Shared shared[2];
  __shared__ typename Writer::template Staging<Mapping::kThreads> staging;

  int64_t index = Mapping::row();
  const bool is_active = index < layout.rows;
  if (!is_active) index = 0;

  const int start = Columns::template start<N>(Mapping::lane());  // the others count from it
  const RowOffsets offsets = layout.template offsets<Load::kOperands>(index);
  const auto in = load.template row<Columns>(layout, offsets, start);
  const int visible = is_active ? static_cast<int>(causal.visible(offsets.query)) : 0;
  const int end = visible - start;
  const int seen = visible - Columns::template segment<kLanes, N>(Mapping::lane());
  const int cols = (is_active ? static_cast<int>(layout.cols) : 0) - start;
  const Writer out(probs + offsets.row * layout.cols + start, cols, staging);

  typename Load::Held held[kVectors];
  load_row<Columns>(load, in, kStripe, visible, seen, end, held);
  if constexpr (!Columns::kIsSpread) {
    // These zeros depend on nothing: they are on their way while the loads arrive.
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int first = v * kStripe;
      if (first >= end && first < cols) out.store_zeros(first);
    }
  }

  Acc maximum = negative_infinity(Acc{});
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (v * kStripe < seen) maximum = larger(maximum, load.largest(held[v]));
  }
  const RowExponential<Load> exponential(load, Reduction::max(maximum, shared[0]));

  Acc sums[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    Load::between_passes(held[v]);
    // Rows that share a warp differ in what is seen: lanes of a segment store together.
    constexpr bool kIsAlways = Load::kHoldsWeights && Columns::kIsSpread && kLanes < kWarpSize;
    sums[v] = Acc{0};
    if (kIsAlways || v * kStripe < seen) sums[v] = take_sum(load, held[v], exponential);
  }
  Acc factor = row_factor(Reduction::sum(tree_sum(sums), shared[0]));

  // All lanes of a warp store together; those of a short row store zeros.
  const int stored = Columns::kIsSpread ? static_cast<int>(layout.cols) : end;
  if (any_row<kLanes>(!exponential.is_regular || factor != factor)) {
    // Rare: read the row again, so that nothing is kept for this above.
    const int64_t row = Mapping::row_again();
    const auto again_in = load.template row<Columns>(
        layout, layout.template offsets<Load::kOperands>(row < layout.rows ? row : 0), start);
    const Acc unit = exponential.unit();
    maximum = negative_infinity(Acc{});
#pragma unroll 1
    for (int first = 0; first < end; first += kStripe) {
      const auto again = load_vector<Columns>(load, again_in, first, end, unit);
      maximum = larger(maximum, odd_max(load, again));
    }
    RowExponential<Load> odd = exponential;
    odd.shift = row_shift(Reduction::max(maximum, shared[1]));
#pragma unroll 1
    for (int v = 0; v < kVectors; ++v) {
      const int first = v * kStripe;
      Acc sum = 0;
      if (first < end) {
        sum = careful_sum(load, load_vector<Columns>(load, again_in, first, end, unit), odd);
      }
#pragma unroll
      for (int i = 0; i < kVectors; ++i) sums[i] = i == v ? sum : sums[i];
    }
    const Acc careful = row_factor(Reduction::sum(tree_sum(sums), shared[1]));
    if (!exponential.is_regular) factor = careful;
#pragma unroll 1
    for (int first = 0; first < stored; first += kStripe) {
      Acc p[N] = {};
      if (first < end) {
        const auto again = load_vector<Columns>(load, again_in, first, end, unit);
        careful_probs<Columns>(load, again_in, again, odd, factor, first, end, p);
      }
      out.store(first, p);
    }
    return;
  }

#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    Load::between_passes(held[v]);
    const int first = v * kStripe;
    if (first >= stored) continue;
    if (Columns::kIsSpread && !any_row<kLanes>(first < seen)) {
      out.store_zeros(first);
    } else {
      Acc p[N];
      vector_probs(load, held[v], exponential, factor, p);
      out.store(first, p);
    }
  }
}

// A block owns a row that doesn't fit in registers and reads it three times,
// twice from the L2 if it fits. Chosen for rows that no other kernel takes; any length. Safe: a row
// belongs to its block alone.
template <typename Load, typename Mapping, Access kAccess>
__global__ void __launch_bounds__(Mapping::kThreads, 1)
    softmax_forward_streaming(const Load load,
                              typename Load::Scalar* __restrict__ probs,  // [rows, cols]
                              const __grid_constant__ DeviceRowLayout layout,
                              const CausalLimit causal) {
  using Scalar = typename Load::Scalar;
  using Acc = typename Load::Acc;
  constexpr int kLanes = Mapping::kLanes;
  using Reduction = RowReduction<kLanes, Acc>;
  using Columns = RowColumns<kAccess, kLanes>;
  using Writer = RowWriter<Scalar, Columns, int64_t>;
  constexpr int N = Load::N;
  constexpr int64_t kStep = int64_t{kLanes} * N;
  constexpr int kAhead = Load::kHoldsWeights ? 1 : 2;  // steps of a loop at a time
  __shared__ typename Reduction::Shared shared[2];
  __shared__ typename Writer::template Staging<Mapping::kThreads> staging;

  const int64_t start = Columns::template start<N>(int64_t{Mapping::lane()});
  const RowOffsets offsets = layout.template offsets<Load::kOperands>(Mapping::row());
  const auto in = load.template row<Columns>(layout, offsets, start);
  const int64_t cols = layout.cols - start;
  const int64_t end = causal.visible(offsets.query) - start;
  const Writer out(probs + offsets.row * layout.cols + start, cols, staging);

  Acc maximum = negative_infinity(Acc{});
#pragma unroll kAhead
  for (int64_t first = 0; first < end; first += kStep) {
    maximum = larger(maximum, load.largest(load_vector<Columns>(load, in, first, end)));
  }
  RowExponential<Load> exponential(load, Reduction::max(maximum, shared[0]));
  const Acc unit = exponential.unit();
  if (!exponential.is_regular) {
    maximum = negative_infinity(Acc{});
#pragma unroll 1
    for (int64_t first = 0; first < end; first += kStep) {
      const auto again = load_vector<Columns>(load, in, first, end, unit);
      maximum = larger(maximum, odd_max(load, again));
    }
    exponential.shift = row_shift(Reduction::max(maximum, shared[1]));
  }

  constexpr int kSums = kStreamingSums<Acc>;
  Acc sums[kSums] = {};
  for (int64_t base = 0; base < end; base += kSums * kStep) {
#pragma unroll
    for (int u = 0; u < kSums; ++u) {
      const int64_t first = base + u * kStep;
      if (first < end) {
        const auto held = load_vector<Columns>(load, in, first, end, unit);
        sums[u] += careful_sum(load, held, exponential);
      }
    }
  }
  const Acc factor = row_factor(Reduction::sum(tree_sum(sums), shared[0]));

  // All lanes of a warp store together.
  const int64_t stored = Columns::kIsSpread ? cols + threadIdx.x % kWarpSize : cols;
#pragma unroll kAhead
  for (int64_t first = 0; first < stored; first += kStep) {
    Acc p[N] = {};
    if (first < end) {
      const auto held = load_vector<Columns>(load, in, first, end, unit);
      careful_probs<Columns>(load, in, held, exponential, factor, first, end, p);
    }
    out.store(first, p);
  }
}

}  // namespace sms_plugin
