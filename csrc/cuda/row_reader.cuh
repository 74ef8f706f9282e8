// Reads rows in 16-byte loads of neighbouring columns, wherever they start and end.
// spread_reader.cuh has the other way.
//
// Which columns a vector holds never depends on where a row starts: only the loads do. A shifted
// vector comes from the two aligned granules that it touches, as far as they lie within the
// operand's memory; rows at its very ends are read value by value.
//
// Reading has two steps, so that all loads of a row are on their way before the first is used.

#pragma once

#include "columns.cuh"
#include "primitives.cuh"

namespace sms_plugin {

// How far an address lies behind a 16-byte boundary, in bytes.
__device__ __forceinline__ uint32_t misalignment(const void* address) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(address) % kVectorBytes);
}

// A column that can be read: one beyond the end is replaced by the last, which costs no branch.
template <typename Index>
__device__ __forceinline__ Index column_within(Index column, Index end) {
  return column < end ? column : end - 1;
}

// An operand in memory.
template <typename T>
struct Operand {
  const T* data;  // strided [rows, cols]
  const T* end;   // behind its last value
};

// What was loaded of a vector.
template <typename T, typename Columns>
struct RawVector;
template <typename T>
struct RawVector<T, ColumnsOf<Access::kWhole, 1>> {
  Vector<T> low;
};
template <typename T>
struct RawVector<T, ShiftedColumns> {
  Vector<T> low;   // or the vector itself
  Vector<T> high;  // the next granule
};

// 16 of the 32 bytes of two granules, from byte `shift` on (0 <= shift < 16).
template <typename T>
__device__ __forceinline__ Vector<T> shifted(const Vector<T>& low, const Vector<T>& high,
                                             uint32_t shift) {
  uint32_t words[8];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    words[w] = low.words[w];
    words[w + 4] = high.words[w];
  }
  const bool by_two = shift & 8;
  const bool by_one = shift & 4;
#pragma unroll
  for (int w = 0; w < 6; ++w) words[w] = by_two ? words[w + 2] : words[w];
#pragma unroll
  for (int w = 0; w < 5; ++w) words[w] = by_one ? words[w + 1] : words[w];
  Vector<T> result;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    result.words[w] =
        sizeof(T) < 4 ? __funnelshift_r(words[w], words[w + 1], 8 * (shift & 3)) : words[w];
  }
  return result;
}

// Columns [first, first + N) of a row value by value; those from `end` on repeat the last.
template <typename T, typename Index>
static __device__ __noinline__ Vector<T> gathered(const T* row,  // [>= end]
                                                  Index first, Index end) {
  Vector<T> result = zero_vector<T>();
#pragma unroll
  for (int k = 0; k < kVectorSize<T>; ++k) {
    put_element(result, k, row[column_within(first + k, end)]);
  }
  return result;
}

// Values from `left` on become `padding`.
template <typename T>
__device__ __forceinline__ void cut_vector(Vector<T>& vector, int left, const Vector<T>& padding) {
#pragma unroll
  for (int w = 0; w < kVectorBytes / 4; ++w) {
    const int bytes = left * static_cast<int>(sizeof(T)) - 4 * w;  // of this word that stay
    const uint32_t stay = bytes >= 4 ? ~0u : bytes <= 0 ? 0u : (1u << 8 * bytes) - 1u;
    vector.words[w] = (vector.words[w] & stay) | (padding.words[w] & ~stay);
  }
}

// A vector that wasn't loaded: `filler` in all of it.
template <typename Columns, typename T>
__device__ __forceinline__ RawVector<T, Columns> unread(const Vector<T>& filler) {
  RawVector<T, Columns> raw{};
  if constexpr (Columns::kIsSpread) {
    raw.keep(filler);
  } else {
    raw.low = filler;
    if constexpr (!Columns::kIsWhole) raw.high = filler;
  }
  return raw;
}

template <typename T, typename Columns>
class RowReader {
 public:
  static constexpr int N = kVectorSize<T>;
  using Raw = RawVector<T, Columns>;

  RowReader() = default;
  __device__ __forceinline__ RowReader(const Operand<T>& operand, int64_t offset, int64_t cols,
                                       int64_t start)
      : row_(operand.data + offset + start) {
    if constexpr (!Columns::kIsWhole) {
      const T* row = operand.data + offset;
      const T* end = row + cols;
      shift_ = misalignment(row);
      left_ =
          cols - start - (kVectorBytes - static_cast<int>(shift_)) / static_cast<int>(sizeof(T));
      const auto begin = reinterpret_cast<uintptr_t>(row) - shift_;
      const uintptr_t behind = (reinterpret_cast<uintptr_t>(end) + kVectorBytes - 1) / kVectorBytes;
      is_inner_ = begin >= reinterpret_cast<uintptr_t>(operand.data) &&
                  behind * kVectorBytes <= reinterpret_cast<uintptr_t>(operand.end);
    }
  }

  // Whether `fetch` may be used: the granules of this row lie within the operand.
  __device__ __forceinline__ bool is_inner() const {
    if constexpr (Columns::kIsWhole) return true;
    return is_inner_;
  }

  // Reads the row value by value if `is_inner` is false: one operand of it is at its end.
  __device__ __forceinline__ void keep_inner(bool is_inner) {
    if constexpr (!Columns::kIsWhole) is_inner_ = is_inner;
  }

  // Whether column `first` lies within the row.
  template <typename Index>
  __device__ __forceinline__ bool holds(Index first) const {
    if constexpr (Columns::kIsWhole) return true;
    return first < left_ + (kVectorBytes - static_cast<int>(shift_)) / static_cast<int>(sizeof(T));
  }

  // Loads what holds the vector at `first`, which lies within the row. `end` is for spread columns.
  template <typename Index>
  __device__ __forceinline__ void fetch(Index first, Index, Raw& raw) const {
    if constexpr (Columns::kIsWhole) {
      raw.low = *reinterpret_cast<const Vector<T>*>(row_ + first);
    } else {
      const auto* granule =
          reinterpret_cast<const Vector<T>*>(reinterpret_cast<const char*>(row_ + first) - shift_);
      raw.low = granule[0];
      if (shift_ != 0 && first < left_) raw.high = granule[1];
    }
  }

  // The same for rows at the ends of the operand. Columns from `end` on repeat the last.
  template <typename Index>
  __device__ __forceinline__ Raw gather(Index first, Index end) const {
    Raw raw{};
    raw.low = gathered(row_, first, end);
    return raw;
  }

  __device__ __forceinline__ Vector<T> take(const Raw& raw) const {
    if constexpr (Columns::kIsWhole) {
      return raw.low;
    } else {
      return is_inner_ && shift_ != 0 ? shifted(raw.low, raw.high, shift_) : raw.low;
    }
  }

 private:
  const T* row_;
  int64_t left_;  // columns that lie beyond the first granule
  uint32_t shift_;
  bool is_inner_;
};

// The high bit of each byte that isn't 0; the others are arbitrary.
__device__ __forceinline__ uint32_t high_bits(uint32_t bytes) {
  return ((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes;
}

// A bit for each of N columns, `kStep` apart, that isn't flagged; those from `end` on repeat the
// last. Slow: for the rare rows that need it.
template <int N, int kStep, typename Index>
__device__ __forceinline__ uint32_t unflagged_bits(const uint8_t* row,  // [>= end]
                                                   Index first, Index end) {
  uint32_t bits = 0;
#pragma unroll 1
  for (int k = 0; k < N; ++k) {
    bits |= (row[column_within(first + k * kStep, end)] == 0 ? 1u : 0u) << k;
  }
  return bits;
}

// Reads a row of flags, N bytes for a vector of N values.
template <int N, typename Columns>
class FlagReader {
 public:
  static constexpr int kWords = (N + 3) / 4;
  struct Raw {
    uint32_t words[Columns::kIsWhole ? kWords : kWords + 1];
  };

  FlagReader() = default;
  __device__ __forceinline__ FlagReader(const Operand<uint8_t>& operand, int64_t offset,
                                        int64_t cols, int64_t start)
      : row_(operand.data + offset + start) {
    if constexpr (!Columns::kIsWhole) {
      const uint8_t* row = operand.data + offset;
      end_ = row + cols;
      const auto begin = reinterpret_cast<uintptr_t>(row) / 4 * 4;
      const uintptr_t behind = (reinterpret_cast<uintptr_t>(end_) + 3) / 4 * 4;
      shift_ = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(row_) % 4);
      is_inner_ = begin >= reinterpret_cast<uintptr_t>(operand.data) &&
                  behind <= reinterpret_cast<uintptr_t>(operand.end);
    }
  }

  __device__ __forceinline__ bool is_inner() const {
    if constexpr (Columns::kIsWhole) return true;
    return is_inner_;
  }

  // Reads the row value by value if `is_inner` is false: one operand of it is at its end.
  __device__ __forceinline__ void keep_inner(bool is_inner) {
    if constexpr (!Columns::kIsWhole) is_inner_ = is_inner;
  }

  template <typename Index>
  __device__ __forceinline__ void fetch(Index first, Index, Raw& raw) const {
    if constexpr (!Columns::kIsWhole) {
      const uint8_t* address = row_ + first;
      const auto* words =
          reinterpret_cast<const uint32_t*>(reinterpret_cast<uintptr_t>(address) / 4 * 4);
      raw.words[0] = words[0];
#pragma unroll
      for (int w = 1; w <= kWords; ++w) {
        if (reinterpret_cast<const uint8_t*>(words + w) < end_) raw.words[w] = words[w];
      }
    } else if constexpr (N == 8) {
      const auto pair = *reinterpret_cast<const uint2*>(row_ + first);
      raw.words[0] = pair.x;
      raw.words[1] = pair.y;
    } else if constexpr (N == 4) {
      raw.words[0] = *reinterpret_cast<const uint32_t*>(row_ + first);
    } else {
      raw.words[0] = *reinterpret_cast<const uint16_t*>(row_ + first);
    }
  }

  template <typename Index>
  __device__ __forceinline__ Raw gather(Index first, Index end) const {
    Raw raw{};
#pragma unroll
    for (int k = 0; k < N; ++k) {
      raw.words[k / 4] |= static_cast<uint32_t>(row_[column_within(first + k, end)])
                          << (8 * (k % 4));
    }
    return raw;
  }

  // The high bit of byte k is set if flag k is.
  template <typename Index>
  __device__ __forceinline__ void take(const Raw& raw, Index first,
                                       uint32_t (&flags)[kWords]) const {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      uint32_t bytes = raw.words[w];
      if constexpr (!Columns::kIsWhole) {
        const uint32_t shift = (shift_ + static_cast<uint32_t>(first)) % 4;
        if (is_inner_) bytes = __funnelshift_r(raw.words[w], raw.words[w + 1], 8 * shift);
      }
      flags[w] = high_bits(bytes);
    }
  }

  template <typename Index>
  __device__ __forceinline__ uint32_t clear_bits(Index first, Index end) const {
    return unflagged_bits<N, Columns::kStep>(row_, first, end);
  }

 private:
  const uint8_t* row_;
  const uint8_t* end_;
  uint32_t shift_;
  bool is_inner_;
};

// Word w of a vector of T: all bits of the values whose flag is set.
template <typename T, int kWords>
__device__ __forceinline__ uint32_t flagged_word(const uint32_t (&flags)[kWords], int w) {
  // prmt with the high bit of a selector digit set repeats the sign of the byte that it names.
  const int value = w * 4 / static_cast<int>(sizeof(T));  // the first that lies in this word
  const uint32_t low = 8 | (value % 4);
  const uint32_t high = sizeof(T) == 2 ? low + 1 : low;
  uint32_t result;
  asm("prmt.b32 %0, %1, 0, %2;"
      : "=r"(result)
      : "r"(flags[value / 4]), "r"(low | low << 4 | high << 8 | high << 12));
  return result;
}

// Flagged values become `padding`.
template <typename T, int kWords>
__device__ __forceinline__ void replace_flagged(Vector<T>& vector, const uint32_t (&flags)[kWords],
                                                const Vector<T>& padding) {
#pragma unroll
  for (int w = 0; w < kVectorBytes / 4; ++w) {
    const uint32_t flagged = flagged_word<T>(flags, w);
    vector.words[w] = (vector.words[w] & ~flagged) | (padding.words[w] & flagged);
  }
}

}  // namespace sms_plugin
