// A vector of columns as a float32 for each value (float64 for those).

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

  static __device__ __forceinline__ void cut(Held& held, int left) { held.cut(left); }
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
