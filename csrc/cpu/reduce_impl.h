// Sum of a row in an order that depends on nothing but the logical column: column j belongs to lane
// j % 16 of block j / 128, whatever the width of the registers. Included once per instruction set,
// behind its target pragma.

#pragma once

#include <cstdint>

#include "lanes_impl.h"

namespace sms_plugin {
namespace {

constexpr int kGroups = 8;  // of sixteen columns in a block: a tree of three additions
constexpr int64_t kBlock = kGroups * kLanes;

constexpr int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Sum of group(first), ..., group(first + kCount - 1), as a tree.
template <int kCount, typename Group>
SMS_PLUGIN_INLINE auto sum_tree(const Group& group, int first) {
  if constexpr (kCount == 1) {
    return group(first);
  } else {
    return sum_tree<kCount / 2>(group, first) + sum_tree<kCount / 2>(group, first + kCount / 2);
  }
}

// An infinite sum has no correction: inf - inf is NaN.
SMS_PLUGIN_INLINE Part<double> where_number_part(Part<double> corrections) {
  return corrections == corrections ? corrections : Part<double>{};
}

// Sums of blocks, in float64: the error doesn't grow with the length of the row.
template <typename T>
class BlockSums {
 public:
  // Written out, because an implicit constructor would miss the target of the instruction set.
  SMS_PLUGIN_INLINE BlockSums() : sums_(splat(0.0)), corrections_(splat(0.0)) {}

  SMS_PLUGIN_INLINE void add(const Lanes<T>& block) {
    const Lanes<double> value = to_double(block);
    const Lanes<double> before = sums_;
    sums_ = before + value;
    if constexpr (kCorrects) {  // what the addition lost (Knuth's two-sum)
      const Lanes<double> part = sums_ - before;
      corrections_ = corrections_ + ((before - (sums_ - part)) + (value - part));
    }
  }

  SMS_PLUGIN_INLINE double total() const {
    Lanes<double> sums = sums_;
    if constexpr (kCorrects) {
      sums = sums + map_parts(where_number_part, corrections_);
    }
    return combine_lanes(sums, Sum());
  }

 private:
  // Sums of float32 are exact enough in float64.
  static constexpr bool kCorrects = sizeof(T) == 8;

  Lanes<double> sums_;
  Lanes<double> corrections_;
};

// Sum over the columns [0, count) of column_group(first, n): `n` columns from `first` on, other
// lanes 0.
template <typename T, typename ColumnGroup>
SMS_PLUGIN_INLINE double sum_columns(int64_t count, const ColumnGroup& column_group) {
  BlockSums<T> sums;
  int64_t c = 0;
  for (; c + kBlock <= count; c += kBlock) {
    const auto group = [&](int k) SMS_PLUGIN_INLINE_LAMBDA {
      return column_group(c + k * kLanes, kLanes);
    };
    sums.add(sum_tree<kGroups>(group, 0));
  }
  if (c < count) {
    // Groups that aren't there would add 0: only as much of the tree as needed is computed.
    Lanes<T> groups[kGroups];
    int k = 0;
    for (; c + kLanes <= count; c += kLanes) groups[k++] = column_group(c, kLanes);
    if (c < count) groups[k++] = column_group(c, static_cast<int>(count - c));
    for (int i = k; i & (i - 1); ++i) groups[i] = splat(static_cast<T>(0));
    const auto group = [&](int i) SMS_PLUGIN_INLINE_LAMBDA { return groups[i]; };
    if (k > 4) {
      sums.add(sum_tree<8>(group, 0));
    } else if (k > 2) {
      sums.add(sum_tree<4>(group, 0));
    } else if (k > 1) {
      sums.add(sum_tree<2>(group, 0));
    } else {
      sums.add(groups[0]);
    }
  }
  return sums.total();
}

// Calls body(first, n) for groups of sixteen columns that cover [0, count); n is less in the last.
template <typename Body>
SMS_PLUGIN_INLINE void for_each_group(int64_t count, const Body& body) {
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) body(j, kLanes);
  if (j < count) body(j, static_cast<int>(count - j));
}

}  // namespace
}  // namespace sms_plugin
