// Sixteen elements of memory to registers and back, unconverted: `n` of them at the end of a row,
// behind which nothing is touched. Registers are 0 from lane n on. Included once per instruction
// set, behind its target pragma.

#pragma once

#include "lanes_impl.h"

namespace sms_plugin {
namespace {

// As many 16-bit elements as a register holds float32 values.
typedef uint16_t Shorts __attribute__((vector_size(SMS_PLUGIN_VECTOR_BYTES / 2)));

struct ShortLanes {
  Shorts part[Lanes<float>::kParts];
};

#if SMS_PLUGIN_VECTOR_BYTES == 64

SMS_PLUGIN_INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }

SMS_PLUGIN_INLINE void read(const float* source,  // [n]
                            int n, Lanes<float>& lanes) {
  lanes.part[0] = _mm512_maskz_loadu_ps(first_lanes(n), source);
}

SMS_PLUGIN_INLINE void read(const double* source,  // [n]
                            int n, Lanes<double>& lanes) {
  const __mmask16 mask = first_lanes(n);
  lanes.part[0] = _mm512_maskz_loadu_pd(static_cast<__mmask8>(mask), source);
  lanes.part[1] = _mm512_maskz_loadu_pd(static_cast<__mmask8>(mask >> 8), source + 8);
}

SMS_PLUGIN_INLINE void read(const uint16_t* source,  // [n]
                            int n, ShortLanes& lanes) {
  lanes.part[0] = (Shorts)_mm256_maskz_loadu_epi16(first_lanes(n), source);
}

// `removed` where a byte of the mask isn't 0, else `values`.
SMS_PLUGIN_INLINE Lanes<float> replace_masked(const uint8_t* mask,  // [n]
                                              int n, float removed, Lanes<float> values) {
  const __m128i bytes = _mm_maskz_loadu_epi8(first_lanes(n), mask);
  const __mmask16 is_masked = _mm_test_epi8_mask(bytes, bytes);
  values.part[0] = _mm512_mask_mov_ps(values.part[0], is_masked, _mm512_set1_ps(removed));
  return values;
}

SMS_PLUGIN_INLINE Lanes<double> replace_masked(const uint8_t* mask,  // [n]
                                               int n, double removed, Lanes<double> values) {
  const __m128i bytes = _mm_maskz_loadu_epi8(first_lanes(n), mask);
  const __mmask16 is_masked = _mm_test_epi8_mask(bytes, bytes);
  const __m512d all_removed = _mm512_set1_pd(removed);
  values.part[0] =
      _mm512_mask_mov_pd(values.part[0], static_cast<__mmask8>(is_masked), all_removed);
  values.part[1] =
      _mm512_mask_mov_pd(values.part[1], static_cast<__mmask8>(is_masked >> 8), all_removed);
  return values;
}

SMS_PLUGIN_INLINE void write(const Lanes<float>& lanes, int n,
                             float* result) {  // [n]
  _mm512_mask_storeu_ps(result, first_lanes(n), lanes.part[0]);
}

SMS_PLUGIN_INLINE void write(const Lanes<double>& lanes, int n,
                             double* result) {  // [n]
  const __mmask16 mask = first_lanes(n);
  _mm512_mask_storeu_pd(result, static_cast<__mmask8>(mask), lanes.part[0]);
  _mm512_mask_storeu_pd(result + 8, static_cast<__mmask8>(mask >> 8), lanes.part[1]);
}

SMS_PLUGIN_INLINE void write(const ShortLanes& lanes, int n,
                             uint16_t* result) {  // [n]
  _mm256_mask_storeu_epi16(result, first_lanes(n), (__m256i)lanes.part[0]);
}

#else

// Registers can't be loaded in part everywhere: the end of a row takes a detour over the stack.
template <typename S, typename Registers>
SMS_PLUGIN_INLINE void read(const S* source,  // [n]
                            int n, Registers& lanes) {
  S staged[kLanes];
  if (n < kLanes) {
    std::memset(staged, 0, sizeof(staged));
    std::memcpy(staged, source, n * sizeof(S));
    source = staged;
  }
  constexpr int kParts = sizeof(lanes.part) / sizeof(lanes.part[0]);
  SMS_PLUGIN_UNROLL
  for (int p = 0; p < kParts; ++p) {
    std::memcpy(&lanes.part[p], source + p * (kLanes / kParts), sizeof(lanes.part[p]));
  }
}

template <typename S, typename Registers>
SMS_PLUGIN_INLINE void write(const Registers& lanes, int n,
                             S* result) {  // [n]
  S staged[kLanes];
  S* whole = n < kLanes ? staged : result;
  constexpr int kParts = sizeof(lanes.part) / sizeof(lanes.part[0]);
  SMS_PLUGIN_UNROLL
  for (int p = 0; p < kParts; ++p) {
    std::memcpy(whole + p * (kLanes / kParts), &lanes.part[p], sizeof(lanes.part[p]));
  }
  if (n < kLanes) std::memcpy(result, staged, n * sizeof(S));
}

// One register of zeros where a byte of the mask is 0, and of something else elsewhere.
template <typename T>
SMS_PLUGIN_INLINE typename Register<T>::Bits extend_bytes(const uint8_t* mask) {  // [kWidth]
  using Bits = typename Register<T>::Bits;
#if SMS_PLUGIN_VECTOR_BYTES == 32
  if constexpr (sizeof(T) == 4) {
    return (Bits)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(mask)));
  } else {
    int four;
    std::memcpy(&four, mask, sizeof(four));
    return (Bits)_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
  }
#else
  T each[Lanes<T>::kWidth];
  for (int l = 0; l < Lanes<T>::kWidth; ++l) each[l] = mask[l];
  Bits result;
  std::memcpy(&result, each, sizeof(result));
  return result;
#endif
}

// `removed` where a byte of the mask isn't 0, else `values`.
template <typename T>
SMS_PLUGIN_INLINE Lanes<T> replace_masked(const uint8_t* mask,  // [n]
                                          int n, T removed, Lanes<T> values) {
  uint8_t staged[kLanes];
  if (n < kLanes) {
    std::memset(staged, 0, sizeof(staged));
    std::memcpy(staged, mask, n);
    mask = staged;
  }
  SMS_PLUGIN_UNROLL
  for (int p = 0; p < Lanes<T>::kParts; ++p) {
    const auto is_masked = extend_bytes<T>(mask + p * Lanes<T>::kWidth) != 0;
    values.part[p] = is_masked ? splat_part(removed) : values.part[p];
  }
  return values;
}

#endif

// `removed` from lane n on.
template <typename T>
SMS_PLUGIN_INLINE Lanes<T> replace_behind(int n, T removed, Lanes<T> values) {
  static constexpr T kIndex[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Lanes<T> index;
  read(kIndex, kLanes, index);
  const auto pick = [=](Part<T> v, Part<T> i) SMS_PLUGIN_INLINE_LAMBDA {
    return i < splat_part(static_cast<T>(n)) ? v : splat_part(removed);
  };
  return map_parts(pick, values, index);
}

}  // namespace
}  // namespace sms_plugin
