// 16-byte vectors of values, and what is done to them packed.

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

// The larger of two values. NaN loses against a number.
__device__ __forceinline__ float larger(float x, float y) { return fmaxf(x, y); }
__device__ __forceinline__ double larger(double x, double y) { return fmax(x, y); }

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

// Value k in the accumulator. The bits of a bfloat16 are the upper ones of its float32.
template <typename Acc, typename T>
__device__ __forceinline__ Acc value_of(const Vector<T>& vector, int k) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && std::is_same_v<Acc, float>) {
    const uint32_t word = vector.words[k / 2];
    return __uint_as_float(k % 2 == 0 ? word << 16 : word & 0xffff0000u);
  } else {
    return to_accumulator<Acc>(element(vector, k));
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

// Makes the compiler forget what it knows of a vector. Without this it keeps the converted values
// of one pass for the next, in up to four times the registers, where converting again costs next to
// nothing.
template <typename T>
__device__ __forceinline__ void keep_packed(Vector<T>& vector) {
#pragma unroll
  for (int w = 0; w < kVectorBytes / 4; ++w) asm volatile("" : "+r"(vector.words[w]));
}

}  // namespace sms_plugin
