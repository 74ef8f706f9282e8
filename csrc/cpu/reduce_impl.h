// Maximum and sum of a row in an order that depends on nothing but the logical column: column j
// belongs to lane j % 16 of block j / 128, whatever the width of the machine's vectors. Included
// once per instruction set, behind its target pragma.

#pragma once

#include <cstdint>

#include "arithmetic_impl.h"

namespace sms_plugin {
namespace {

constexpr int kLanes = 16;               // one AVX-512 vector of float32
constexpr int kBlock = 8 * kLanes;       // three additions deep in the accumulator's type
constexpr int64_t kStride = 8 * kBlock;  // columns handled at a time where no whole row is kept

constexpr int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

template <typename T>
inline T larger(T a, T b) {
  return a > b ? a : b;  // b if one is NaN: with the running maximum in b, NaN is passed over
}

// Largest value that isn't NaN; -inf if there is none.
template <typename T>
inline T row_max(const T* values,  // [padded], filled with -inf from the row's length on
                 int64_t padded) {
  T lanes[kLanes];
  for (int l = 0; l < kLanes; ++l) lanes[l] = -infinity<T>();
  int64_t c = 0;
  for (; c + kBlock <= padded; c += kBlock) {
    const T* block = values + c;
#pragma omp simd
    for (int l = 0; l < kLanes; ++l) {
      T best = lanes[l];
      for (int k = 0; k < 8; ++k) best = larger(block[k * kLanes + l], best);
      lanes[l] = best;
    }
  }
  for (; c < padded; c += kLanes) {
#pragma omp simd
    for (int l = 0; l < kLanes; ++l) lanes[l] = larger(values[c + l], lanes[l]);
  }
  T best = lanes[0];
  for (int l = 1; l < kLanes; ++l) best = larger(lanes[l], best);
  return best;
}

// Blocks are added up in the accumulator's type as a tree, their sums in float64 with a correction:
// the error doesn't grow with the length of the row.
template <typename T>
class RowSum {
 public:
  // Adds one block.
  void add_block(const T* block) {  // [kBlock]
#pragma omp simd
    for (int l = 0; l < kLanes; ++l) {
      const T* lane = block + l;
      const T low = (lane[0] + lane[kLanes]) + (lane[2 * kLanes] + lane[3 * kLanes]);
      const T high = (lane[4 * kLanes] + lane[5 * kLanes]) + (lane[6 * kLanes] + lane[7 * kLanes]);
      add(l, static_cast<double>(low + high));
    }
  }

  // Adds `count` columns, a multiple of kBlock but for the last call of a row.
  void add_columns(T* values,  // [round_up(count, kBlock)], zeros are filled in behind `count`
                   int64_t count) {
    const int64_t padded = round_up(count, kBlock);
    for (int64_t j = count; j < padded; ++j) values[j] = 0;
    for (int64_t c = 0; c < padded; c += kBlock) add_block(values + c);
  }

  double total() const {
    double sums[kLanes];
    for (int l = 0; l < kLanes; ++l) {
      const bool is_infinite = corrections_[l] != corrections_[l];  // inf - inf
      sums[l] = lanes_[l] + (is_infinite ? 0 : corrections_[l]);
    }
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int l = 0; l < width; ++l) sums[l] += sums[l + width];
    }
    return sums[0];
  }

 private:
  // Float32 sums are exact enough in float64; float64 ones keep what an addition loses (Knuth).
  void add(int lane, double value) {
    const double before = lanes_[lane];
    const double after = before + value;
    if constexpr (sizeof(T) == 8) {
      const double part = after - before;
      corrections_[lane] += (before - (after - part)) + (value - part);
    }
    lanes_[lane] = after;
  }

  double lanes_[kLanes] = {};
  double corrections_[kLanes] = {};  // unused for float32
};

}  // namespace
}  // namespace sms_plugin
