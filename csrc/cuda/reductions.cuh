// Sums and maxima of a row in one fixed order.

#pragma once

#include "primitives.cuh"

namespace sms_plugin {

// Sums by halving: x[i] + x[i + N / 2], then again, N being the next power of two. Zeros at the end
// change nothing, so the result is a function of the logical index alone and not of how many lanes
// share the row. Recursive, since the compiler doesn't unroll nested loops of 32 and would index
// local memory.
template <int kHalf, int N, typename Acc>
__device__ __forceinline__ Acc tree_sum_from(Acc (&x)[N]) {
  if constexpr (kHalf == 0) {
    return x[0];
  } else {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      if (i + kHalf < N) x[i] += x[i + kHalf];
    }
    return tree_sum_from<kHalf / 2>(x);
  }
}

template <int N>
constexpr int kTreeHalf = N > 16  ? 16
                          : N > 8 ? 8
                          : N > 4 ? 4
                          : N > 2 ? 2
                          : N > 1 ? 1
                                  : 0;

template <int N, typename Acc>
__device__ __forceinline__ Acc tree_sum(Acc (&x)[N]) {
  static_assert(N <= 32);
  return tree_sum_from<kTreeHalf<N>>(x);
}

template <int kLanes, typename Acc>
__device__ __forceinline__ Acc warp_sum(Acc x) {
#pragma unroll
  for (int half = kLanes / 2; half > 0; half /= 2) x += __shfl_xor_sync(0xffffffffu, x, half);
  return x;
}

template <int kLanes, typename Acc>
__device__ __forceinline__ Acc warp_max(Acc x) {
#pragma unroll
  for (int half = kLanes / 2; half > 0; half /= 2) {
    x = larger(x, __shfl_xor_sync(0xffffffffu, x, half));
  }
  return x;
}

// Reductions over the kLanes threads that share a row: part of a warp, or the whole block. Every
// thread gets the result. Each object is used once in a kernel, so that no barrier is needed before
// reuse.
template <int kLanes, typename Acc>
struct RowReduction {
  static constexpr int kWarps = kLanes > kWarpSize ? kLanes / kWarpSize : 1;
  static constexpr int kSlots = kLanes > kWarpSize ? kLanes : 1;

  struct Shared {
    Acc sums[kSlots];    // one a thread, summed in the order of the tree
    Acc maxima[kWarps];  // one a warp: the order of a maximum doesn't matter
  };

  static __device__ __forceinline__ Acc max(Acc x, Shared& shared) {
    if constexpr (kLanes <= kWarpSize) {
      return warp_max<kLanes>(x);
    } else {
      x = warp_max<kWarpSize>(x);
      if (threadIdx.x % kWarpSize == 0) shared.maxima[threadIdx.x / kWarpSize] = x;
      __syncthreads();  // maxima of all warps are written
      x = shared.maxima[0];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) x = larger(x, shared.maxima[w]);
      return x;
    }
  }

  static __device__ __forceinline__ Acc sum(Acc x, Shared& shared) {
    if constexpr (kLanes <= kWarpSize) {
      return warp_sum<kLanes>(x);
    } else {
      shared.sums[threadIdx.x] = x;
      __syncthreads();  // sums of all threads are written
      Acc of_warps[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        of_warps[w] = shared.sums[w * kWarpSize + threadIdx.x % kWarpSize];
      }
      return warp_sum<kWarpSize>(tree_sum(of_warps));
    }
  }
};

// Whether any row of a warp is odd; a row that is spread over a block is odd in all of it.
template <int kLanes>
__device__ __forceinline__ bool any_row(bool is_odd) {
  return kLanes < kWarpSize ? __any_sync(0xffffffffu, is_odd) != 0 : is_odd;
}

}  // namespace sms_plugin
