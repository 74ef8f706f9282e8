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

template <typename T>
SMS_PLUGIN_INLINE Part<T> splat_part(T value) {
  return value - Part<T>{};
}

template <typename T>
SMS_PLUGIN_INLINE Lanes<T> splat(T value) {
  Lanes<T> result;
  for (int p = 0; p < Lanes<T>::kParts; ++p) result.part[p] = splat_part(value);
  return result;
}

template <typename T>
SMS_PLUGIN_INLINE Lanes<T> operator+(Lanes<T> a, const Lanes<T>& b) {
  for (int p = 0; p < Lanes<T>::kParts; ++p) a.part[p] += b.part[p];
  return a;
}

template <typename T>
SMS_PLUGIN_INLINE Lanes<T> operator-(Lanes<T> a, const Lanes<T>& b) {
  for (int p = 0; p < Lanes<T>::kParts; ++p) a.part[p] -= b.part[p];
  return a;
}

template <typename T>
SMS_PLUGIN_INLINE Lanes<T> operator*(Lanes<T> a, const Lanes<T>& b) {
  for (int p = 0; p < Lanes<T>::kParts; ++p) a.part[p] *= b.part[p];
  return a;
}

// a * b + c, rounded once where the instruction set can.
template <typename P>
SMS_PLUGIN_INLINE P mul_add_part(P a, P b, P c) {
  return a * b + c;
}

#if SMS_PLUGIN_VECTOR_BYTES == 64
SMS_PLUGIN_INLINE Part<float> mul_add_part(Part<float> a, Part<float> b, Part<float> c) {
  return _mm512_fmadd_ps(a, b, c);
}
SMS_PLUGIN_INLINE Part<double> mul_add_part(Part<double> a, Part<double> b, Part<double> c) {
  return _mm512_fmadd_pd(a, b, c);
}
#elif SMS_PLUGIN_VECTOR_BYTES == 32
SMS_PLUGIN_INLINE Part<float> mul_add_part(Part<float> a, Part<float> b, Part<float> c) {
  return _mm256_fmadd_ps(a, b, c);
}
SMS_PLUGIN_INLINE Part<double> mul_add_part(Part<double> a, Part<double> b, Part<double> c) {
  return _mm256_fmadd_pd(a, b, c);
}
#endif

template <typename T>
SMS_PLUGIN_INLINE Lanes<T> mul_add(Lanes<T> a, const Lanes<T>& b, const Lanes<T>& c) {
  for (int p = 0; p < Lanes<T>::kParts; ++p) {
    a.part[p] = mul_add_part(a.part[p], b.part[p], c.part[p]);
  }
  return a;
}

// The larger one; b if one of them is NaN.
template <typename P>
SMS_PLUGIN_INLINE P larger_part(P a, P b) {
  return a > b ? a : b;
}

template <typename T>
SMS_PLUGIN_INLINE Lanes<T> larger(Lanes<T> a, const Lanes<T>& b) {
  for (int p = 0; p < Lanes<T>::kParts; ++p) a.part[p] = larger_part(a.part[p], b.part[p]);
  return a;
}

// `values` where `condition` isn't 0, else 0.
template <typename T>
SMS_PLUGIN_INLINE Lanes<T> where_nonzero(const Lanes<T>& condition, Lanes<T> values) {
  for (int p = 0; p < Lanes<T>::kParts; ++p) {
    values.part[p] = condition.part[p] != Part<T>{} ? values.part[p] : Part<T>{};
  }
  return values;
}

SMS_PLUGIN_INLINE Lanes<double> to_double(const Lanes<double>& values) { return values; }

SMS_PLUGIN_INLINE Lanes<double> to_double(const Lanes<float>& values) {
  Lanes<double> result;
#if SMS_PLUGIN_VECTOR_BYTES == 64
  result.part[0] = _mm512_cvtps_pd(_mm512_castps512_ps256(values.part[0]));
  result.part[1] = _mm512_cvtps_pd(_mm512_extractf32x8_ps(values.part[0], 1));
#elif SMS_PLUGIN_VECTOR_BYTES == 32
  for (int p = 0; p < Lanes<float>::kParts; ++p) {
    result.part[2 * p] = _mm256_cvtps_pd(_mm256_castps256_ps128(values.part[p]));
    result.part[2 * p + 1] = _mm256_cvtps_pd(_mm256_extractf128_ps(values.part[p], 1));
  }
#else
  for (int p = 0; p < Lanes<double>::kParts; ++p) {
    const Part<float> pair = values.part[p / 2];
    const int first = p % 2 * 2;
    result.part[p] = Part<double>{pair[first], pair[first + 1]};
  }
#endif
  return result;
}

// Combines all lanes: lane l with l + 8, then with l + 4, l + 2 and l + 1.
template <typename T, typename Op>
SMS_PLUGIN_INLINE T combine_lanes(Lanes<T> values, const Op& op) {
  for (int parts = Lanes<T>::kParts / 2; parts > 0; parts /= 2) {
    for (int p = 0; p < parts; ++p) values.part[p] = op(values.part[p], values.part[p + parts]);
  }
  T lanes[Lanes<T>::kWidth];
  std::memcpy(lanes, &values.part[0], sizeof(lanes));
  for (int width = Lanes<T>::kWidth / 2; width > 0; width /= 2) {
    for (int l = 0; l < width; ++l) lanes[l] = op(lanes[l], lanes[l + width]);
  }
  return lanes[0];
}

}  // namespace
}  // namespace sms_plugin
