// Writes rows that start anywhere in 16-byte stores.

#pragma once

#include "primitives.cuh"
#include "row_reader.cuh"

namespace sms_plugin {

// Whether the rows of a contiguous result consist of whole, aligned vectors.
template <typename T>
__device__ __forceinline__ bool has_whole_rows(const T* data, int64_t cols) {
  return misalignment(data) == 0 && static_cast<uint64_t>(cols) % kVectorSize<T> == 0;
}

// Stores the vectors of a row that kLanes neighbouring threads hold, one stripe after the other.
//
// Vectors that are whole and aligned go out as they are, in a plain launch or else if `is_whole`.
// Otherwise what a warp holds of a stripe, a segment, goes through shared memory, where it is
// shifted to the granules of the row: whole ones are stored at once, the two at the ends value by
// value, a lane each. Every lane of a warp has to call `store` then.
template <typename T, int kLanes, bool kIsPlain, typename Index = int>
class RowWriter {
 public:
  static constexpr int N = kVectorSize<T>;
  static constexpr int kSize = static_cast<int>(sizeof(T));
  static constexpr int kSegment = kLanes < kWarpSize ? kLanes : kWarpSize;  // lanes
  static constexpr int kGranules = kSegment + 1;  // of a segment that starts behind a boundary

  // A granule takes five words: lanes that write or read one each use different banks.
  template <int kThreads>
  struct Staging {
    uint32_t words[kIsPlain ? 1 : kThreads / kSegment][kIsPlain ? 1 : 5 * kGranules];
  };

  // Columns count from the first of the thread, as in RowReader. `cols` is what is left of the row
  // from there, or 0 or less.
  template <int kThreads>
  __device__ __forceinline__ RowWriter(T* row,  // from the first column of the thread on
                                       Index cols, Staging<kThreads>& staging, bool is_whole)
      : row_(row), cols_(cols), is_whole_(is_whole) {
    if constexpr (!kIsPlain) {
      lane_ = static_cast<int>(threadIdx.x) % kSegment;
      buffer_ = staging.words[threadIdx.x / kSegment];
      T* segment = row - lane_ * N;
      begin_ = static_cast<int>(misalignment(segment));
      aligned_ = reinterpret_cast<char*>(segment) - begin_;
      left_ = cols + lane_ * N;
      const int byte = lane_ * kSize;
      edge_at_ = byte < begin_ ? byte + kSegment * kVectorBytes : byte;
      has_edge_ = begin_ > 0 && byte < kVectorBytes;
      owns_granule_ = begin_ == 0 || lane_ > 0;
    }
  }

  // Stores columns [first, first + N) that lie within the row; `first` may lie beyond it unless
  // the launch is plain.
  // With `other` they go to the same place of another result, that many bytes away: a multiple of
  // 16.
  __device__ __forceinline__ void store(Index first, const Vector<T>& vector,
                                        int64_t other = 0) const {
    char* address = reinterpret_cast<char*>(row_ + first) + other;
    if constexpr (kIsPlain) {
      *reinterpret_cast<Vector<T>*>(address) = vector;
    } else if (is_whole_) {
      if (first < cols_) *reinterpret_cast<Vector<T>*>(address) = vector;
    } else {
      store_segment(first, vector, other);
    }
  }

 private:
  static __device__ __forceinline__ int slot(int word) { return word + (word >> 2); }

  // Puts the lane's vector `begin_` bytes behind the start of its granule.
  __device__ __forceinline__ void put(const Vector<T>& vector) const {
    uint32_t* granule = buffer_ + 5 * lane_;
    const int word = begin_ >> 2;
    if (kSize > 2 || (begin_ & 2) == 0) {
#pragma unroll
      for (int w = 0; w < 4; ++w) granule[slot(word + w)] = vector.words[w];
      return;
    }
    reinterpret_cast<uint16_t*>(granule + slot(word))[1] = static_cast<uint16_t>(vector.words[0]);
#pragma unroll
    for (int w = 0; w < 3; ++w) {
      granule[slot(word + 1 + w)] = __funnelshift_r(vector.words[w], vector.words[w + 1], 16);
    }
    reinterpret_cast<uint16_t*>(granule + slot(word + 4))[0] =
        static_cast<uint16_t>(vector.words[3] >> 16);
  }

  __device__ __forceinline__ T value_at(int byte) const {
    const uint32_t* word = buffer_ + slot(byte >> 2);
    Vector<T> vector = zero_vector<T>();
    if constexpr (kSize == 2) {
      vector.words[0] = reinterpret_cast<const uint16_t*>(word)[byte >> 1 & 1];
    } else {
#pragma unroll
      for (int w = 0; w < kSize / 4; ++w) vector.words[w] = word[w];
    }
    return element(vector, 0);
  }

  __device__ __forceinline__ void store_granule(char* aligned) const {
    Vector<T> granule;
#pragma unroll
    for (int w = 0; w < 4; ++w) granule.words[w] = buffer_[5 * lane_ + w];
    *reinterpret_cast<Vector<T>*>(aligned + lane_ * kVectorBytes) = granule;
  }

  __device__ __forceinline__ void store_segment(Index first, const Vector<T>& vector,
                                                int64_t other) const {
    char* aligned = aligned_ + static_cast<int64_t>(first) * kSize + other;
    put(vector);
    __syncwarp();  // the segment is complete
    if (first + kSegment * N <= left_) {
      // All of the segment lies within the row: its ends make up one granule.
      if (owns_granule_) store_granule(aligned);
      if (has_edge_) *reinterpret_cast<T*>(aligned + edge_at_) = value_at(edge_at_);
#pragma unroll
      for (int k = kSegment; k < N; k += kSegment) {  // fewer lanes than values
        const int byte = (lane_ + k) * kSize;
        const int at = byte < begin_ ? byte + kSegment * kVectorBytes : byte;
        if (begin_ > 0) *reinterpret_cast<T*>(aligned + at) = value_at(at);
      }
    } else {
      store_end(aligned, left_ - first);
    }
    __syncwarp();  // the segment is read: the next may overwrite it
  }

  // What there is of the segment in which the row ends: `left` columns, or fewer than none.
  __device__ __forceinline__ void store_end(char* aligned, Index left) const {
    // Bytes [begin_, end) of the buffer belong to the row.
    const int end = begin_ + (left < 0 ? 0 : static_cast<int>(left)) * kSize;
    const int granule = lane_ * kVectorBytes;
    if (granule >= begin_ && granule + kVectorBytes <= end) store_granule(aligned);
    const int tail = end / kVectorBytes * kVectorBytes;  // the granule in which the segment ends
#pragma unroll
    for (int k = 0; k < N; k += kSegment) {
      const int byte = (lane_ + k) * kSize;
      if (byte >= kVectorBytes) break;
      if (byte >= begin_ && byte < end && begin_ > 0) {
        *reinterpret_cast<T*>(aligned + byte) = value_at(byte);
      }
      if (tail + byte < end && (tail > 0 || begin_ == 0)) {
        *reinterpret_cast<T*>(aligned + tail + byte) = value_at(tail + byte);
      }
    }
  }

  T* row_;
  Index cols_;
  bool is_whole_;
  int lane_;
  int begin_;    // bytes that a segment starts behind a boundary
  int edge_at_;  // the byte of the first and last granule that this lane stores, if has_edge_
  bool has_edge_;
  bool owns_granule_;  // whether the granule at this lane is whole, within the row
  Index left_;         // columns from the first of the segment on
  uint32_t* buffer_;
  char* aligned_;  // that boundary, for the segment at `first` = 0
};

}  // namespace sms_plugin
