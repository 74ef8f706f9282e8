// Writes rows in 16-byte stores.

#pragma once

#include "columns.cuh"
#include "primitives.cuh"
#include "row_reader.cuh"

namespace sms_plugin {

// Stores the vectors of a row that neighbouring threads hold, one stripe after the other, to
// a contiguous result that starts on a boundary. Rows of whole vectors need no more than that.
template <typename T, typename Columns, typename Index = int>
class RowWriter {
 public:
  static constexpr int N = kVectorSize<T>;
  using Acc = Accumulator<T>;

  template <int kThreads>
  struct Staging {};

  // Columns count from the first of the thread, as in RowReader.
  template <int kThreads>
  __device__ __forceinline__ RowWriter(T* row,  // from the first column of the thread on
                                       Index, Staging<kThreads>&)
      : row_(row) {}

  // Rounds and stores the vector at `first`, which lies within the row. With `other` it goes to the
  // same place of another result, that many bytes away: a multiple of 16.
  __device__ __forceinline__ void store(Index first, const Acc (&values)[N],
                                        int64_t other = 0) const {
    store_vector(first, pack<T>(values), other);
  }
  __device__ __forceinline__ void store_zeros(Index first, int64_t other = 0) const {
    store_vector(first, zero_vector<T>(), other);
  }

 private:
  __device__ __forceinline__ void store_vector(Index first, const Vector<T>& vector,
                                               int64_t other) const {
    *reinterpret_cast<Vector<T>*>(reinterpret_cast<char*>(row_ + first) + other) = vector;
  }

  T* row_;
};

// Rows of any other length. What the lanes of a segment hold of a stripe goes through shared
// memory, laid out as in the row from the boundary before it on. Whole granules of it are stored at
// once, the two at the ends value by value, a lane each. All lanes of a warp have to call `store`.
template <typename T, int kStep, typename Index>
class RowWriter<T, ColumnsOf<Access::kSpread, kStep>, Index> {
 public:
  static constexpr int N = kVectorSize<T>;
  static constexpr int kSize = static_cast<int>(sizeof(T));
  using Acc = Accumulator<T>;
  static constexpr int kSegmentBytes = kStep * kVectorBytes;
  // A granule more for what precedes the first boundary; and segments that share a warp start in
  // different banks.
  static constexpr int kPadding = kStep == 8 || kStep == 16 ? 4 * kStep : kVectorBytes;

  template <int kThreads>
  struct Staging {
    alignas(kVectorBytes) char segments[kThreads / kStep][kSegmentBytes + kPadding];
  };

  // `cols` is what is left of the row from the first column of the thread on, or 0 or less.
  template <int kThreads>
  __device__ __forceinline__ RowWriter(T* row, Index cols, Staging<kThreads>& staging)
      : row_(row),
        lane_(static_cast<int>(threadIdx.x) % kStep),
        left_(cols + lane_),
        buffer_(staging.segments[threadIdx.x / kStep]) {
    begin_ = static_cast<int>(misalignment(row - lane_));
    char* aligned = reinterpret_cast<char*>(row - lane_) - begin_;
    granule_ = aligned + lane_ * kVectorBytes;
    const int byte = lane_ * kSize;
    const int edge = byte < begin_ ? byte + kSegmentBytes : byte;
    edge_ = aligned + edge;
    edge_in_buffer_ = buffer_ + edge;
    has_edge_ = begin_ > 0 && byte < kVectorBytes;
    owns_granule_ = begin_ == 0 || lane_ > 0;
  }

  // Rounds and stores what lies within the row of the vector at `first`.
  __device__ __forceinline__ void store(Index first, const Acc (&values)[N],
                                        int64_t other = 0) const {
    T* own = reinterpret_cast<T*>(buffer_ + begin_) + lane_;
#pragma unroll
    for (int k = 0; k < N; ++k) own[k * kStep] = from_accumulator<T>(values[k]);
    __syncwarp();  // the segment is complete
    const int64_t offset = static_cast<int64_t>(first) * kSize + other;
    if (first + kStep * N <= left_) {
      // All of the segment lies within the row: its ends make up one granule.
      if (owns_granule_) *reinterpret_cast<Vector<T>*>(granule_ + offset) = granule();
      if (has_edge_) {
        *reinterpret_cast<T*>(edge_ + offset) = *reinterpret_cast<const T*>(edge_in_buffer_);
      }
#pragma unroll
      for (int k = kStep; k < N; k += kStep) {  // fewer lanes than values
        const int byte = (lane_ + k) * kSize;
        if (begin_ > 0) store_value(byte < begin_ ? byte + kSegmentBytes : byte, offset);
      }
    } else {
      store_end(left_ - first, offset);
    }
    __syncwarp();  // the segment is read: the next may overwrite it
  }

  // Stores zeros in the same place.
  __device__ __forceinline__ void store_zeros(Index first, int64_t other = 0) const {
    const int64_t offset = static_cast<int64_t>(first) * kSize + other;
    if (kStep >= N && first + kStep * N <= left_) {
      if (owns_granule_) *reinterpret_cast<Vector<T>*>(granule_ + offset) = zero_vector<T>();
      if (has_edge_) *reinterpret_cast<T*>(edge_ + offset) = element(zero_vector<T>(), 0);
      return;
    }
    T* own = reinterpret_cast<T*>(reinterpret_cast<char*>(row_) + offset);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (first + k * kStep < left_ - lane_) own[k * kStep] = element(zero_vector<T>(), 0);
    }
  }

 private:
  __device__ __forceinline__ Vector<T> granule() const {
    return *reinterpret_cast<const Vector<T>*>(buffer_ + lane_ * kVectorBytes);
  }
  __device__ __forceinline__ void store_value(int byte, int64_t offset) const {
    char* aligned = granule_ - lane_ * kVectorBytes;
    *reinterpret_cast<T*>(aligned + byte + offset) = *reinterpret_cast<const T*>(buffer_ + byte);
  }

  // What there is of the segment in which the row ends: `left` columns, or fewer than none.
  __device__ __forceinline__ void store_end(Index left, int64_t offset) const {
    // Bytes [begin_, end) of the buffer belong to the row.
    const int end = begin_ + (left < 0 ? 0 : static_cast<int>(left)) * kSize;
    const int first = lane_ * kVectorBytes;
    if (first >= begin_ && first + kVectorBytes <= end) {
      *reinterpret_cast<Vector<T>*>(granule_ + offset) = granule();
    }
    const int tail = end / kVectorBytes * kVectorBytes;  // the granule in which the segment ends
#pragma unroll
    for (int k = 0; k < N; k += kStep) {
      const int byte = (lane_ + k) * kSize;
      if (byte >= kVectorBytes) break;
      if (byte >= begin_ && byte < end && begin_ > 0) store_value(byte, offset);
      if (tail + byte < end && (tail > 0 || begin_ == 0)) store_value(tail + byte, offset);
    }
  }

  T* row_;
  int lane_;                    // within the segment
  Index left_;                  // of the row, from the first column of the segment on
  char* buffer_;                // of the segment, from the boundary before it on
  int begin_;                   // bytes that it starts behind that boundary
  char* granule_;               // the granule at this lane, for the segment at `first` = 0
  char* edge_;                  // the value of the first and last granule that this lane stores
  const char* edge_in_buffer_;  // the same
  bool has_edge_;
  bool owns_granule_;  // whether the granule at this lane is whole, within the row
};

}  // namespace sms_plugin
