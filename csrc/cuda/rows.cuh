// The row layout as a kernel takes it: offsets by multiplication instead of division.

#pragma once

#include <cstdint>

#include "../row_layout.h"

namespace sms_plugin {

// n / divisor for n < 2^31 as (mulhi(n, multiplier) + n) >> shift (Granlund and Montgomery, 1994).
struct FastDivisor {
  uint32_t divisor = 1;
  uint32_t multiplier = 1;
  uint32_t shift = 0;

  FastDivisor() = default;
  explicit FastDivisor(uint32_t d) : divisor(d) {
    while ((uint64_t{1} << shift) < d) ++shift;
    multiplier = static_cast<uint32_t>((((uint64_t{1} << shift) - d) << 32) / d + 1);
  }

  __device__ __forceinline__ uint32_t quotient(uint32_t n) const {
    return (__umulhi(n, multiplier) + n) >> shift;
  }
};

struct RowOffsets {
  int64_t operand[kMaxOperands];
  int64_t query;  // index within the innermost row dimension
};

// A trivially copyable twin of RowLayout.
struct DeviceRowLayout {
  int64_t rows;
  int64_t cols;
  int64_t col_strides[kMaxOperands];
  int dims;
  bool is_wide;  // 2^31 rows or more: divide in 64 bits
  int64_t sizes[kMaxRowDims];
  FastDivisor divisors[kMaxRowDims];
  int64_t strides[kMaxOperands][kMaxRowDims];

  explicit DeviceRowLayout(const RowLayout& host)
      : rows(host.rows), cols(host.cols), dims(host.dims), is_wide(host.rows > INT32_MAX) {
    for (int k = 0; k < kMaxOperands; ++k) col_strides[k] = host.col_strides[k];
    for (int d = 0; d < dims; ++d) {
      sizes[d] = host.sizes[d];
      if (!is_wide) divisors[d] = FastDivisor(static_cast<uint32_t>(host.sizes[d]));
      for (int k = 0; k < kMaxOperands; ++k) strides[k][d] = host.strides[k][d];
    }
  }

  // Where `row` starts in the first kOperands operands.
  template <int kOperands>
  __device__ __forceinline__ RowOffsets offsets(int64_t row) const {
    RowOffsets result;
#pragma unroll
    for (int k = 0; k < kOperands; ++k) result.operand[k] = 0;
    result.query = row;
    for (int d = 0; d < dims; ++d) {
      int64_t index = row;
      if (d + 1 < dims) {
        const int64_t rest =
            is_wide ? row / sizes[d] : divisors[d].quotient(static_cast<uint32_t>(row));
        index = row - rest * sizes[d];
        row = rest;
      }
      if (d == 0) result.query = index;
#pragma unroll
      for (int k = 0; k < kOperands; ++k) result.operand[k] += index * strides[k][d];
    }
    return result;
  }
};

}  // namespace sms_plugin
