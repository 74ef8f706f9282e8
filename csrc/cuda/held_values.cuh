// Vectors of columns as a float32 for each value (float64 for those): what load functors have in
// common that keep them so, and those of odd rows without terms.

#pragma once

#include "loads.cuh"

namespace sms_plugin {

// What functors hold that don't keep a vector packed.
template <typename Acc, int N>
struct HeldValues {
  Acc z[N];

  // Columns from `left` on become removed.
  __device__ __forceinline__ void cut(int left) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (k >= left) z[k] = negative_infinity(Acc{});
    }
  }

  __device__ __forceinline__ Acc largest() const {
    Acc largest = negative_infinity(Acc{});
#pragma unroll
    for (int k = 0; k < N; ++k) largest = larger(largest, z[k]);
    return largest;
  }
};

// z of a vector of columns, in its unit: what functors with a term keep, and how they give it.
template <typename T>
struct HeldZ {
  using Scalar = T;
  using Acc = Accumulator<T>;
  static constexpr int N = kVectorSize<T>;
  static constexpr Table kTable = sizeof(T) == 8 ? Table::kDouble : Table::kWide;
  static constexpr int kOperands = 3;  // of the layout
  static constexpr bool kMayOverflow = true;
  static constexpr bool kHoldsWeights = sizeof(T) < 8;  // float64 has no regular rows
  using Held = HeldValues<Acc, N>;

  static __device__ __forceinline__ void cut(Held& held, int left) { held.cut(left); }

  __device__ __forceinline__ Acc value(const Held& held, int k) const { return held.z[k]; }

  __device__ __forceinline__ Acc largest(const Held& held) const { return held.largest(); }

  __device__ __forceinline__ Acc z(Acc value) const { return value; }
  __device__ __forceinline__ Acc odd_z(Acc value) const { return value; }
  __device__ __forceinline__ float exponent_factor() const {
    return static_cast<float>(kExponentUnit<T>);
  }
  __device__ __forceinline__ float regular_limit() const { return kRegularZ; }

  static __device__ __forceinline__ void between_passes(Held&) {}
};

// A functor that holds z, in eighths in every row: what rows that are cut into parts hold, where a
// part doesn't know whether another one is odd. Powers of 2 change no bit.
template <typename Load>
struct InEighths : Load {
  using Acc = typename Load::Acc;
  static constexpr bool kMayOverflow = false;
  static constexpr bool kHoldsWeights = false;

  explicit InEighths(const Load& load) : Load(load) {}

  template <typename Columns, typename Index>
  __device__ __forceinline__ typename Load::Held finish(
      const typename Load::template Row<Columns>& row,
      const typename Load::template Raw<Columns>& raw, Index first, Index end) const {
    return Load::template finish<Columns>(row, raw, first, end, static_cast<Acc>(1 / kHeadroom));
  }

  __device__ __forceinline__ Acc z(Acc value) const { return value * static_cast<Acc>(kHeadroom); }
  __device__ __forceinline__ float exponent_factor() const {
    return static_cast<float>(kHeadroom) * Load::exponent_factor();
  }
};

// Scores without added terms whose columns are spread: they arrive value by value, and packing them
// would cost more than the registers do.
template <typename T, bool kHasMask>
struct SpreadScores : std::conditional_t<kHasMask, SelectedScores<T>, PlainScores<T>> {
  using Base = std::conditional_t<kHasMask, SelectedScores<T>, PlainScores<T>>;
  using Acc = float;
  static constexpr int N = Base::N;
  static constexpr Table kTable = Table::kSpread;
  static constexpr bool kHoldsWeights = true;
  using Held = HeldValues<Acc, N>;

  explicit SpreadScores(const Base& packed) : Base(packed) {}

  template <typename Columns, typename Index>
  __device__ __forceinline__ Held finish(const typename Base::template Row<Columns>&,
                                         const typename Base::template Raw<Columns>& raw, Index,
                                         Index, Acc = 1) const {
    Held held;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if constexpr (kHasMask) {
        held.z[k] =
            raw.mask.values[k] ? negative_infinity(Acc{}) : raw.scores.template value<Acc>(k);
      } else {
        held.z[k] = raw.template value<Acc>(k);
      }
    }
    return held;
  }

  __device__ __forceinline__ Acc value(const Held& held, int k) const { return held.z[k]; }
  __device__ __forceinline__ Acc largest(const Held& held) const { return held.largest(); }
  static __device__ __forceinline__ void between_passes(Held&) {}
};

// How a functor is called for spread columns.
template <typename Load>
struct SpreadForm {
  using type = Load;
};
template <typename T>
struct SpreadForm<PlainScores<T>> {
  using type = std::conditional_t<sizeof(T) == 8, PlainScores<T>, SpreadScores<T, false>>;
};
template <typename T>
struct SpreadForm<SelectedScores<T>> {
  using type = std::conditional_t<sizeof(T) == 8, SelectedScores<T>, SpreadScores<T, true>>;
};

}  // namespace sms_plugin
