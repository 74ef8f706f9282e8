// 16-byte vectors, conversions, exponentials and reductions in one fixed order.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <type_traits>

namespace sms_plugin {

constexpr int kWarpSize = 32;
constexpr int kVectorBytes = 16;  // the widest load of every architecture we build for

template <typename T>
constexpr int kVectorSize = kVectorBytes / static_cast<int>(sizeof(T));

// kVectorSize<T> values, as the words they are loaded in. An array of 16-bit values would be taken
// apart into one register each.
template <typename T>
struct alignas(kVectorBytes) Vector {
  uint32_t words[kVectorBytes / 4];
};

// What sums are taken in.
template <typename T>
struct AccumulateIn {
  using type = float;
};
template <>
struct AccumulateIn<double> {
  using type = double;
};
template <typename T>
using Accumulator = typename AccumulateIn<T>::type;

// z is summed at an eighth of its size: two finite dtype minima then never add up to -inf, so that
// only -inf itself removes a key. The division is exact; the factor comes back inside the
// exponential.
constexpr double kHeadroom = 8.0;

template <typename Acc>
struct Limits;
template <>
struct Limits<float> {
  static constexpr float kMaxZ = FLT_MAX / 8;  // a larger z overflows: the row is NaN
};
template <>
struct Limits<double> {
  static constexpr double kMaxZ = DBL_MAX / 8;
};

__device__ __forceinline__ float negative_infinity(float) { return -INFINITY; }
__device__ __forceinline__ double negative_infinity(double) {
  return -static_cast<double>(INFINITY);
}

// exp(8 x) * 2^kExtraExponent for x <= 0. A result below 2^-126 is flushed to 0.
template <int kExtraExponent = 0>
__device__ __forceinline__ float exp_of_eighth(float x) {
  constexpr float kEightLog2E = 11.541560327111707f;
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;"
      : "=f"(result)
      : "f"(kExtraExponent == 0 ? x * kEightLog2E : fmaf(x, kEightLog2E, kExtraExponent)));
  return result;
}
// A call, not a copy at each use: its temporaries would push the row out of the registers.
template <int kExtraExponent = 0>
static __device__ __noinline__ double exp_of_eighth(double x) {
  static_assert(kExtraExponent == 0);
  return exp(x * kHeadroom);
}

__device__ __forceinline__ float reciprocal(float x) { return __frcp_rn(x); }
__device__ __forceinline__ double reciprocal(double x) { return 1.0 / x; }

template <typename Acc>
__device__ __forceinline__ Acc to_accumulator(__half x) {
  return static_cast<Acc>(__half2float(x));
}
template <typename Acc>
__device__ __forceinline__ Acc to_accumulator(__nv_bfloat16 x) {
  return static_cast<Acc>(__bfloat162float(x));
}
template <typename Acc>
__device__ __forceinline__ Acc to_accumulator(float x) {
  return static_cast<Acc>(x);
}
// A finite double below float's range stays finite: only -inf removes a key.
template <typename Acc>
__device__ __forceinline__ Acc to_accumulator(double x) {
  if constexpr (sizeof(Acc) == sizeof(double)) {
    return x;
  } else {
    const float narrowed = static_cast<float>(x);
    const bool fell_out = isinf(narrowed) && x < 0 && !isinf(x);
    return fell_out ? -FLT_MAX : narrowed;
  }
}

// The one rounding, at the store.
template <typename T, typename Acc>
__device__ __forceinline__ T from_accumulator(Acc x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(static_cast<float>(x));
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(static_cast<float>(x));
  } else {
    return static_cast<T>(x);
  }
}

template <typename T>
__device__ __forceinline__ T element(const Vector<T>& vector, int k) {
  if constexpr (sizeof(T) == 2) {
    const auto bits = static_cast<uint16_t>(vector.words[k / 2] >> (16 * (k % 2)));
    if constexpr (std::is_same_v<T, __half>) {
      return __ushort_as_half(bits);
    } else {
      return __ushort_as_bfloat16(bits);
    }
  } else if constexpr (sizeof(T) == 4) {
    return __uint_as_float(vector.words[k]);
  } else {
    return __hiloint2double(vector.words[2 * k + 1], vector.words[2 * k]);
  }
}

// The words of value k; or-ed together they make a vector.
template <typename T>
__device__ __forceinline__ void put_element(Vector<T>& vector, int k, T value) {
  if constexpr (std::is_same_v<T, __half>) {
    vector.words[k / 2] |= static_cast<uint32_t>(__half_as_ushort(value)) << (16 * (k % 2));
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    vector.words[k / 2] |= static_cast<uint32_t>(__bfloat16_as_ushort(value)) << (16 * (k % 2));
  } else if constexpr (sizeof(T) == 4) {
    vector.words[k] = __float_as_uint(value);
  } else {
    vector.words[2 * k] = static_cast<uint32_t>(__double2loint(value));
    vector.words[2 * k + 1] = static_cast<uint32_t>(__double2hiint(value));
  }
}

template <typename T>
__device__ __forceinline__ Vector<T> zero_vector() {
  return {{0u, 0u, 0u, 0u}};
}

// The one rounding: two values an instruction where there are 16 bits for each.
template <typename T, int N, typename Acc>
__device__ __forceinline__ Vector<T> pack(const Acc (&x)[N]) {
  static_assert(N == kVectorSize<T>);
  Vector<T> result = zero_vector<T>();
  if constexpr (std::is_same_v<T, __half>) {
#pragma unroll
    for (int k = 0; k < N; k += 2) {
      const __half2 pair = __floats2half2_rn(x[k], x[k + 1]);
      result.words[k / 2] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
    for (int k = 0; k < N; k += 2) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[k], x[k + 1]);
      result.words[k / 2] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) put_element(result, k, from_accumulator<T>(x[k]));
  }
  return result;
}

// How far an address lies behind a 16-byte boundary, in bytes.
__device__ __forceinline__ uint32_t misalignment(const void* address) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(address) % kVectorBytes);
}

// A column that can be read: one beyond the end is replaced by the last, which costs no branch.
template <typename Index>
__device__ __forceinline__ Index column_within(Index column, Index end) {
  return column < end ? column : end - 1;
}

// 16 of the 32 bytes of two vectors, from byte `shift` on (0 < shift < 16).
template <typename T>
__device__ __forceinline__ Vector<T> shifted(const Vector<T>& low, const Vector<T>& high,
                                             uint32_t shift) {
  uint32_t words[8];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    words[w] = low.words[w];
    words[w + 4] = high.words[w];
  }
  const bool by_two = shift & 8;
  const bool by_one = shift & 4;
#pragma unroll
  for (int w = 0; w < 6; ++w) words[w] = by_two ? words[w + 2] : words[w];
#pragma unroll
  for (int w = 0; w < 5; ++w) words[w] = by_one ? words[w + 1] : words[w];
  Vector<T> result;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    result.words[w] = __funnelshift_r(words[w], words[w + 1], 8 * (shift & 3));
  }
  return result;
}

// 16 bytes from an address `shift` bytes behind a boundary. Neighbouring lanes share the aligned
// loads, so the second one comes from the L1.
template <typename T>
__device__ __forceinline__ Vector<T> load_shifted(const T* address, uint32_t shift) {
  const auto* aligned =
      reinterpret_cast<const Vector<T>*>(reinterpret_cast<const char*>(address) - shift);
  return shifted(aligned[0], aligned[1], shift);
}

// Columns [first, first + N) of a row, of which those from `end` on are read as `padding`. Which
// columns a vector holds never depends on the alignment of the row: only the loads do.
template <typename T, typename Index>
__device__ __forceinline__ Vector<T> load_vector(const T* __restrict__ row,  // [>= end]
                                                 Index first, Index end, uint32_t shift,
                                                 T padding) {
  constexpr int N = kVectorSize<T>;
  const T* address = row + first;
  if (shift == 0) {
    if (first + N <= end) return *reinterpret_cast<const Vector<T>*>(address);
  } else if constexpr (sizeof(T) < sizeof(double)) {
    if (first > 0 && first + 2 * N <= end) {  // both aligned loads stay within the row
      return load_shifted(address, shift);
    }
  }
  Vector<T> result = zero_vector<T>();
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const T value = row[column_within(first + k, end)];
    put_element(result, k, first + k < end ? value : padding);
  }
  return result;
}

// Makes the compiler forget what it knows of a vector. Without this it keeps the converted values
// of one pass for the next, in up to four times the registers, where converting again costs next to
// nothing.
template <typename T>
__device__ __forceinline__ void keep_packed(Vector<T>& vector) {
#pragma unroll
  for (int w = 0; w < kVectorBytes / 4; ++w) asm volatile("" : "+r"(vector.words[w]));
}

// Sums by halving: x[i] + x[i + N / 2], then again. Zeros at the end change nothing, so the result
// is a function of the logical index alone and not of how many lanes share the row. Recursive,
// since the compiler doesn't unroll nested loops of 32 and would index local memory.
template <int N, int kSize, typename Acc>
__device__ __forceinline__ Acc tree_sum_of_first(Acc (&x)[kSize]) {
  static_assert((N & (N - 1)) == 0, "halving needs a power of two");
  if constexpr (N == 1) {
    return x[0];
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) x[i] += x[i + N / 2];
    return tree_sum_of_first<N / 2>(x);
  }
}

template <int N, typename Acc>
__device__ __forceinline__ Acc tree_sum(Acc (&x)[N]) {
  return tree_sum_of_first<N>(x);
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
    const Acc other = __shfl_xor_sync(0xffffffffu, x, half);
    x = other > x ? other : x;
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
      for (int w = 1; w < kWarps; ++w) x = shared.maxima[w] > x ? shared.maxima[w] : x;
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

}  // namespace sms_plugin
