// Rows too long for one block: each is cut into parts, and a block owns a part. No torch here.
//
// A part is what one of `count` blocks holds if their threads take the vectors of the row in turn:
// the same for every row of a length. Its statistics are a maximum and a sum (or, backward, a sum);
// those of the row follow from them in a fixed order. The statistics go from block to block through
// a cluster, so that a part is read once; or through memory, with one kernel to take them and one
// to finish the rows, which reads the parts again. Both give the same bits.

#pragma once

#include "backward.cuh"
#include "cluster.cuh"
#include "forward.cuh"

namespace sms_plugin {

constexpr int kPartThreads = 512;
constexpr int64_t kMaxPartedCols = int64_t{1} << 30;  // columns are 32-bit numbers in a part

enum class Stage {
  kCluster,  // all in one kernel
  kTake,     // takes the statistics
  kFinish,   // writes the rows
};

// Blocks that a multiprocessor has to hold, if the kernel is one that needs few registers.
constexpr int part_blocks(bool is_small) { return is_small && kHasMeasuredRegisters ? 2 : 1; }

// How rows are cut.
struct Parts {
  float2* statistics;  // [rows, count]; null within a cluster
  int count;           // of a row
};

// What a block works on.
template <int N, typename Columns>
struct PartPlace {
  int64_t row;
  int part;
  int start;   // the first column of the thread: the others count from it
  int stripe;  // columns between its vectors

  __device__ __forceinline__ explicit PartPlace(const Parts& parts)
      : row(blockIdx.x / parts.count),
        part(static_cast<int>(blockIdx.x % parts.count)),
        start(Columns::template start<N>(thread())),
        stripe(parts.count * kPartThreads * N) {}

 private:
  // Counted through all parts.
  __device__ __forceinline__ int thread() const {
    return part * kPartThreads + static_cast<int>(threadIdx.x);
  }
};

// Reduces what `statistic(part)` gives for each part of a row, in an order that only their number
// decides: the tree over parts, of which thread t has t, t + kPartThreads, ... Every warp does it
// alone where there is a part a lane at most, without a barrier; the tree is the same.
template <typename Statistic>
__device__ __forceinline__ float sum_over_parts(
    int count, typename RowReduction<kPartThreads, float>::Shared& shared,
    const Statistic& statistic) {
  if (count <= kWarpSize) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    return warp_sum<kWarpSize>(lane < count ? statistic(lane) : 0.0f);
  }
  float sum = 0;
#pragma unroll 1
  for (int p = static_cast<int>(threadIdx.x); p < count; p += kPartThreads) sum += statistic(p);
  return RowReduction<kPartThreads, float>::sum(sum, shared);
}
template <typename Statistic>
__device__ __forceinline__ float max_over_parts(
    int count, typename RowReduction<kPartThreads, float>::Shared& shared,
    const Statistic& statistic) {
  float maximum = negative_infinity(0.0f);
  if (count <= kWarpSize) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    return warp_max<kWarpSize>(lane < count ? statistic(lane) : maximum);
  }
#pragma unroll 1
  for (int p = static_cast<int>(threadIdx.x); p < count; p += kPartThreads) {
    maximum = larger(maximum, statistic(p));
  }
  return RowReduction<kPartThreads, float>::max(maximum, shared);
}

// A block owns a part of up to kPartThreads * kVectors vectors in registers. Reads the
// visible scores (and the mask) once, writes all of probs once; in two stages it reads them twice,
// the second time from the L2 if they fit. Functors that don't keep scores packed hold nothing:
// they read once more, for the maximum. Safe: a part belongs to its block alone, and statistics are
// complete before anybody uses them.
template <typename Load, int kVectors, Access kAccess, Stage kStage>
__global__ void __launch_bounds__(kPartThreads, part_blocks(kAccess == Access::kWhole &&
                                                            Load::kTable == Table::kPacked))
    softmax_forward_parts(const Load load,
                          typename Load::Scalar* __restrict__ probs,  // [rows, cols]
                          const __grid_constant__ DeviceRowLayout layout, const CausalLimit causal,
                          const Parts parts) {
  using Scalar = typename Load::Scalar;
  using Reduction = RowReduction<kPartThreads, float>;
  using Columns = RowColumns<kAccess, kPartThreads>;
  using Writer = RowWriter<Scalar, Columns>;
  constexpr int N = Load::N;
  __shared__ typename Reduction::Shared shared[2];
  __shared__ typename Writer::template Staging<kPartThreads> staging;
  __shared__ ClusterExchange cluster;

  if constexpr (kStage == Stage::kCluster) cluster.begin(parts.count);
  if constexpr (kStage == Stage::kTake) let_next_kernel_start();
  const PartPlace<N, Columns> place(parts);
  const RowOffsets offsets = layout.template offsets<Load::kOperands>(place.row);
  const auto in = load.template row<Columns>(layout, offsets, place.start);
  const int visible = static_cast<int>(causal.visible(offsets.query));
  const int end = visible - place.start;
  const int cols = static_cast<int>(layout.cols) - place.start;
  const int stripe = place.stripe;

  constexpr bool kIsHeld = kIsPacked<Load::kTable>;
  typename Load::Held held[kIsHeld ? kVectors : 1];
  if constexpr (kIsHeld) load_row<Columns>(load, in, stripe, visible, visible, end, held);

  float2 own{};
  if constexpr (kStage != Stage::kFinish) {
    float maximum = negative_infinity(0.0f);
    if constexpr (kIsHeld) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) maximum = larger(maximum, load.largest(held[v]));
    } else {
#pragma unroll 2
      for (int first = 0; first < end; first += stripe) {
        maximum = larger(maximum, load.largest(load_vector<Columns>(load, in, first, end)));
      }
    }
    own.x = Reduction::max(maximum, shared[0]);
    RowExponential<Load> exponential(load, own.x);
    exponential.shift = row_shift(load.odd_z(own.x));
    float sums[kVectors] = {};
    if constexpr (kIsHeld) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        Load::between_passes(held[v]);
        sums[v] = vector_sum(load, held[v], exponential);
      }
    }
    if (!kIsHeld || !exponential.is_regular) {
      // Rare: read the part again, so that nothing is kept for this above.
#pragma unroll 1
      for (int v = 0; v < kVectors; ++v) {
        const int first = v * stripe;
        float sum = 0;
        if (first < end) {
          sum = careful_sum(load, load_vector<Columns>(load, in, first, end), exponential);
        }
#pragma unroll
        for (int i = 0; i < kVectors; ++i) sums[i] = i == v ? sum : sums[i];
      }
    }
    own.y = Reduction::sum(tree_sum(sums), shared[0]);
  }

  const float2* statistics = parts.statistics + place.row * parts.count;
  if constexpr (kStage == Stage::kTake) {
    if (threadIdx.x == 0) parts.statistics[place.row * parts.count + place.part] = own;
    return;
  } else if constexpr (kStage == Stage::kCluster) {
    cluster.exchange(own, place.part, parts.count);
    statistics = cluster.parts;
  } else {
    wait_for_kernel_before();  // its loads are on their way by then
  }

  const float maximum =
      max_over_parts(parts.count, shared[1], [&](int p) { return statistics[p].x; });
  RowExponential<Load> exponential(load, maximum);
  exponential.shift = row_shift(load.odd_z(maximum));
  // The sum of a part is measured from its own maximum. Those of two regular maxima differ by the
  // exponential of what their offsets differ by; others by that of what the maxima do, and by what
  // `offset` was rounded by where one is regular. A part that keeps nothing but NaN has no maximum,
  // and a sum.
  const float sum = sum_over_parts(parts.count, shared[1], [&](int p) {
    const float2 part = statistics[p];
    if (part.x == negative_infinity(0.0f)) return part.y;
    const RowExponential<Load> partial(load, part.x);
    if (partial.is_regular && exponential.is_regular) {
      return part.y * exponential.of_exponent(exponential.offset - partial.offset);
    }
    const float rounding = exponential.rounding(maximum) - partial.rounding(part.x);
    return part.y * exponential.of_exponent(rounding) *
           exp_of_eighth<0>(load.odd_z(part.x) - exponential.shift);
  });
  const float factor = row_factor(sum);

  const Writer out(probs + offsets.row * layout.cols + place.start, cols, staging);
  // All lanes of a warp store together.
  const int stored = Columns::kIsSpread ? cols + static_cast<int>(threadIdx.x % kWarpSize) : cols;
  if constexpr (kIsHeld) {
    const bool is_odd = !exponential.is_regular || factor != factor;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Load::between_passes(held[v]);
      const int first = v * stripe;
      if (first < stored && !is_odd) {
        float p[N];
        vector_probs(load, held[v], exponential, factor, p);
        out.store(first, p);
      }
    }
    if (!is_odd) return;
  }
#pragma unroll 1
  for (int first = 0; first < stored; first += stripe) {
    float p[N] = {};
    if (first < end) {
      const auto again = load_vector<Columns>(load, in, first, end);
      careful_probs<Columns>(load, in, again, exponential, factor, first, end, p);
    }
    out.store(first, p);
  }
}

// A block owns a part of up to kPartThreads * kVectors vectors of grad and probs each in registers.
// Reads the visible part of both once, in two stages twice; writes all of grad_scores once (and of
// dz). Safe: as above.
template <typename Load, int kVectors, Access kAccess, Stage kStage>
__global__ void __launch_bounds__(kPartThreads, part_blocks(kAccess == Access::kWhole))
    softmax_backward_parts(const Load load, const GradOut<typename Load::Scalar> out,
                           const __grid_constant__ DeviceRowLayout layout, const CausalLimit causal,
                           const Parts parts) {
  using Scalar = typename Load::Scalar;
  using Reduction = RowReduction<kPartThreads, float>;
  using Columns = RowColumns<kAccess, kPartThreads>;
  using Writer = RowWriter<Scalar, Columns>;
  constexpr int N = Load::N;
  __shared__ typename Reduction::Shared shared[2];
  __shared__ typename Writer::template Staging<kPartThreads> staging;
  __shared__ ClusterExchange cluster;

  if constexpr (kStage == Stage::kCluster) cluster.begin(parts.count);
  if constexpr (kStage == Stage::kTake) let_next_kernel_start();
  const PartPlace<N, Columns> place(parts);
  const RowOffsets offsets = layout.template offsets<2>(place.row);
  const auto in = load.template row<Columns>(layout.cols, offsets, place.start);
  const int visible = static_cast<int>(causal.visible(offsets.query));
  const int end = visible - place.start;
  const int cols = static_cast<int>(layout.cols) - place.start;
  const int stripe = place.stripe;

  typename Load::Held held[kVectors];
  load_row<Columns>(load, in, stripe, visible, visible, end, held);

  float2 own{};
  if constexpr (kStage != Stage::kFinish) {
    float dots[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) dots[v] = vector_dot<false>(load, held[v]);
    own.x = Reduction::sum(tree_sum(dots), shared[0]);
    if (needs_care(own.x)) {
      // Rare: read the part again, so that nothing is kept for this above.
#pragma unroll 1
      for (int v = 0; v < kVectors; ++v) {
        const int first = v * stripe;
        float dot = 0;
        if (first < end) dot = vector_dot<true>(load, load_vector<Columns>(load, in, first, end));
#pragma unroll
        for (int i = 0; i < kVectors; ++i) dots[i] = i == v ? dot : dots[i];
      }
      own.x = Reduction::sum(tree_sum(dots), shared[1]);
    }
  }

  const float2* statistics = parts.statistics + place.row * parts.count;
  if constexpr (kStage == Stage::kTake) {
    if (threadIdx.x == 0) parts.statistics[place.row * parts.count + place.part] = own;
    return;
  } else if constexpr (kStage == Stage::kCluster) {
    cluster.exchange(own, place.part, parts.count);
    statistics = cluster.parts;
  } else {
    wait_for_kernel_before();  // its loads are on their way by then
  }

  // The barriers of the exchange, or the end of the first kernel, lie behind all use of `shared`.
  const float dot = sum_over_parts(parts.count, shared[0], [&](int p) { return statistics[p].x; });
  if (place.start == 0 && out.dots != nullptr) out.dots[offsets.row] = dot;

  const int64_t at = offsets.row * layout.cols + place.start;
  const Writer grad_scores(out.grad_scores + at, cols, staging);
  // All lanes of a warp store together.
  const int stored = Columns::kIsSpread ? cols + static_cast<int>(threadIdx.x % kWarpSize) : cols;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    Load::between_passes(held[v]);
    const int first = v * stripe;
    if (first < stored) {
      // With care in every row: a part alone doesn't show whether another needed it.
      float dz[N];
      vector_dz<true>(load, held[v], dot, dz);
      store_dz(grad_scores, out, first, dz);
    }
  }
}

}  // namespace sms_plugin
