// Conversions at load and at store: every dtype to the accumulator's type and back. Included once
// per instruction set, behind its target pragma.

#pragma once

#include "memory_impl.h"

namespace sms_plugin {
namespace {

// The 16-bit formats, as they lie in memory.
struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

using Bits = Register<float>::Bits;

SMS_PLUGIN_INLINE Bits splat_bits(uint32_t value) { return value + Bits{}; }

#if SMS_PLUGIN_VECTOR_BYTES > 16

#if SMS_PLUGIN_VECTOR_BYTES == 64
SMS_PLUGIN_INLINE Bits extend(Shorts values) {
  return (Bits)_mm512_cvtepu16_epi32((__m256i)values);
}

SMS_PLUGIN_INLINE Part<float> halves_to_floats(Shorts halves) {
  return _mm512_cvtph_ps((__m256i)halves);
}

SMS_PLUGIN_INLINE Shorts floats_to_halves(Part<float> values) {
  return (Shorts)_mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT);
}
#else
SMS_PLUGIN_INLINE Bits extend(Shorts values) {
  return (Bits)_mm256_cvtepu16_epi32((__m128i)values);
}

SMS_PLUGIN_INLINE Part<float> halves_to_floats(Shorts halves) {
  return _mm256_cvtph_ps((__m128i)halves);
}

SMS_PLUGIN_INLINE Shorts floats_to_halves(Part<float> values) {
  return (Shorts)_mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT);
}
#endif

#else

SMS_PLUGIN_INLINE Bits extend(Shorts values) { return __builtin_convertvector(values, Bits); }

// For values below 2^31, which compare as signed numbers too: SSE2 has no unsigned comparison.
SMS_PLUGIN_INLINE auto is_less(Bits values, uint32_t limit) {
  typedef int32_t Signed __attribute__((vector_size(SMS_PLUGIN_VECTOR_BYTES)));
  return (Signed)values < (Signed)splat_bits(limit);
}

SMS_PLUGIN_INLINE Part<float> halves_to_floats(Shorts halves) {
  const Bits half = extend(halves);
  const Bits magnitude = (half & 0x7fffu) << 13;
  constexpr uint32_t kRebias = (127u - 15u) << 23;
  constexpr uint32_t kInfinity = 0x7c00u << 13;
  // Infinity and NaN keep the largest exponent.
  Bits bits = magnitude + kRebias + (is_less(magnitude, kInfinity) ? Bits{} : splat_bits(kRebias));
  // A subnormal is a multiple of 2^-24: the subtraction normalises it, whatever the denormal mode.
  const Bits smallest_normal = splat_bits(113u << 23);
  const Part<float> subnormal =
      (Part<float>)(magnitude + smallest_normal) - (Part<float>)smallest_normal;
  bits = is_less(magnitude, 1u << 23) ? (Bits)subnormal : bits;
  return (Part<float>)(bits | (half & 0x8000u) << 16);
}

// Round to nearest even; NaN stays NaN.
SMS_PLUGIN_INLINE Shorts floats_to_halves(Part<float> values) {
  const Bits bits = (Bits)values;
  const Bits magnitude = bits & 0x7fffffffu;
  constexpr uint32_t kRebias = (127u - 15u) << 23;
  Bits half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - kRebias) >> 13;
  half = is_less(magnitude, 0x47800000u) ? half : splat_bits(0x7c00u);  // 2^16 and above
  half = is_less(magnitude, 0x7f800001u) ? half : splat_bits(0x7e00u);
  // Below 2^-14: a unit in the last place of 0.5 is 2^-24, so the addition rounds.
  const Part<float> subnormal = (Part<float>)magnitude + 0.5f;
  half = is_less(magnitude, 0x38800000u) ? (Bits)subnormal - 0x3f000000u : half;
  return __builtin_convertvector(half | (bits >> 16 & 0x8000u), Shorts);
}

#endif

// Round to nearest even; NaN stays NaN.
SMS_PLUGIN_INLINE Shorts floats_to_bfloat16s(Part<float> values) {
  const Bits bits = (Bits)values;
  Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  rounded = values != values ? bits >> 16 | 0x40u : rounded;
  return __builtin_convertvector(rounded, Shorts);
}

// Where one type has no vector instruction worth writing out, element by element.
template <typename To, typename From>
SMS_PLUGIN_INLINE Lanes<To> convert_each(const From* values) {  // [kLanes]
  To converted[kLanes];
  for (int l = 0; l < kLanes; ++l) converted[l] = static_cast<To>(values[l]);
  Lanes<To> result;
  read(converted, kLanes, result);
  return result;
}

SMS_PLUGIN_INLINE Lanes<float> to_float(const Lanes<float>& values) { return values; }

SMS_PLUGIN_INLINE Lanes<float> to_float(const Lanes<double>& values) {
  double each[kLanes];
  write(values, kLanes, each);
  return convert_each<float>(each);
}

// What a float32 or float64 register holds exactly.
SMS_PLUGIN_INLINE void load_exactly(const float* source,  // [n]
                                    int n, Lanes<float>& result) {
  read(source, n, result);
}

SMS_PLUGIN_INLINE void load_exactly(const double* source,  // [n]
                                    int n, Lanes<double>& result) {
  read(source, n, result);
}

SMS_PLUGIN_INLINE void load_exactly(const Half* source,  // [n]
                                    int n, Lanes<float>& result) {
  ShortLanes halves;
  read(reinterpret_cast<const uint16_t*>(source), n, halves);
  SMS_PLUGIN_UNROLL
  for (int p = 0; p < Lanes<float>::kParts; ++p) result.part[p] = halves_to_floats(halves.part[p]);
}

SMS_PLUGIN_INLINE void load_exactly(const BFloat16* source,  // [n]
                                    int n, Lanes<float>& result) {
  ShortLanes shorts;
  read(reinterpret_cast<const uint16_t*>(source), n, shorts);
  SMS_PLUGIN_UNROLL
  for (int p = 0; p < Lanes<float>::kParts; ++p) {
    result.part[p] = (Part<float>)(extend(shorts.part[p]) << 16);
  }
}

// A finite float64 below float32's range is clamped: only an infinite one removes a position.
SMS_PLUGIN_INLINE Part<double> clamp_part(Part<double> values) {
  const Part<double> lowest = splat_part<double>(-FLT_MAX);
  const auto is_below = (values < lowest) & (values > splat_part(-infinity<double>()));
  return is_below ? lowest : values;
}

// `n` elements in the accumulator's type; lanes behind them are 0.
template <typename T, typename S>
SMS_PLUGIN_INLINE Lanes<T> load(const S* source,  // [n]
                                int n) {
  Lanes<T> result;
  if constexpr (sizeof(T) == 4 && sizeof(S) == 8) {
    Lanes<double> wide;
    read(source, n, wide);
    result = to_float(map_parts(clamp_part, wide));
  } else if constexpr (sizeof(T) == 8 && sizeof(S) < 8) {
    Lanes<float> narrow;
    load_exactly(source, n, narrow);
    result = to_double(narrow);
  } else {
    load_exactly(source, n, result);
  }
  return result;
}

// Stores the first `n` lanes: the one rounding to the dtype of the result.
template <typename T>
SMS_PLUGIN_INLINE void store(const Lanes<T>& values, int n,
                             float* result) {  // [n]
  write(to_float(values), n, result);
}

template <typename T>
SMS_PLUGIN_INLINE void store(const Lanes<T>& values, int n,
                             double* result) {  // [n]
  write(to_double(values), n, result);
}

template <typename T>
SMS_PLUGIN_INLINE void store(const Lanes<T>& values, int n,
                             Half* result) {  // [n]
  const Lanes<float> floats = to_float(values);
  ShortLanes halves;
  SMS_PLUGIN_UNROLL
  for (int p = 0; p < Lanes<float>::kParts; ++p) halves.part[p] = floats_to_halves(floats.part[p]);
  write(halves, n, reinterpret_cast<uint16_t*>(result));
}

template <typename T>
SMS_PLUGIN_INLINE void store(const Lanes<T>& values, int n,
                             BFloat16* result) {  // [n]
  const Lanes<float> floats = to_float(values);
  ShortLanes shorts;
  SMS_PLUGIN_UNROLL
  for (int p = 0; p < Lanes<float>::kParts; ++p) {
    shorts.part[p] = floats_to_bfloat16s(floats.part[p]);
  }
  write(shorts, n, reinterpret_cast<uint16_t*>(result));
}

}  // namespace
}  // namespace sms_plugin
