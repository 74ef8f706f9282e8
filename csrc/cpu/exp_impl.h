// The exponential of the row kernels. Included once per instruction set, behind its target pragma.

#pragma once

#include "lanes_impl.h"

namespace sms_plugin {
namespace {

// z is kept at an eighth of its size, so that the sum of two finite dtype minima stays finite: only
// an infinite operand removes a position. Powers of two cost no precision.
constexpr double kEighth = 0.125;

template <typename T>
struct ExpTraits;

template <>
struct ExpTraits<float> {
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
struct ExpTraits<double> {
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

// e^(8 d) * 2^kHeadroom for d <= 0. The factor cancels in probs, and makes room below: a subnormal
// probability is as exact as its format allows. What is too small even for that is exactly 0; NaN
// stays NaN.
template <typename T>
SMS_PLUGIN_INLINE Part<T> exp_part_of_eighths(Part<T> d) {
  using C = ExpTraits<T>;
  constexpr int kBias = C::kExponentBias + C::kHeadroom;
  // At the floor the exponent field of 2^n below is 0: a product with a true zero, no compare.
  constexpr T kFloor = static_cast<T>(-kBias * 0.6931471805599453 * kEighth);
  constexpr T kPerLn2 = static_cast<T>(8 * 1.4426950408889634);
  d = Larger()(splat_part(kFloor), d);
  const Part<T> round = splat_part(static_cast<T>(C::kRound + kBias));
  const Part<T> shifted = mul_add_part<T>(d, splat_part(kPerLn2), round);
  const Part<T> n = shifted - round;
  Part<T> r = mul_add_part<T>(n, splat_part(static_cast<T>(-C::kLn2High * kEighth)), d);
  r = mul_add_part<T>(n, splat_part(static_cast<T>(-C::kLn2Low * kEighth)), r);
  const Part<T> x = r * 8;
  Part<T> sum = splat_part(C::kCoefficients[C::kTerms - 1]);
  for (int k = C::kTerms - 2; k >= 0; --k) {
    sum = mul_add_part<T>(sum, x, splat_part(C::kCoefficients[k]));
  }
  const Part<T> result = mul_add_part<T>(sum, x * x, x) + 1;
  // The low bits of `shifted` hold n + kBias; the shift drops all others.
  return result * (Part<T>)((typename Register<T>::Bits)shifted << C::kMantissaBits);
}

template <typename T>
SMS_PLUGIN_INLINE Lanes<T> exp_of_eighths(const Lanes<T>& d) {
  return map_parts(exp_part_of_eighths<T>, d);
}

}  // namespace
}  // namespace sms_plugin
