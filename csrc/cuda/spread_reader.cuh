// Reads rows of any length value by value, neighbouring lanes neighbouring columns.
//
// As many bytes are on their way as with whole vectors, in more loads, which nothing has to be
// shifted after. What isn't loaded stays what it was in the registers: no column has to be cut.

#pragma once

#include "row_reader.cuh"

namespace sms_plugin {

// The bits of one value in memory, and in a register: those of 16 bits aren't kept to them.
template <int kBytes>
using Bits =
    std::conditional_t<kBytes == 2, uint16_t, std::conditional_t<kBytes == 4, uint32_t, uint64_t>>;
template <int kBytes>
using RegisterBits = std::conditional_t<kBytes == 8, uint64_t, uint32_t>;

template <typename T, int kStep>
struct RawVector<T, ColumnsOf<Access::kSpread, kStep>> {
  static constexpr int N = kVectorSize<T>;
  using Value = RegisterBits<sizeof(T)>;
  Value values[N];

  __device__ __forceinline__ void keep(const Vector<T>& filler) {
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = value_bits(filler, k);
  }

  template <typename Acc>
  __device__ __forceinline__ Acc value(int k) const {
    if constexpr (std::is_same_v<T, __half>) {
      return to_accumulator<Acc>(__ushort_as_half(static_cast<uint16_t>(values[k])));
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(values[k] << 16);
    } else if constexpr (sizeof(T) == 4) {
      return __uint_as_float(values[k]);
    } else {
      return __longlong_as_double(static_cast<int64_t>(values[k]));
    }
  }

  static __device__ __forceinline__ Value value_bits(const Vector<T>& vector, int k) {
    if constexpr (sizeof(T) == 2) {
      return vector.words[k / 2] >> (16 * (k % 2));
    } else if constexpr (sizeof(T) == 4) {
      return vector.words[k];
    } else {
      return vector.words[2 * k] | static_cast<Value>(vector.words[2 * k + 1]) << 32;
    }
  }
};

template <typename T, int kStep>
class RowReader<T, ColumnsOf<Access::kSpread, kStep>> {
 public:
  static constexpr int N = kVectorSize<T>;
  using Raw = RawVector<T, ColumnsOf<Access::kSpread, kStep>>;

  RowReader() = default;
  __device__ __forceinline__ RowReader(const Operand<T>& operand, int64_t offset, int64_t,
                                       int64_t start)
      : row_(reinterpret_cast<const Bits<sizeof(T)>*>(operand.data + offset + start)) {}

  static __device__ __forceinline__ bool is_inner() { return true; }
  static __device__ __forceinline__ void keep_inner(bool) {}

  template <typename Index>
  static __device__ __forceinline__ bool holds(Index) {
    return true;
  }

  // Loads the values of the vector at `first` whose columns precede `end`.
  template <typename Index>
  __device__ __forceinline__ void fetch(Index first, Index end, Raw& raw) const {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (first + k * kStep < end) raw.values[k] = row_[first + k * kStep];
    }
  }

  __device__ __forceinline__ Vector<T> take(const Raw& raw) const {
    Vector<T> result;
#pragma unroll
    for (int w = 0; w < kVectorBytes / 4; ++w) {
      if constexpr (sizeof(T) == 2) {
        result.words[w] = __byte_perm(raw.values[2 * w], raw.values[2 * w + 1], 0x5410);
      } else if constexpr (sizeof(T) == 4) {
        result.words[w] = raw.values[w];
      } else {
        result.words[w] = static_cast<uint32_t>(raw.values[w / 2] >> (32 * (w % 2)));
      }
    }
    return result;
  }

 private:
  const Bits<sizeof(T)>* row_;
};

template <int N, int kStep>
class FlagReader<N, ColumnsOf<Access::kSpread, kStep>> {
 public:
  static constexpr int kWords = (N + 3) / 4;
  struct Raw {
    uint32_t values[4 * kWords];
  };

  FlagReader() = default;
  __device__ __forceinline__ FlagReader(const Operand<uint8_t>& operand, int64_t offset, int64_t,
                                        int64_t start)
      : row_(operand.data + offset + start) {}

  static __device__ __forceinline__ bool is_inner() { return true; }
  static __device__ __forceinline__ void keep_inner(bool) {}

  template <typename Index>
  __device__ __forceinline__ void fetch(Index first, Index end, Raw& raw) const {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (first + k * kStep < end) raw.values[k] = row_[first + k * kStep];
    }
  }

  template <typename Index>
  __device__ __forceinline__ void take(const Raw& raw, Index, uint32_t (&flags)[kWords]) const {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t* bytes = raw.values + 4 * w;
      flags[w] = high_bits(__byte_perm(__byte_perm(bytes[0], bytes[1], 0x0040),
                                       __byte_perm(bytes[2], bytes[3], 0x0040), 0x5410));
    }
  }

  template <typename Index>
  __device__ __forceinline__ uint32_t clear_bits(Index first, Index end) const {
    return unflagged_bits<N, kStep>(row_, first, end);
  }

 private:
  const uint8_t* row_;
};

}  // namespace sms_plugin
