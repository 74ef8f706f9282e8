// In which order the rows of a call are worked on: rows that share a row of a mask or bias side by
// side, so that it comes from memory once.

#pragma once

#include <algorithm>
#include <cstdint>

#include "../row_layout.h"

namespace sms_plugin {

// What is read and written between two uses of a shared row stays in the L2 up to this size.
constexpr int64_t kSharedBytes = int64_t{8} << 20;

// Runs of rows that stay side by side are at least this long: shorter ones cost more than is saved.
constexpr int64_t kMinRunBytes = 512;
constexpr int64_t kMaxRunBytes = int64_t{1} << 20;

// The largest divisor of `size` whose rows make a run of at most kMaxRunBytes.
inline int64_t run_length(int64_t size, int64_t row_bytes) {
  for (int64_t run = std::min(size, kMaxRunBytes / row_bytes); run > 1; --run) {
    if (size % run == 0) return run;
  }
  return 1;
}

// Appends dimension d of `from`, or the part of it that has `size` entries `step` apart.
inline void append_dim(RowLayout& to, const RowLayout& from, int d, int64_t size, int64_t step) {
  to.sizes[to.dims] = size;
  to.row_strides[to.dims] = from.row_strides[d] * step;
  to.query_strides[to.dims] = from.query_strides[d] * step;
  for (int k = 0; k < kMaxOperands; ++k) {
    to.strides[k][to.dims] = from.strides[k][d] * step;
  }
  ++to.dims;
}

// Moves the dimensions over which `operand` is broadcast inwards, up to a run of rows of the
// innermost one, if rows of `operand` would come from memory more than once otherwise. Results
// don't depend on the order.
inline void share_rows(RowLayout& layout, int operand, int64_t value_bytes) {
  const int64_t row_bytes = layout.cols * value_bytes;
  int64_t inner_rows = 1;
  bool is_worth_it = false;
  for (int d = 0; d < layout.dims; ++d) {
    const bool is_shared = layout.strides[operand][d] == 0 && layout.sizes[d] > 1;
    // Below a shared dimension lie all rows that come before the next use.
    is_worth_it = is_worth_it || (is_shared && 2 * inner_rows * row_bytes > kSharedBytes);
    inner_rows *= layout.sizes[d];
  }
  if (!is_worth_it || layout.dims + 1 > kMaxRowDims || layout.strides[operand][0] == 0) return;
  const int64_t run = run_length(layout.sizes[0], row_bytes);
  if (run * row_bytes < kMinRunBytes) return;

  RowLayout ordered = layout;
  ordered.dims = 0;
  if (run > 1) append_dim(ordered, layout, 0, run, 1);
  for (int d = 1; d < layout.dims; ++d) {
    if (layout.strides[operand][d] == 0) append_dim(ordered, layout, d, layout.sizes[d], 1);
  }
  if (run < layout.sizes[0]) append_dim(ordered, layout, 0, layout.sizes[0] / run, run);
  for (int d = 1; d < layout.dims; ++d) {
    if (layout.strides[operand][d] != 0) append_dim(ordered, layout, d, layout.sizes[d], 1);
  }
  layout = ordered;
}

}  // namespace sms_plugin
