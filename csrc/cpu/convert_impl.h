// Conversions at load and at store: every dtype to the accumulator's type and back. Included once
// per instruction set, behind its target pragma.

#pragma once

#include <cstdint>

#include "arithmetic_impl.h"

namespace sms_plugin {
namespace {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

inline float half_to_float(uint32_t half) {
  const uint32_t magnitude = (half & 0x7fffu) << 13;
  constexpr uint32_t kRebias = (127u - 15u) << 23;
  constexpr uint32_t kInfinity = 0x7c00u << 13;
  uint32_t bits = magnitude + kRebias;
  bits += magnitude >= kInfinity ? kRebias : 0;  // infinity and NaN keep the largest exponent
  // A subnormal is a multiple of 2^-24: the subtraction normalises it, whatever the denormal mode.
  constexpr uint32_t kSmallestNormal = 113u << 23;
  const float subnormal =
      bit_cast<float>(magnitude + kSmallestNormal) - bit_cast<float>(kSmallestNormal);
  bits = magnitude < (1u << 23) ? bit_cast<uint32_t>(subnormal) : bits;
  return bit_cast<float>(bits | (half & 0x8000u) << 16);
}

// Round to nearest even; NaN stays NaN.
inline uint16_t float_to_half(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  constexpr uint32_t kRebias = (127u - 15u) << 23;
  uint32_t half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - kRebias) >> 13;
  half = magnitude >= 0x47800000u ? 0x7c00u : half;  // 2^16 and above
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  // Below 2^-14: a unit in the last place of 0.5 is 2^-24, so the addition rounds.
  const float subnormal = bit_cast<float>(magnitude) + 0.5f;
  half = magnitude < 0x38800000u ? bit_cast<uint32_t>(subnormal) - 0x3f000000u : half;
  return static_cast<uint16_t>(half | (bits >> 16 & 0x8000u));
}

// Round to nearest even; NaN stays NaN.
inline uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  rounded = (bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16 | 0x40u) : rounded;
  return static_cast<uint16_t>(rounded);
}

// One element to the accumulator's type.
template <typename T>
inline T to_accumulator(Half value) {
  return half_to_float(value.bits);
}

template <typename T>
inline T to_accumulator(BFloat16 value) {
  return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

template <typename T>
inline T to_accumulator(float value) {
  return value;
}

// A finite float64 below float32's range is clamped: only an infinite one removes a position.
template <typename T>
inline T to_accumulator(double value) {
  if constexpr (sizeof(T) == 8) {
    return value;
  } else {
    constexpr double kLowest = Traits<float>::kLowest;
    const double clamped = value < kLowest && value > -infinity<double>() ? kLowest : value;
    return static_cast<float>(clamped);
  }
}

// `count` elements in the accumulator's type: where they are if they have it, else in `buffer`.
template <typename T, typename S>
inline const T* widen(const S* source,  // [count]
                      int64_t count,
                      T* buffer) {  // [count]
  if constexpr (sizeof(S) == sizeof(T)) {
    return source;
  } else {
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) buffer[j] = to_accumulator<T>(source[j]);
    return buffer;
  }
}

// The same for columns that are `stride` apart; 0 repeats one element.
template <typename T, typename S>
inline const T* gather(const S* source, int64_t stride, int64_t count,
                       T* buffer) {  // [count]
  if (stride == 1) return widen(source, count, buffer);
  if (stride == 0) {
    const T value = to_accumulator<T>(source[0]);
    for (int64_t j = 0; j < count; ++j) buffer[j] = value;
  } else {
    for (int64_t j = 0; j < count; ++j) buffer[j] = to_accumulator<T>(source[j * stride]);
  }
  return buffer;
}

// Stores source * factor: the one rounding to the dtype of the result.
template <typename T>
inline void narrow(const T* source, T factor, int64_t count, float* result) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) result[j] = static_cast<float>(source[j] * factor);
}

template <typename T>
inline void narrow(const T* source, T factor, int64_t count, double* result) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) result[j] = source[j] * factor;
}

template <typename T>
inline void narrow(const T* source, T factor, int64_t count, BFloat16* result) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) {
    result[j].bits = float_to_bfloat16(static_cast<float>(source[j] * factor));
  }
}

template <typename T>
inline void narrow(const T* source, T factor, int64_t count, Half* result) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) {
    result[j].bits = float_to_half(static_cast<float>(source[j] * factor));
  }
}

#if defined(SMS_PLUGIN_HAS_F16C)

constexpr int kHalves = 8;  // that one instruction converts

inline const float* widen(const Half* source,  // [count]
                          int64_t count,
                          float* buffer) {  // [count]
  int64_t j = 0;
  for (; j + kHalves <= count; j += kHalves) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + j));
    _mm256_storeu_ps(buffer + j, _mm256_cvtph_ps(halves));
  }
  for (; j < count; ++j) buffer[j] = half_to_float(source[j].bits);
  return buffer;
}

inline void narrow(const float* source, float factor, int64_t count, Half* result) {
  int64_t j = 0;
  for (; j + kHalves <= count; j += kHalves) {
    const __m256 product = _mm256_mul_ps(_mm256_loadu_ps(source + j), _mm256_set1_ps(factor));
    const __m128i halves = _mm256_cvtps_ph(product, _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(result + j), halves);
  }
  for (; j < count; ++j) result[j].bits = float_to_half(source[j] * factor);
}

#endif  // SMS_PLUGIN_HAS_F16C

}  // namespace
}  // namespace sms_plugin
