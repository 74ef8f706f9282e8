// Arithmetic on sixteen columns at a time, in as many registers as the instruction set needs.
// Included once per instruction set, behind its target pragma.

#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>

#include "targets.h"

namespace sms_plugin {
namespace {

constexpr int kLanes = 16;  // one AVX-512 vector of float32

// One register of the accumulator's type, as numbers and as bits.
template <typename T>
struct Register;

template <>
struct Register<float> {
  typedef float Values __attribute__((vector_size(SMS_PLUGIN_VECTOR_BYTES)));
  typedef uint32_t Bits __attribute__((vector_size(SMS_PLUGIN_VECTOR_BYTES)));
};

template <>
struct Register<double> {
  typedef double Values __attribute__((vector_size(SMS_PLUGIN_VECTOR_BYTES)));
  typedef uint64_t Bits __attribute__((vector_size(SMS_PLUGIN_VECTOR_BYTES)));
};

template <typename T>
using Part = typename Register<T>::Values;

// Sixteen columns.
template <typename T>
struct Lanes {
  static constexpr int kWidth = SMS_PLUGIN_VECTOR_BYTES / sizeof(T);
  static constexpr int kParts = kLanes / kWidth;
  Part<T> part[kParts];
};

template <typename T>
constexpr T infinity() {
  return static_cast<T>(__builtin_inf());
}

// op(register, ...) of every register of the operands. `op` is no lambda without captures: the
// conversion of such a one to a function pointer would miss the target of the instruction set.
template <typename T, typename Op, typename... Others>
SMS_PLUGIN_INLINE Lanes<T> map_parts(const Op& op, Lanes<T> first, const Others&... others) {
  SMS_PLUGIN_UNROLL
  for (int p = 0; p < Lanes<T>::kParts; ++p) first.part[p] = op(first.part[p], others.part[p]...);
  return first;
}

template <typename T>
SMS_PLUGIN_INLINE Part<T> splat_part(T value) {
  return value - Part<T>{};
}

template <typename T>
SMS_PLUGIN_INLINE Lanes<T> splat(T value) {
  Lanes<T> result;
  SMS_PLUGIN_UNROLL
  for (int p = 0; p < Lanes<T>::kParts; ++p) result.part[p] = splat_part(value);
  return result;
}

template <typename T>
SMS_PLUGIN_INLINE Lanes<T> operator+(Lanes<T> a, const Lanes<T>& b) {
  SMS_PLUGIN_UNROLL
  for (int p = 0; p < Lanes<T>::kParts; ++p) a.part[p] += b.part[p];
  return a;
}

template <typename T>
SMS_PLUGIN_INLINE Lanes<T> operator-(Lanes<T> a, const Lanes<T>& b) {
  SMS_PLUGIN_UNROLL
  for (int p = 0; p < Lanes<T>::kParts; ++p) a.part[p] -= b.part[p];
  return a;
}

template <typename T>
SMS_PLUGIN_INLINE Lanes<T> operator*(Lanes<T> a, const Lanes<T>& b) {
  SMS_PLUGIN_UNROLL
  for (int p = 0; p < Lanes<T>::kParts; ++p) a.part[p] *= b.part[p];
  return a;
}

// a * b + c, rounded once where the instruction set can.
template <typename T>
SMS_PLUGIN_INLINE Part<T> mul_add_part(Part<T> a, Part<T> b, Part<T> c) {
#if SMS_PLUGIN_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4) return _mm512_fmadd_ps(a, b, c);
  if constexpr (sizeof(T) == 8) return _mm512_fmadd_pd(a, b, c);
#elif SMS_PLUGIN_VECTOR_BYTES == 32
  if constexpr (sizeof(T) == 4) return _mm256_fmadd_ps(a, b, c);
  if constexpr (sizeof(T) == 8) return _mm256_fmadd_pd(a, b, c);
#else
  return a * b + c;
#endif
}

template <typename T>
SMS_PLUGIN_INLINE Lanes<T> mul_add(const Lanes<T>& a, const Lanes<T>& b, const Lanes<T>& c) {
  return map_parts(mul_add_part<T>, a, b, c);
}

struct Sum {
  template <typename V>
  SMS_PLUGIN_INLINE V operator()(V a, V b) const {
    return a + b;
  }
};

// The larger one; b if one of them is NaN.
struct Larger {
  template <typename V>
  SMS_PLUGIN_INLINE V operator()(V a, V b) const {
    return a > b ? a : b;
  }
};

template <typename T>
SMS_PLUGIN_INLINE Lanes<T> larger(const Lanes<T>& a, const Lanes<T>& b) {
  return map_parts(Larger(), a, b);
}

template <typename T>
SMS_PLUGIN_INLINE Part<T> where_nonzero_part(Part<T> condition, Part<T> values) {
  return condition != Part<T>{} ? values : Part<T>{};
}

// `values` where `condition` isn't 0, else 0.
template <typename T>
SMS_PLUGIN_INLINE Lanes<T> where_nonzero(const Lanes<T>& condition, const Lanes<T>& values) {
  return map_parts(where_nonzero_part<T>, condition, values);
}

#if SMS_PLUGIN_VECTOR_BYTES > 16
SMS_PLUGIN_INLINE __m128 low_half(__m256 v) { return _mm256_castps256_ps128(v); }
SMS_PLUGIN_INLINE __m128 high_half(__m256 v) { return _mm256_extractf128_ps(v, 1); }
SMS_PLUGIN_INLINE __m128d low_half(__m256d v) { return _mm256_castpd256_pd128(v); }
SMS_PLUGIN_INLINE __m128d high_half(__m256d v) { return _mm256_extractf128_pd(v, 1); }
#endif
#if SMS_PLUGIN_VECTOR_BYTES == 64
SMS_PLUGIN_INLINE __m256 low_half(__m512 v) { return _mm512_castps512_ps256(v); }
SMS_PLUGIN_INLINE __m256 high_half(__m512 v) { return _mm512_extractf32x8_ps(v, 1); }
SMS_PLUGIN_INLINE __m256d low_half(__m512d v) { return _mm512_castpd512_pd256(v); }
SMS_PLUGIN_INLINE __m256d high_half(__m512d v) { return _mm512_extractf64x4_pd(v, 1); }
#endif

SMS_PLUGIN_INLINE Lanes<double> to_double(const Lanes<double>& values) { return values; }

SMS_PLUGIN_INLINE Lanes<double> to_double(const Lanes<float>& values) {
  Lanes<double> result;
#if SMS_PLUGIN_VECTOR_BYTES == 64
  result.part[0] = _mm512_cvtps_pd(low_half(values.part[0]));
  result.part[1] = _mm512_cvtps_pd(high_half(values.part[0]));
#elif SMS_PLUGIN_VECTOR_BYTES == 32
  SMS_PLUGIN_UNROLL
  for (int p = 0; p < Lanes<float>::kParts; ++p) {
    result.part[2 * p] = _mm256_cvtps_pd(low_half(values.part[p]));
    result.part[2 * p + 1] = _mm256_cvtps_pd(high_half(values.part[p]));
  }
#else
  SMS_PLUGIN_UNROLL
  for (int p = 0; p < Lanes<double>::kParts; ++p) {
    const Part<float> four = values.part[p / 2];
    const int first = p % 2 * 2;
    result.part[p] = Part<double>{four[first], four[first + 1]};
  }
#endif
  return result;
}

// Combines the lanes of one register: lane l with the one half a register behind it, and so on.
template <typename T, typename Op, typename V>
SMS_PLUGIN_INLINE T combine_register(V values, const Op& op) {
  if constexpr (sizeof(V) > 16) {
    return combine_register<T>(op(low_half(values), high_half(values)), op);
  } else if constexpr (sizeof(T) == 4) {
    return op(op(values[0], values[2]), op(values[1], values[3]));
  } else {
    return op(values[0], values[1]);
  }
}

// Combines all lanes: lane l with l + 8, then with l + 4, l + 2 and l + 1.
template <typename T, typename Op>
SMS_PLUGIN_INLINE T combine_lanes(Lanes<T> values, const Op& op) {
  SMS_PLUGIN_UNROLL
  for (int parts = Lanes<T>::kParts / 2; parts > 0; parts /= 2) {
    SMS_PLUGIN_UNROLL
    for (int p = 0; p < parts; ++p) values.part[p] = op(values.part[p], values.part[p + parts]);
  }
  return combine_register<T>(values.part[0], op);
}

}  // namespace
}  // namespace sms_plugin
