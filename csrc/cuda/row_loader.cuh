// Brings the vectors of a row that a thread holds into registers, over any load functor.

#pragma once

#include "row_reader.cuh"

namespace sms_plugin {

// The kVectors vectors of a thread, `stripe` columns apart; columns from `end` on are removed, and
// `visible` is where that is in the row. No branch stands between the loads and their use: the
// compiler sends all of a batch before it waits for the first.
template <bool kIsPlain, int kVectors, typename Load>
__device__ __forceinline__ void load_row(const Load& load,
                                         const typename Load::template Row<kIsPlain>& row,
                                         int stripe, int visible, int end,
                                         typename Load::Held (&held)[kVectors]) {
  using Raw = typename Load::template Raw<kIsPlain>;
  // Registers for what is on its way are scarce where a vector takes more than two loads.
  constexpr int kMost = sizeof(Raw) > 2 * kVectorBytes ? 2 : kIsPlain ? kVectors : 4;
  constexpr int kBatch = kVectors < kMost ? kVectors : kMost;
  if (kIsPlain || row.is_inner()) {
#pragma unroll
    for (int base = 0; base < kVectors; base += kBatch) {
      Raw raw[kBatch];
#pragma unroll
      for (int v = 0; v < kBatch && base + v < kVectors; ++v) {
        raw[v] = load.template nothing<kIsPlain>();
        const int first = (base + v) * stripe;
        if (first < end) raw[v] = load.template fetch<kIsPlain>(row, first);
      }
#pragma unroll
      for (int v = 0; v < kBatch && base + v < kVectors; ++v) {
        held[base + v] = load.template finish<kIsPlain>(row, raw[v], (base + v) * stripe, end);
      }
    }
  } else if constexpr (!kIsPlain) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int first = v * stripe;
      const auto raw = first < end ? load.gather(row, first, end) : load.template nothing<false>();
      held[v] = load.template finish<false>(row, raw, first, end);
    }
  }
  if (visible % Load::N != 0) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int left = end - v * stripe;
      if (left > 0 && left < Load::N) load.cut(held[v], left);
    }
  }
}

// One vector, for rows that are walked; z in `unit`. `first` < `end`.
template <bool kIsPlain, typename Load, typename... Unit>
__device__ __forceinline__ typename Load::Held load_vector(
    const Load& load, const typename Load::template Row<kIsPlain>& row, int64_t first, int64_t end,
    Unit... unit) {
  typename Load::template Raw<kIsPlain> raw;
  if constexpr (kIsPlain) {
    raw = load.template fetch<true>(row, first);
  } else {
    raw = row.is_inner() ? load.template fetch<false>(row, first) : load.gather(row, first, end);
  }
  auto held = load.template finish<kIsPlain>(row, raw, first, end, unit...);
  if (end - first < Load::N) load.cut(held, static_cast<int>(end - first));
  return held;
}

}  // namespace sms_plugin
