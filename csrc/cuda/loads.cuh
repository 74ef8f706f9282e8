// What happens at load of scores without added terms. terms.cuh has those with.
//
// A load functor says what stays in registers of a vector of columns (Held), reads it, and gives z
// from it in eighths (see kHeadroom). The kernels know nothing else about masks.

#pragma once

#include "mapping.cuh"
#include "primitives.cuh"
#include "rows.cuh"

namespace sms_plugin {

// Scores times scale, kept packed in their own dtype.
template <typename T>
struct PlainScores {
  using Scalar = T;
  using Acc = Accumulator<T>;
  static constexpr int N = kVectorSize<T>;
  static constexpr Table kTable = sizeof(T) == 8 ? Table::kCoarse : Table::kFine;
  static constexpr int kMaxVectors = 8;
  static constexpr int kResidentThreads = 1024;
  static constexpr int64_t kMaxResident = sizeof(T) == 8 ? 512 : 4096;  // vectors a row, no spills
  using Held = Vector<T>;

  const T* scores;  // strided [rows, cols]
  Acc scale;        // in eighths; not 0, see padding
  T padding;        // becomes -inf when scaled

  struct Row {
    const T* scores;  // [cols]
    uint32_t shift;   // misalignment of scores
  };

  __device__ __forceinline__ Row row(const DeviceRowLayout&, const RowOffsets& offsets) const {
    const T* start = scores + offsets.operand[0];
    return {start, misalignment(start)};
  }

  template <typename Index>
  __device__ __forceinline__ Held load(const Row& row, Index first, Index end) const {
    return load_vector(row.scores, first, end, row.shift, padding);
  }

  __device__ __forceinline__ Held removed() const {
    Held held = zero_vector<T>();
#pragma unroll
    for (int k = 0; k < N; ++k) put_element(held, k, padding);
    return held;
  }

  __device__ __forceinline__ Acc z(const Held& held, int k) const {
    return to_accumulator<Acc>(element(held, k)) * scale;
  }

  __device__ __forceinline__ bool is_selected(const Held&, int) const { return true; }

  static __device__ __forceinline__ void between_passes(Held& held) { keep_packed(held); }
};

// A bit for each of N flags that is false (0 byte). Every other byte counts as true.
template <int N>
__device__ __forceinline__ uint32_t false_bits(const uint32_t (&words)[(N + 3) / 4]) {
  uint32_t bits = 0;
#pragma unroll
  for (int w = 0; w < (N + 3) / 4; ++w) {
    const uint32_t high = ((words[w] & 0x7f7f7f7fu) + 0x7f7f7f7fu) | words[w];
    const uint32_t is_zero = ~high >> 7 & 0x01010101u;        // one bit a byte
    bits |= (is_zero * 0x01020408u >> 24 & 0xfu) << (4 * w);  // gathered into four
  }
  return bits & ((1u << N) - 1u);
}

// Bits of the columns [first, first + N) that a bool row doesn't remove; 0 from `end` on.
template <int N, typename Index>
__device__ __forceinline__ uint32_t selected_columns(const uint8_t* __restrict__ row,  // [>= end]
                                                     Index first, Index end) {
  constexpr int kWords = (N + 3) / 4;
  uint32_t words[kWords] = {};
  const uint8_t* address = row + first;
  const uint32_t shift = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(address) % 4);
  if (N >= 4 && (shift == 0 ? first + N <= end : first > 3 && first + N + 4 <= end)) {
    const auto* aligned = reinterpret_cast<const uint32_t*>(address - shift);
    uint32_t low = aligned[0];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t high = shift == 0 && w + 1 == kWords ? 0u : aligned[w + 1];
      words[w] = __funnelshift_r(low, high, 8 * shift);
      low = high;
    }
    return false_bits<N>(words);
  }
#pragma unroll
  for (int k = 0; k < N; ++k) {
    words[k / 4] |= static_cast<uint32_t>(row[column_within(first + k, end)]) << (8 * (k % 4));
  }
  const Index left = end - first;
  const uint32_t within = left >= N ? ~0u : (1u << left) - 1u;
  return false_bits<N>(words) & within;
}

// Scores times scale, kept packed, and a bit a column that says what a bool mask selects.
template <typename T>
struct SelectedScores {
  using Scalar = T;
  using Acc = Accumulator<T>;
  static constexpr int N = kVectorSize<T>;
  static constexpr Table kTable = sizeof(T) == 8 ? Table::kCoarse : Table::kFine;
  static constexpr int kMaxVectors = 4;
  static constexpr int kResidentThreads = 1024;
  static constexpr int64_t kMaxResident = sizeof(T) == 8 ? 512 : 2048;  // vectors a row, no spills
  struct Held {
    Vector<T> scores;
    uint32_t selected;  // bit k: column first + k
  };

  const T* scores;      // strided [rows, cols]
  Acc scale;            // in eighths
  const uint8_t* mask;  // strided, broadcasts to [rows, cols]; columns one after the other

  struct Row {
    const T* scores;      // [cols]
    const uint8_t* mask;  // [cols]
    uint32_t shift;       // misalignment of scores
  };

  __device__ __forceinline__ Row row(const DeviceRowLayout&, const RowOffsets& offsets) const {
    const T* start = scores + offsets.operand[0];
    return {start, mask + offsets.operand[1], misalignment(start)};
  }

  template <typename Index>
  __device__ __forceinline__ Held load(const Row& row, Index first, Index end) const {
    return {load_vector(row.scores, first, end, row.shift, from_accumulator<T>(Acc{0})),
            selected_columns<N>(row.mask, first, end)};
  }

  __device__ __forceinline__ Held removed() const { return {zero_vector<T>(), 0u}; }

  __device__ __forceinline__ Acc z(const Held& held, int k) const {
    const Acc z = to_accumulator<Acc>(element(held.scores, k)) * scale;
    return is_selected(held, k) ? z : negative_infinity(Acc{});
  }

  __device__ __forceinline__ bool is_selected(const Held& held, int k) const {
    return held.selected >> k & 1u;
  }

  static __device__ __forceinline__ void between_passes(Held& held) { keep_packed(held.scores); }
};

}  // namespace sms_plugin
