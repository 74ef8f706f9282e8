// Exponentials of a row, measured from its maximum. No torch here.
//
// z of odd rows is taken at an eighth of its size: two finite dtype minima then never add up to
// -inf, so that only -inf itself removes a key. The division is exact; the factor comes back inside
// the exponential. In any other row a z that falls below the range of its type has a prob of 0
// either way.

#pragma once

#include "primitives.cuh"

namespace sms_plugin {

constexpr double kHeadroom = 8.0;
constexpr double kLog2E = 1.4426950408889634;

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

// 2^x. A result below 2^-126 is flushed to 0.
__device__ __forceinline__ float exp2_flushed(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// bfloat16 holds probs that float32 exponentials flush to 0: it gets them from 2^64 times as large
// ones. The added exponent costs up to 3e-6 of accuracy, much below its half unit in the last
// place.
template <typename T>
constexpr int kExtraExponent = std::is_same_v<T, __nv_bfloat16> ? 64 : 0;

// The larger of x and a bound. NaN stays.
__device__ __forceinline__ float bounded_below(float x, float bound) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(bound));
  return result;
}

// exp(x) * 2^kExtra for x <= 1, to the last unit or two: the exponent of 2 is split into its whole
// part and the rest, because in one float32 it would have the error of its size. A result below
// 2^-126 is 0.
template <int kExtra>
__device__ __forceinline__ float exp_split(float x) {
  constexpr int kBias = 127 + kExtra;
  constexpr auto kFloor = static_cast<float>(-kBias / kLog2E);  // the exponent field becomes 0
  constexpr float kRound = 0x1.8p23f + kBias;                   // adding it rounds to an integer
  constexpr auto kHigh = static_cast<float>(kLog2E);
  constexpr auto kLow = static_cast<float>(kLog2E - kHigh);
  const float bounded = bounded_below(x, kFloor);
  const float shifted = fmaf(bounded, kHigh, kRound);
  const float whole = shifted - kRound;
  const float rest = fmaf(bounded, kLow, fmaf(bounded, kHigh, -whole));
  return exp2_flushed(rest) * __int_as_float(__float_as_int(shifted) << 23);
}

// exp(8 x) * 2^kExtra for x <= 0.
template <int kExtra>
__device__ __forceinline__ float exp_of_eighth(float x) {
  return exp_split<kExtra>(x * static_cast<float>(kHeadroom));
}
// A call, not a copy at each use: its temporaries would push the row out of the registers.
template <int kExtra>
static __device__ __noinline__ double exp_of_eighth(double x) {
  static_assert(kExtra == 0);
  return exp(x * kHeadroom);
}

__device__ __forceinline__ float reciprocal(float x) { return __frcp_rn(x); }
__device__ __forceinline__ double reciprocal(double x) { return 1.0 / x; }

// What the exponentials are measured from: the row's maximum; 0 for a row that keeps nothing, so
// that all of it becomes exp(-inf); NaN for one that overflows or holds +inf. A NaN in the row
// passes through max unseen and reaches the sum.
template <typename Acc>
__device__ __forceinline__ Acc row_shift(Acc maximum) {
  if (maximum > Limits<Acc>::kMaxZ) return static_cast<Acc>(NAN);
  return maximum == negative_infinity(Acc{}) ? Acc{0} : maximum;
}

template <typename Acc>
__device__ __forceinline__ Acc row_factor(Acc sum) {
  return sum == Acc{0} ? Acc{0} : reciprocal(sum);
}

// Rows whose largest z is smaller than this, either side of 0, are regular: the rounding of its
// exponent is less than 1.
constexpr float kRegularZ = 0x1p23f;

// What z is multiplied by to be an exponent: of 2 for 16-bit dtypes, of e for others.
template <typename T>
constexpr double kExponentUnit = sizeof(T) == 2 ? kLog2E : 1.0;

// The exponentials of one row over a load functor.
//
// A regular row takes one multiply-add a value, value * factor + offset, and an exponential of it.
// offset is rounded, but the same for all of the row, so that its error cancels against the sum's;
// beyond kRegularZ it could take the sum out of range. float32 splits the exponent of 2, which has
// the error of its own size; for 16-bit dtypes that is far below half a unit in the last place.
// Odd rows, those and all in float64 and all with +inf, subtract the maximum first, from values in
// eighths.
template <typename Load>
struct RowExponential {
  using Acc = typename Load::Acc;
  static constexpr int kExtra = kExtraExponent<typename Load::Scalar>;

  float factor = 0;
  float offset = 0;
  bool is_regular = false;
  Acc shift = 0;  // of an odd row, in eighths

  // `maximum` is the largest value.
  __device__ __forceinline__ RowExponential(const Load& load, Acc maximum) {
    if constexpr (std::is_same_v<Acc, float>) {
      const bool is_empty = maximum == negative_infinity(Acc{});
      const float from = is_empty ? 0.0f : maximum;
      factor = load.exponent_factor();
      offset = fmaf(-from, factor, kExtra);
      // One comparison: what it takes more, the compiler would prepare for each test of the rare
      // case.
      is_regular = fabsf(load.z(Load::kMayOverflow ? maximum : from)) < load.regular_limit();
    }
  }

  // The exponential of what regular values are turned into.
  static __device__ __forceinline__ float of_exponent(float x) {
    if constexpr (sizeof(typename Load::Scalar) == 2) return exp2_flushed(x);
    return exp_split<kExtra>(x);
  }

  // The exponent at the maximum, which is 0 but for the rounding of `offset`.
  __device__ __forceinline__ float rounding(float maximum) const {
    return is_regular ? fmaf(maximum, factor, offset) - kExtra : 0.0f;
  }

  // What z of this row is to be multiplied by at load.
  __device__ __forceinline__ Acc unit() const {
    return is_regular ? Acc{1} : static_cast<Acc>(1 / kHeadroom);
  }

  // exp(z - max) * 2^kExtra of a value of a regular row.
  __device__ __forceinline__ Acc regular(Acc value) const {
    return of_exponent(fmaf(static_cast<float>(value), factor, offset));
  }

  // The same in any row, of a value in its unit.
  __device__ __forceinline__ Acc careful(const Load& load, Acc value) const {
    return is_regular ? regular(value) : exp_of_eighth<kExtra>(load.odd_z(value) - shift);
  }
};

}  // namespace sms_plugin
