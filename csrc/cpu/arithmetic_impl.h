// Constants and scalar arithmetic of the row kernels. Included once per instruction set, behind its
// target pragma, and written so that a compiler turns loops over it into vectors.

#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>

namespace sms_plugin {
namespace {

// z is kept at an eighth of its size, so that the sum of two finite dtype minima stays finite: only
// an infinite operand removes a position. Powers of two cost no precision.
constexpr double kEighth = 0.125;

template <typename To, typename From>
inline To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast changes no size");
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

// a * b + c, rounded once where the instruction set can. Written out wherever the compiler would
// have a choice, so that the head, the body and the tail of a loop agree to the last bit.
template <typename T>
inline T mul_add(T a, T b, T c) {
#if defined(SMS_PLUGIN_HAS_FMA)
  if constexpr (sizeof(T) == 4) {
    return __builtin_fmaf(a, b, c);
  } else {
    return __builtin_fma(a, b, c);
  }
#else
  return a * b + c;
#endif
}

template <typename T>
struct Traits;

template <>
struct Traits<float> {
  using Bits = uint32_t;
  static constexpr float kLowest = -FLT_MAX;
  static constexpr float kMaxEighths = FLT_MAX / 8;  // a larger z is infinite in float32
  static constexpr int kMantissaBits = 23;
  static constexpr int kExponentBias = 127;
  static constexpr int kHeadroom = 24;          // exponents of subnormal numbers, and one more
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  // ln 2 in two pieces; the product of the first one with an exponent is exact.
  static constexpr float kLn2High = 0.693359375f;
  static constexpr float kLn2Low = -2.12194440e-4f;
  // e^x = 1 + x + x^2 (c[0] + c[1] x + ...) for |x| <= ln(2) / 2, relative error 2^-28.
  static constexpr int kTerms = 5;
  static constexpr float kCoefficients[kTerms] = {0.49999993432f, 0.16666520399f, 0.041668390784f,
                                                  0.0083687451089f, 0.001381454017680f};
};

template <>
struct Traits<double> {
  using Bits = uint64_t;
  static constexpr double kLowest = -DBL_MAX;
  static constexpr double kMaxEighths = DBL_MAX / 8;
  static constexpr int kMantissaBits = 52;
  static constexpr int kExponentBias = 1023;
  static constexpr int kHeadroom = 53;
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLn2High = 6.93147180369123816490e-01;
  static constexpr double kLn2Low = 1.90821492927058770002e-10;
  // Relative error 2^-55.
  static constexpr int kTerms = 10;
  static constexpr double kCoefficients[kTerms] = {
      5.00000000000000111e-01, 1.66666666666666685e-01, 4.16666666666239902e-02,
      8.33333333333005112e-03, 1.38888889172817938e-03, 1.98412698631059685e-04,
      2.48015211902177286e-05, 2.75572683786841924e-06, 2.76201387197339936e-07,
      2.51004241570050668e-08};
};

template <typename T>
constexpr T infinity() {
  return static_cast<T>(__builtin_inf());
}

// c[k] + c[k + 1] x + ...: a recursion, because a loop inside a loop keeps the outer one scalar.
template <typename T, int k = 0>
inline T polynomial(T x) {
  using C = Traits<T>;
  if constexpr (k == C::kTerms - 1) {
    return C::kCoefficients[k];
  } else {
    return mul_add(polynomial<T, k + 1>(x), x, C::kCoefficients[k]);
  }
}

// e^(8 d) * 2^kHeadroom for d <= 0. The factor cancels in probs, and makes room below: a subnormal
// probability is as exact as its format allows. What is too small even for that is exactly 0; NaN
// stays NaN.
template <typename T>
inline T exp_of_eighths(T d) {
  using C = Traits<T>;
  constexpr int kBias = C::kExponentBias + C::kHeadroom;
  // At the floor the exponent field of 2^n below is 0: a product with a true zero, no compare.
  constexpr T kFloor = static_cast<T>(-kBias * 0.6931471805599453 * kEighth);
  constexpr T kPerLn2 = static_cast<T>(8 * 1.4426950408889634);
  d = kFloor > d ? kFloor : d;  // keeps NaN
  const T shifted = mul_add(d, kPerLn2, C::kRound + kBias);
  const T n = shifted - (C::kRound + kBias);
  T r = mul_add(n, static_cast<T>(-C::kLn2High * kEighth), d);
  r = mul_add(n, static_cast<T>(-C::kLn2Low * kEighth), r);
  const T x = r * 8;
  const T result = mul_add(polynomial(x), x * x, x) + 1;
  // The low bits of `shifted` hold n + kBias; the shift drops all others.
  const auto bits = bit_cast<typename C::Bits>(shifted) << C::kMantissaBits;
  return result * bit_cast<T>(bits);
}

}  // namespace
}  // namespace sms_plugin
