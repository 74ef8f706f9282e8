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
  bool is_wide;    // 2^31 rows or more: divide in 64 bits
  bool is_narrow;  // all offsets of rows fit in 31 bits
  int64_t sizes[kMaxRowDims];
  FastDivisor divisors[kMaxRowDims];
  int64_t strides[kMaxOperands][kMaxRowDims];
  int64_t row_strides[kMaxRowDims];
  int64_t query_strides[kMaxRowDims];

  explicit DeviceRowLayout(const RowLayout& host)
      : rows(host.rows),
        cols(host.cols),
        dims(host.dims),
        is_wide(host.rows > INT32_MAX),
        is_narrow(!is_wide && has_narrow_offsets(host)) {
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
    if (is_narrow) return narrow_offsets<kOperands>(static_cast<uint32_t>(turn));
    RowOffsets result{};
    if (is_wide) {
      add_dimensions<kOperands>(turn, result);
    } else {
      add_dimensions<kOperands>(static_cast<uint32_t>(turn), result);
    }
    return result;
  }

 private:
  static bool has_narrow_offsets(const RowLayout& host) {
    bool result = true;
    for (int k = 0; k < kMaxOperands; ++k) {
      int64_t last = 0;
      for (int d = 0; d < host.dims; ++d) last += (host.sizes[d] - 1) * host.strides[k][d];
      result = result && last <= INT32_MAX;
    }
    return result;
  }

  // In 32 bits and for few dimensions written out: most of what a short row costs beside its
  // values.
  template <int kOperands>
  __device__ __forceinline__ RowOffsets narrow_offsets(uint32_t turn) const {
    uint32_t operand[kMaxOperands] = {};
    uint32_t row = 0;
    uint32_t query = 0;
    const auto add = [&](int d, uint32_t index) {
      row += index * static_cast<uint32_t>(row_strides[d]);
      query += index * static_cast<uint32_t>(query_strides[d]);
#pragma unroll
      for (int k = 0; k < kOperands; ++k) {
        operand[k] += index * static_cast<uint32_t>(strides[k][d]);
      }
    };
    const auto split = [&](int d) {
      const uint32_t rest = divisors[d].quotient(turn);
      add(d, turn - rest * divisors[d].divisor);
      turn = rest;
    };
    if (dims <= 1) {
      add(0, turn);
    } else if (dims == 2) {
      split(0);
      add(1, turn);
    } else {
      split(0);
      split(1);
#pragma unroll 1
      for (int d = 2; d + 1 < dims; ++d) split(d);
      add(dims - 1, turn);
    }
    RowOffsets result{};
    result.row = row;
    result.query = query;
#pragma unroll
    for (int k = 0; k < kOperands; ++k) result.operand[k] = operand[k];
    return result;
  }

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
