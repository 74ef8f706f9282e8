// Which columns a thread holds, and how they are reached.
//
// A thread holds vectors of N columns. Where rows are whole vectors (lengths that are a multiple of
// N), those are neighbours: one load, wherever the row starts. Rows of any other length start at
// every distance from a boundary, and so do their results. There, the lanes of a warp take columns
// in turn instead: each value is loaded and kept alone, neighbours by neighbouring lanes, and no
// value depends on where its row starts.

#pragma once

#include "primitives.cuh"

namespace sms_plugin {

enum class Access {
  kWhole,    // rows are whole vectors, and all operands lie on boundaries
  kShifted,  // operands start anywhere; where the results do too, rows are whole vectors
  kSpread,   // rows of any other length
};

// What is known of the columns of a thread. They count from its first (`start`): those of its
// vectors are then constants, and one address serves for all.
template <Access kAccess_, int kStep_>
struct ColumnsOf {
  static constexpr Access kAccess = kAccess_;
  static constexpr bool kIsWhole = kAccess == Access::kWhole;
  static constexpr bool kIsShifted = kAccess == Access::kShifted;
  static constexpr bool kIsSpread = kAccess == Access::kSpread;
  static constexpr int kStep = kStep_;  // from a column of a vector to the next

  // The first column of the `lane`-th of those that share a row, vectors of N columns.
  template <int N, typename Index>
  static __device__ __forceinline__ Index start(Index lane) {
    return lane / kStep * (kStep * N) + lane % kStep;
  }
  // The first column of its warp.
  template <int kLanes, int N>
  static __device__ __forceinline__ int segment(int lane) {
    return kLanes <= kWarpSize ? 0 : lane / kWarpSize * (kWarpSize * N);
  }
};

// Of rows that kLanes neighbouring threads share. A warp keeps to a segment of neighbouring
// columns: nothing that it does to it needs others.
template <Access kAccess, int kLanes>
using RowColumns = ColumnsOf<kAccess, kAccess != Access::kSpread ? 1
                                      : kLanes < kWarpSize       ? kLanes
                                                                 : kWarpSize>;
using ShiftedColumns = ColumnsOf<Access::kShifted, 1>;

}  // namespace sms_plugin
