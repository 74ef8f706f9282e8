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
  int64_t row;    // of a contiguous [rows, cols]
  int64_t query;  // which query it is, if the query dimension was kept
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
  int64_t row_strides[kMaxRowDims];
  int64_t query_strides[kMaxRowDims];

  explicit DeviceRowLayout(const RowLayout& host)
      : rows(host.rows), cols(host.cols), dims(host.dims), is_wide(host.rows > INT32_MAX) {
    for (int k = 0; k < kMaxOperands; ++k) col_strides[k] = host.col_strides[k];
    row_strides[0] = query_strides[0] =
        0;  // a single row has no dimension, and is read as if it had one
    for (int k = 0; k < kMaxOperands; ++k) strides[k][0] = 0;
    for (int d = 0; d < dims; ++d) {
      sizes[d] = host.sizes[d];
      if (!is_wide) divisors[d] = FastDivisor(static_cast<uint32_t>(host.sizes[d]));
      row_strides[d] = host.row_strides[d];
      query_strides[d] = host.query_strides[d];
      for (int k = 0; k < kMaxOperands; ++k) strides[k][d] = host.strides[k][d];
    }
  }

  // Where the row that comes `turn`-th starts in the first kOperands operands.
  template <int kOperands>
  __device__ __forceinline__ RowOffsets offsets(int64_t turn) const {
    RowOffsets result{};
    if (is_wide) {
      add_dimensions<kOperands>(turn, result);
    } else if (dims > 1) {
      add_dimensions<kOperands>(static_cast<uint32_t>(turn), result);
    } else {
      add_dimension<kOperands>(0, static_cast<uint32_t>(turn), result);
    }
    return result;
  }

 private:
  template <int kOperands, typename Index>
  __device__ __forceinline__ void add_dimension(int d, Index index, RowOffsets& offsets) const {
    offsets.query += index * query_strides[d];
    offsets.row += index * row_strides[d];
#pragma unroll
    for (int k = 0; k < kOperands; ++k) offsets.operand[k] += index * strides[k][d];
  }

  __device__ __forceinline__ uint32_t quotient(uint32_t n, int d) const {
    return divisors[d].quotient(n);
  }
  __device__ __forceinline__ int64_t quotient(int64_t n, int d) const { return n / sizes[d]; }

  template <int kOperands, typename Index>
  __device__ __forceinline__ void add_dimensions(Index turn, RowOffsets& offsets) const {
#pragma unroll 1
    for (int d = 0; d + 1 < dims; ++d) {
      const Index rest = quotient(turn, d);
      add_dimension<kOperands>(d, turn - rest * static_cast<Index>(sizes[d]), offsets);
      turn = rest;
    }
    add_dimension<kOperands>(dims - 1, turn, offsets);
  }
};

}  // namespace sms_plugin
