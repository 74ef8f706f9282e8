// Writes rows that start anywhere in 16-byte stores.

#pragma once

#include "primitives.cuh"

namespace sms_plugin {

// Stores the vectors of a row that kLanes neighbouring threads hold, one stripe after the other.
//
// A row behind a 16-byte boundary (odd lengths) has vectors across two aligned granules each. A
// lane then stores the granule made of its left neighbour's end and its own beginning; the two ends
// of what a warp holds side by side go out value by value. Every lane of a warp has to call
// `store`.
template <typename T, int kLanes>
class RowWriter {
 public:
  static constexpr int N = kVectorSize<T>;
  static constexpr int kSegment = kLanes < kWarpSize ? kLanes : kWarpSize;

  __device__ __forceinline__ RowWriter(T* row,  // [cols]
                                       int64_t cols)
      : row_(row), cols_(cols), shift_(misalignment(row)) {
    any_shifted_ = sizeof(T) < sizeof(double) && __any_sync(0xffffffffu, shift_ != 0);
  }

  // Whether `store` must be called by all lanes, zeros included, and not just by those that have
  // something.
  __device__ __forceinline__ bool needs_all_lanes() const { return any_shifted_; }

  // Stores columns [first, first + N) that lie within the row; `first` may lie beyond it.
  template <typename Index>
  __device__ __forceinline__ void store(Index first, const Vector<T>& vector) const {
    if (any_shifted_) {
      store_shifted(first, vector);
    } else if (shift_ == 0 && first + N <= cols_) {
      *reinterpret_cast<Vector<T>*>(row_ + first) = vector;
    } else {
      store_values(first, vector, 0, N);
    }
  }

 private:
  // Values [begin, end) of a vector, as far as they lie within the row.
  template <typename Index>
  __device__ __forceinline__ void store_values(Index first, const Vector<T>& vector, int begin,
                                               int end) const {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (k >= begin && k < end && first + k < cols_) row_[first + k] = element(vector, k);
    }
  }

  template <typename Index>
  __device__ __forceinline__ void store_shifted(Index first, const Vector<T>& vector) const {
    Vector<T> left;
#pragma unroll
    for (int w = 0; w < 4; ++w) left.words[w] = __shfl_up_sync(0xffffffffu, vector.words[w], 1);
    if (shift_ == 0 && first + N <= cols_) {
      *reinterpret_cast<Vector<T>*>(row_ + first) = vector;
      return;
    }
    const int lane = threadIdx.x % kSegment;
    const int head = (kVectorBytes - static_cast<int>(shift_)) / static_cast<int>(sizeof(T));
    const bool has_left = shift_ != 0 && lane > 0;
    const bool has_right = shift_ != 0 && lane + 1 < kSegment;
    const bool owns_granule = has_left && first + head <= cols_;
    const bool right_owns_tail = has_right && first + N + head <= cols_;
    if (owns_granule) {
      *reinterpret_cast<Vector<T>*>(row_ + first - (N - head)) =
          shifted(left, vector, kVectorBytes - shift_);
    }
    const int begin = owns_granule ? head : 0;
    const int end = right_owns_tail ? head : N;
    if (begin < end) store_values(first, vector, begin, end);
  }

  T* row_;
  int64_t cols_;
  uint32_t shift_;
  bool any_shifted_;
};

}  // namespace sms_plugin
