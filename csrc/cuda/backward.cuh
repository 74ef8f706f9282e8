// Backward kernels: dz = p * (g - sum(p * g)), nothing at p == 0. No torch here.

#pragma once

#include "mapping.cuh"
#include "reductions.cuh"
#include "row_loader.cuh"
#include "row_writer.cuh"
#include "rows.cuh"

namespace sms_plugin {

// What happens at load of the backward: a vector of gradients and one of probs, kept packed.
template <typename T>
struct GradAndProbs {
  using Scalar = T;
  using Acc = Accumulator<T>;
  static constexpr int N = kVectorSize<T>;
  static constexpr Table kTable = sizeof(T) == 8 ? Table::kDouble : Table::kPair;
  struct Held {
    Vector<T> grad;
    Vector<T> probs;
  };

  Operand<T> grad_probs;
  Operand<T> probs;

  template <typename Columns>
  struct Row {
    RowReader<T, Columns> grad;
    RowReader<T, Columns> probs;
    __device__ __forceinline__ bool is_inner() const { return grad.is_inner() && probs.is_inner(); }
  };
  template <typename Columns>
  struct Raw {
    RawVector<T, Columns> grad;
    RawVector<T, Columns> probs;
  };

  template <typename Columns>
  __device__ __forceinline__ Row<Columns> row(int64_t cols, const RowOffsets& offsets,
                                              int64_t start) const {
    Row<Columns> row{{grad_probs, offsets.operand[0], cols, start},
                     {probs, offsets.operand[1], cols, start}};
    const bool is_inner = row.is_inner();
    row.grad.keep_inner(is_inner);
    row.probs.keep_inner(is_inner);
    return row;
  }

  template <typename Columns>
  __device__ __forceinline__ Raw<Columns> nothing() const {
    return {unread<Columns>(zero_vector<T>()), unread<Columns>(zero_vector<T>())};
  }

  template <typename Columns, typename Index>
  __device__ __forceinline__ void fetch(const Row<Columns>& row, Index first, Index end,
                                        Raw<Columns>& raw) const {
    row.grad.fetch(first, end, raw.grad);
    row.probs.fetch(first, end, raw.probs);
  }
  template <typename Index>
  __device__ __forceinline__ Raw<ShiftedColumns> gather(const Row<ShiftedColumns>& row, Index first,
                                                        Index end) const {
    return {row.grad.gather(first, end), row.probs.gather(first, end)};
  }

  template <typename Columns, typename Index>
  __device__ __forceinline__ Held finish(const Row<Columns>& row, const Raw<Columns>& raw,
                                         Index first, Index end) const {
    return {row.grad.take(raw.grad), row.probs.take(raw.probs)};
  }

  static __device__ __forceinline__ void cut(Held& held, int left) {
    cut_vector(held.grad, left, zero_vector<T>());
    cut_vector(held.probs, left, zero_vector<T>());
  }

  static __device__ __forceinline__ void between_passes(Held& held) {
    keep_packed(held.grad);
    keep_packed(held.probs);
  }

  // Not value_of: rows that are cut into parts have no register left for it.
  __device__ __forceinline__ Acc grad(const Held& held, int k) const {
    return to_accumulator<Acc>(element(held.grad, k));
  }
  __device__ __forceinline__ Acc prob(const Held& held, int k) const {
    return value_of<Acc>(held.probs, k);
  }
};

// Where probs is 0 the incoming gradient may be infinite and must not be touched. Infinity times 0
// shows in the sum: a row whose plain sum is small enough for g - sum not to overflow has none, and
// needs no test at each value.
template <typename Acc>
__device__ __forceinline__ bool needs_care(Acc dot) {
  constexpr float kLargest = 0x1p60f;
  return !(dot <= Acc{kLargest} && dot >= -Acc{kLargest});
}

__device__ __forceinline__ float rounded_product(float x, float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ double rounded_product(double x, double y) { return __dmul_rn(x, y); }

// The sum of p * g of a vector; with care, nothing is added at p == 0. Both round alike: which
// products are fused is written down, not left to the compiler.
template <bool kIsCareful, typename Load, typename Acc = typename Load::Acc>
__device__ __forceinline__ Acc vector_dot(const Load& load, const typename Load::Held& held) {
  constexpr int kHalf = Load::N / 2;
  const auto grad = [&](int k) {
    return kIsCareful && load.prob(held, k) == Acc{0} ? Acc{0} : load.grad(held, k);
  };
  Acc pairs[kHalf];
#pragma unroll
  for (int k = 0; k < kHalf; ++k) {
    const Acc product = rounded_product(load.prob(held, k + kHalf), grad(k + kHalf));
    pairs[k] = fma(load.prob(held, k), grad(k), product);
  }
  return tree_sum(pairs);
}

template <bool kIsCareful, typename Load, typename Acc = typename Load::Acc>
__device__ __forceinline__ void vector_dz(const Load& load, const typename Load::Held& held,
                                          Acc dot, Acc (&dz)[Load::N]) {
#pragma unroll
  for (int k = 0; k < Load::N; ++k) {
    const Acc p = load.prob(held, k);
    dz[k] = kIsCareful && p == Acc{0} ? Acc{0} : p * (load.grad(held, k) - dot);
  }
}

// What the backward writes.
template <typename T>
struct GradOut {
  using Acc = Accumulator<T>;
  T* grad_scores;  // [rows, cols]
  T* dz;           // [rows, cols]: the gradient of a bias as large as the scores; or null
  Acc* dots;       // [rows], or null if no bias needs them
  Acc scale;

  // Bytes from grad_scores to dz.
  __device__ __forceinline__ int64_t to_dz() const {
    return reinterpret_cast<const char*>(dz) - reinterpret_cast<const char*>(grad_scores);
  }
};

// Stores a vector of dz as the gradient of the scores, and as it is if that was asked for.
template <typename Writer, typename T, typename Index, int N, typename Acc = Accumulator<T>>
__device__ __forceinline__ void store_dz(const Writer& grad_scores, const GradOut<T>& out,
                                         Index first, const Acc (&dz)[N]) {
  Acc scaled[N];
#pragma unroll
  for (int k = 0; k < N; ++k) scaled[k] = dz[k] * out.scale;
  grad_scores.store(first, scaled);
  if (out.dz != nullptr) grad_scores.store(first, dz, out.to_dz());
}

// Mapping::kLanes threads own a row and keep grad and probs in registers, kVectors vectors of each,
// striped. Reads the visible part of both once, writes all of grad_scores once (and of dz).
// Chosen for rows of up to kLanes * kVectors vectors (mapping.cuh).
// Safe: a row belongs to its threads alone; inactive groups take part in shuffles with an empty
// row.
template <typename Load, typename Mapping, Access kAccess>
__global__ void __launch_bounds__(Mapping::kThreads, Mapping::min_blocks())
    softmax_backward(const Load load, const GradOut<typename Load::Scalar> out,
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

  const int lane = Mapping::lane();
  int64_t index = Mapping::row();
  const bool is_active = index < layout.rows;
  if (!is_active) index = 0;

  const int start = Columns::template start<N>(lane);  // the others count from it
  const RowOffsets offsets = layout.template offsets<2>(index);
  const auto in = load.template row<Columns>(layout.cols, offsets, start);
  const int visible = is_active ? static_cast<int>(causal.visible(offsets.query)) : 0;
  const int end = visible - start;
  const int seen = visible - Columns::template segment<kLanes, N>(lane);
  const int cols = (is_active ? static_cast<int>(layout.cols) : 0) - start;
  const int64_t at = offsets.row * layout.cols + start;
  const Writer grad_scores(out.grad_scores + at, cols, staging);

  typename Load::Held held[kVectors];
  load_row<Columns>(load, in, kStripe, visible, seen, end, held);
  if constexpr (!Columns::kIsSpread) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int first = v * kStripe;
      if (first >= end && first < cols) {
        grad_scores.store_zeros(first);
        if (out.dz != nullptr) grad_scores.store_zeros(first, out.to_dz());
      }
    }
  }

  Acc dots[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    dots[v] = v * kStripe < seen ? vector_dot<false>(load, held[v]) : Acc{0};
  }
  Acc dot = Reduction::sum(tree_sum(dots), shared[0]);

  // All lanes of a warp store together; those of a short row store zeros.
  const int stored = Columns::kIsSpread ? static_cast<int>(layout.cols) : end;
  const bool is_careful = needs_care(dot);
  if (any_row<kLanes>(is_careful)) {
    // Rare: read the row again, so that nothing is kept for this above. Rows beside one that needs
    // care get what they get among their like, to the sign of a 0.
#pragma unroll 1
    for (int v = 0; v < kVectors; ++v) {
      const int first = v * kStripe;
      Acc sum = 0;
      if (first < end) sum = vector_dot<true>(load, load_vector<Columns>(load, in, first, end));
#pragma unroll
      for (int i = 0; i < kVectors; ++i) dots[i] = i == v ? sum : dots[i];
    }
    const Acc careful = Reduction::sum(tree_sum(dots), shared[1]);
    if (is_careful) dot = careful;
    if (is_active && lane == 0 && out.dots != nullptr) out.dots[offsets.row] = dot;
#pragma unroll 1
    for (int v = 0; v < kVectors; ++v) {
      const int first = v * kStripe;
      Acc dz[N] = {};
      if (first < end) {
        const auto held = load_vector<Columns>(load, in, first, end);
        if (is_careful) {
          vector_dz<true>(load, held, dot, dz);
        } else {
          vector_dz<false>(load, held, dot, dz);
        }
      }
      if (first < stored) store_dz(grad_scores, out, first, dz);
    }
    return;
  }
  if (is_active && lane == 0 && out.dots != nullptr) out.dots[offsets.row] = dot;

#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    Load::between_passes(held[v]);
    const int first = v * kStripe;
    if (first >= stored) continue;
    if (Columns::kIsSpread && !any_row<kLanes>(first < seen)) {
      grad_scores.store_zeros(first);
      if (out.dz != nullptr) grad_scores.store_zeros(first, out.to_dz());
      continue;
    }
    Acc dz[N];
    vector_dz<false>(load, held[v], dot, dz);
    store_dz(grad_scores, out, first, dz);
  }
}

// A block owns a row that doesn't fit in registers and reads it twice, once
// from the L2 if it fits. Writes dz beside grad_scores if asked to. Chosen for rows that no other
// kernel takes; any length. Safe: a row belongs to its block alone.
template <typename Load, typename Mapping, Access kAccess>
__global__ void __launch_bounds__(Mapping::kThreads, 1)
    softmax_backward_streaming(const Load load, const GradOut<typename Load::Scalar> out,
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
  __shared__ typename Reduction::Shared shared[2];
  __shared__ typename Writer::template Staging<Mapping::kThreads> staging;

  const int64_t start = Columns::template start<N>(int64_t{Mapping::lane()});
  const RowOffsets offsets = layout.template offsets<2>(Mapping::row());
  const auto in = load.template row<Columns>(layout.cols, offsets, start);
  const int64_t cols = layout.cols - start;
  const int64_t end = causal.visible(offsets.query) - start;
  const int64_t at = offsets.row * layout.cols + start;
  const Writer grad_scores(out.grad_scores + at, cols, staging);

  // Summed twice if it needs care.
  Acc dot = 0;
  bool is_careful = false;
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {
    constexpr int kSums = kStreamingSums<Acc>;
    Acc sums[kSums] = {};
    for (int64_t base = 0; base < end; base += kSums * kStep) {
#pragma unroll
      for (int u = 0; u < kSums; ++u) {
        const int64_t first = base + u * kStep;
        if (first < end) {
          const auto held = load_vector<Columns>(load, in, first, end);
          sums[u] += is_careful ? vector_dot<true>(load, held) : vector_dot<false>(load, held);
        }
      }
    }
    dot = Reduction::sum(tree_sum(sums), shared[turn]);
    if (turn == 0) is_careful = needs_care(dot);
    if (!is_careful) break;
  }
  if (start == 0 && out.dots != nullptr) out.dots[offsets.row] = dot;

  // All lanes of a warp store together.
  const int64_t stored = Columns::kIsSpread ? cols + threadIdx.x % kWarpSize : cols;
#pragma unroll 4
  for (int64_t first = 0; first < stored; first += kStep) {
    Acc dz[N] = {};
    if (first < end) {
      const auto held = load_vector<Columns>(load, in, first, end);
      if (is_careful) {
        vector_dz<true>(load, held, dot, dz);
      } else {
        vector_dz<false>(load, held, dot, dz);
      }
    }
    store_dz(grad_scores, out, first, dz);
  }
}

}  // namespace sms_plugin
