// Where each row of several strided, broadcast operands starts. No torch here.
//
// All operands of a call share one logical shape [..., cols]. Its leading dimensions are merged as
// far as every operand allows, so that most calls are left with none or one, and any number of them
// is right.

#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>
#include <vector>

#if defined(__CUDACC__)
#define SMS_PLUGIN_HOST_DEVICE __host__ __device__
#else
#define SMS_PLUGIN_HOST_DEVICE
#endif

namespace sms_plugin {

// Each dimension that can't be merged has at least two entries: 2^32 rows are needed to exceed
// this.
constexpr int kMaxRowDims = 32;

// How many operands one layout describes: scores, mask and bias; or grad_probs and probs.
constexpr int kMaxOperands = 3;

struct RowLayout {
  int64_t rows = 1;                              // product of sizes
  int64_t cols = 0;                              // length of a row
  int dims = 0;                                  // dimensions in use, innermost first
  std::array<int64_t, kMaxRowDims> sizes{};      // [dims]
  int64_t strides[kMaxOperands][kMaxRowDims]{};  // [operand][dims], in elements; 0 = broadcast
  int64_t row_strides[kMaxRowDims]{};            // the same of a contiguous result, in rows
  int64_t col_strides[kMaxOperands]{};           // step between columns; 0 = broadcast
  int64_t query_strides[kMaxRowDims]{1};         // step of the query index

  // First element of `row` in an operand.
  int64_t offset(int operand, int64_t row) const {
    int64_t result = 0;
    for (int d = 0; d < dims; ++d) {
      result += (row % sizes[d]) * strides[operand][d];
      row /= sizes[d];
    }
    return result;
  }
};

// Sizes and strides of one operand, dimension by dimension, outermost first.
struct StridedShape {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

// Stride of an operand along dimension `d` of `shape` (both aligned at the last dimension).
inline int64_t broadcast_stride(const StridedShape& operand, const std::vector<int64_t>& shape,
                                size_t d) {
  const size_t missing = shape.size() - operand.sizes.size();
  if (d < missing || operand.sizes[d - missing] == 1) return 0;
  return operand.strides[d - missing];
}

// `keep_query_dim` leaves the innermost row dimension alone, so that row % sizes[0] is the query
// index.
inline RowLayout make_row_layout(const std::vector<int64_t>& shape,  // [..., cols], never empty
                                 const std::vector<StridedShape>& operands, bool keep_query_dim) {
  RowLayout layout;
  const size_t last = shape.size() - 1;
  layout.cols = shape[last];
  for (size_t k = 0; k < operands.size(); ++k) {
    layout.col_strides[k] = broadcast_stride(operands[k], shape, last);
  }
  for (size_t d = last; d-- > 0;) {
    const int64_t size = shape[d];
    const int64_t row_stride = layout.rows;
    const bool is_query_dim = keep_query_dim && d == last - 1;
    layout.rows *= size;
    if (size == 1 && !is_query_dim) continue;
    const int top = layout.dims - 1;
    bool merges = top >= 0 && !(keep_query_dim && top == 0);
    for (size_t k = 0; merges && k < operands.size(); ++k) {
      merges =
          broadcast_stride(operands[k], shape, d) == layout.strides[k][top] * layout.sizes[top];
    }
    if (merges) {
      layout.sizes[top] *= size;
      continue;
    }
    if (layout.dims == kMaxRowDims) {
      throw std::runtime_error("sms_plugin: more than 32 dimensions that can't be merged");
    }
    layout.sizes[layout.dims] = size;
    layout.row_strides[layout.dims] = row_stride;
    for (size_t k = 0; k < operands.size(); ++k) {
      layout.strides[k][layout.dims] = broadcast_stride(operands[k], shape, d);
    }
    ++layout.dims;
  }
  return layout;
}

// How many keys query `query` may see: all of them, or up to the bottom-right aligned diagonal.
struct CausalLimit {
  bool is_causal = false;
  int64_t queries = 1;  // Tq
  int64_t keys = 0;     // Tk

  SMS_PLUGIN_HOST_DEVICE int64_t visible(int64_t query) const {
    if (!is_causal) return keys;
    const int64_t end = query + keys - queries + 1;
    return end < 0 ? 0 : (end < keys ? end : keys);
  }
};

}  // namespace sms_plugin
