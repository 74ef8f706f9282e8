// Brings the vectors of a row that a thread holds into registers, over any load functor.

#pragma once

#include "row_reader.cuh"
#include "spread_reader.cuh"

namespace sms_plugin {

// The kVectors vectors of a thread, `stripe` columns apart; columns from `end` on are removed, and
// `visible` is where that is in the row. No branch stands between the loads and their use: the
// compiler sends all of a batch before it waits for the first. `seen` is where the visible columns
// end from the first of the warp's segment on, or more.
template <typename Columns, int kVectors, typename Load>
__device__ __forceinline__ void load_row(const Load& load,
                                         const typename Load::template Row<Columns>& row,
                                         int stripe, int visible, int seen, int end,
                                         typename Load::Held (&held)[kVectors]) {
  using Raw = typename Load::template Raw<Columns>;
  // Registers for what is on its way are scarce where a vector takes more than two loads.
  constexpr int kMost = sizeof(Raw) > 2 * kVectorBytes ? 2 : Columns::kIsWhole ? kVectors : 4;
  constexpr int kBatch = kVectors < kMost ? kVectors : kMost;
  if (row.is_inner()) {
#pragma unroll
    for (int base = 0; base < kVectors; base += kBatch) {
      Raw raw[kBatch];
#pragma unroll
      for (int v = 0; v < kBatch && base + v < kVectors; ++v) {
        raw[v] = load.template nothing<Columns>();
        const int first = (base + v) * stripe;
        // Spread columns are tested one by one: a branch that spares full vectors the tests costs
        // more than it saves. One around a last vector, empty in most warps, doesn't.
        const bool is_last = kVectors > 2 && base + v == kVectors - 1;
        if (Columns::kIsSpread ? !is_last || first < seen : first < end) {
          load.template fetch<Columns>(row, first, end, raw[v]);
        }
      }
#pragma unroll
      for (int v = 0; v < kBatch && base + v < kVectors; ++v) {
        held[base + v] = load.template finish<Columns>(row, raw[v], (base + v) * stripe, end);
      }
    }
  } else if constexpr (Columns::kIsShifted) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int first = v * stripe;
      const auto raw =
          first < end ? load.gather(row, first, end) : load.template nothing<Columns>();
      held[v] = load.template finish<Columns>(row, raw, first, end);
    }
  }
  if constexpr (!Columns::kIsSpread) {
    if (visible % Load::N == 0) return;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int left = end - v * stripe;
      if (left > 0 && left < Load::N) load.cut(held[v], left);
    }
  }
}

// One vector, for rows that are walked; z in `unit`. `first` < `end`.
template <typename Columns, typename Load, typename... Unit>
__device__ __forceinline__ typename Load::Held load_vector(
    const Load& load, const typename Load::template Row<Columns>& row, int64_t first, int64_t end,
    Unit... unit) {
  auto raw = load.template nothing<Columns>();
  if (row.is_inner()) {
    load.template fetch<Columns>(row, first, end, raw);
  } else if constexpr (Columns::kIsShifted) {
    raw = load.gather(row, first, end);
  }
  auto held = load.template finish<Columns>(row, raw, first, end, unit...);
  if constexpr (!Columns::kIsSpread) {
    if (end - first < Load::N) load.cut(held, static_cast<int>(end - first));
  }
  return held;
}

}  // namespace sms_plugin
