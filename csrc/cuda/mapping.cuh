// Which threads own a row: the launch table.

#pragma once

#include <cstdint>

#include "columns.cuh"
#include "primitives.cuh"

namespace sms_plugin {

// The table was measured on compute capability 9.0. For others the compiler takes some registers
// more in the tightest kernels, which then get a block fewer instead of spilling.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr bool kHasMeasuredRegisters = false;
#else
constexpr bool kHasMeasuredRegisters = true;
#endif

// kLanes threads share a row, kVectors vectors of 16 bytes each. Blocks have kThreads threads:
// small ones mix reads with writes most evenly, and of 64 a multiprocessor can still be full. It
// has to hold at least kResident threads: what keeps enough loads in flight, in as many registers
// as a row needs (left to itself the compiler spills to make room for more).
template <int kLanes_, int kVectors_, int kResident = 1024,
          int kThreads_ = (kLanes_ < 64 ? 64 : kLanes_)>
struct Mapping {
  static constexpr int kLanes = kLanes_;
  static constexpr int kVectors = kVectors_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kRowsPerBlock = kThreads_ / kLanes_;
  static constexpr bool kIsStreaming = kVectors_ == 1 && kLanes_ > 256;

  static constexpr int min_blocks() {
    const bool has_few_spare = kVectors_ == 8 && !kHasMeasuredRegisters;
    const int threads = has_few_spare ? kResident * 3 / 4 : kResident;
    return threads > kThreads_ ? threads / kThreads_ : 1;
  }

  // Which row a thread works on, and its place among those that share the row.
  static __device__ __forceinline__ int64_t row() {
    return static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kLanes;
  }
  // The same, without anything that the compiler knows of it: worth no register until it is asked
  // for again.
  static __device__ __forceinline__ int64_t row_again() {
    uint32_t block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    return static_cast<int64_t>(block) * kRowsPerBlock + threadIdx.x / kLanes;
  }
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kLanes; }
};

// Rows that don't fit in registers are read in steps of a vector a thread, summed in this many
// accumulators in turn. Eight of them give the order of the tree for rows of up to eight steps:
// where a kernel keeps such a row in registers and where it streams is no part of the result.
// Doubles have one limit for all kernels, so that one accumulator is enough.
using Streaming = Mapping<512, 1>;
template <typename Acc>
constexpr int kStreamingSums = sizeof(Acc) == sizeof(double) ? 1 : 8;

// What a thread keeps of a vector, and with it how many it can hold.
enum class Table {
  kPacked,  // 16 bytes
  kMasked,  // the same, and a mask on its way
  kPair,    // two operands of 16 bytes
  kWide,    // a float32 for each value, and a term on its way
  kSpread,  // a float32 for each value that is loaded alone
  kRare,    // a float32 for each value, where few kernels have to do
  kDouble,  // float64
};

template <Table kTable>
constexpr bool kIsPacked = kTable == Table::kPacked || kTable == Table::kMasked;

// Calls `launch` with the mapping of a row of `vectors` whole vectors. Measured on an H200
// (scripts/results/NOTES.md): two loads a lane for short rows; from 1 KB on four, the row as narrow
// as it can be, so that several rows overlap their barriers. Half of a causal row isn't loaded: it
// takes twice the vectors for as much to be in flight. Rows that a block can't hold are
// cut into parts (parts.cuh), or streamed. The order of summation is the same
// under every mapping of whole vectors (tree_sum): the table can be tuned without changing a bit of
// any result.
template <Table kTable, typename Launch>
void with_mapping(int64_t vectors, bool is_causal, Launch&& launch) {
  if constexpr (kIsPacked<kTable>) {
    if (vectors <= 2) return launch(Mapping<2, 1>{});
    if (vectors <= 8) return launch(Mapping<4, 2>{});
    if (is_causal) {
      if (vectors <= 16) return launch(Mapping<4, 4>{});
      if (vectors <= 32) return launch(Mapping<8, 4>{});
      if (vectors <= 64) return launch(Mapping<16, 4>{});
    }
    if (vectors <= 16) return launch(Mapping<8, 2>{});
    if (vectors <= 32) return launch(Mapping<16, 2>{});
    if (vectors <= 48) return launch(Mapping<16, 3>{});
    if (vectors <= 64) return launch(Mapping<32, 2>{});
    if (vectors <= 96) return launch(Mapping<32, 3>{});
    if (vectors <= 128) return launch(Mapping<32, 4>{});
    if (vectors <= 160) return launch(Mapping<32, 5>{});
    if (vectors <= 256) return launch(Mapping<64, 4>{});
    if (vectors <= 320) return launch(Mapping<64, 5>{});
    if (vectors <= 512) return launch(Mapping<128, 4>{});
    if (vectors <= 640) return launch(Mapping<128, 5>{});
    if (vectors <= 1024) return launch(Mapping<256, 4>{});
    if constexpr (kTable == Table::kMasked) {
      if (vectors <= 2048) return launch(Mapping<256, 8, 768>{});
      if (vectors <= 4096) return launch(Mapping<512, 8, 512>{});
    } else {
      if (vectors <= 2048) return launch(Mapping<256, 8>{});
      if (vectors <= 4096) return launch(Mapping<512, 8>{});
    }
    return launch(Streaming{});
  } else if constexpr (kTable == Table::kPair) {
    if (vectors <= 2) return launch(Mapping<2, 1>{});
    if (vectors <= 8) return launch(Mapping<4, 2>{});
    if (is_causal) {
      if (vectors <= 16) return launch(Mapping<4, 4>{});
      if (vectors <= 32) return launch(Mapping<8, 4>{});
      if (vectors <= 64) return launch(Mapping<16, 4>{});
    }
    if (vectors <= 16) return launch(Mapping<8, 2>{});
    if (vectors <= 32) return launch(Mapping<16, 2>{});
    if (vectors <= 48) return launch(Mapping<16, 3>{});
    if (vectors <= 64) return launch(Mapping<32, 2>{});
    if (vectors <= 96) return launch(Mapping<32, 3>{});
    if (vectors <= 128) return launch(Mapping<32, 4>{});
    if (vectors <= 160) return launch(Mapping<64, 3>{});
    if (vectors <= 256) return launch(Mapping<64, 4>{});
    if (vectors <= 384) return launch(Mapping<128, 3>{});
    if (vectors <= 512) return launch(Mapping<128, 4>{});
    if (vectors <= 768) return launch(Mapping<256, 3>{});
    if (vectors <= 1024) return launch(Mapping<256, 4>{});
    if (vectors <= 2048) return launch(Mapping<512, 4>{});
    return launch(Streaming{});
  } else if constexpr (kTable == Table::kWide) {
    if (vectors <= 8) return launch(Mapping<4, 2, 768>{});
    if (vectors <= 16) return launch(Mapping<4, 4, 640>{});
    if (vectors <= 32) return launch(Mapping<8, 4, 640>{});
    if (vectors <= 48) return launch(Mapping<16, 3, 640>{});
    if (vectors <= 64) return launch(Mapping<16, 4, 640>{});
    if (vectors <= 96) return launch(Mapping<32, 3, 640>{});
    if (vectors <= 128) return launch(Mapping<32, 4, 640>{});
    if (vectors <= 160) return launch(Mapping<64, 3, 640>{});
    if (vectors <= 256) return launch(Mapping<64, 4, 640>{});
    if (vectors <= 512) return launch(Mapping<128, 4, 640>{});
    if (vectors <= 1024) return launch(Mapping<256, 4, 512>{});
    if (vectors <= 2048) return launch(Mapping<512, 4, 512>{});
    return launch(Streaming{});
  } else {
    if (vectors <= 8) return launch(Mapping<4, 2, 512>{});
    if (vectors <= 32) return launch(Mapping<16, 2, 512>{});
    if (vectors <= 128) return launch(Mapping<32, 4, 512>{});
    if (vectors <= 512) return launch(Mapping<128, 4, 512>{});
    return launch(Streaming{});
  }
}

// Kernels of which there are few.
template <Table kTable>
constexpr bool kIsRare = kTable == Table::kDouble || kTable == Table::kRare;

// Vectors of the longest row that is held value by value.
constexpr int64_t kMaxSpread = 2048;

// The same for rows of whole vectors that start anywhere: two granules are on their way for each.
template <Table kTable, typename Launch>
void with_shifted_mapping(int64_t vectors, Launch&& launch) {
  if constexpr (kIsRare<kTable> || kTable == Table::kWide) {
    if (vectors <= 8) return launch(Mapping<4, 2, 320>{});
    if (vectors <= 32) return launch(Mapping<16, 2, 320>{});
    if (vectors <= 128) return launch(Mapping<32, 4, 320>{});
    if (vectors <= 512) return launch(Mapping<128, 4, 320>{});
  } else {
    if (vectors <= 8) return launch(Mapping<4, 2, 640>{});
    if (vectors <= 16) return launch(Mapping<8, 2, 640>{});
    if (vectors <= 32) return launch(Mapping<16, 2, 640>{});
    if (vectors <= 128) return launch(Mapping<32, 4, 640>{});
    if (vectors <= 256) return launch(Mapping<64, 4, 640>{});
    if (vectors <= 512) return launch(Mapping<128, 4, 640>{});
    if (vectors <= 1024) return launch(Mapping<256, 4, 640>{});
    if (vectors <= 2048) return launch(Mapping<512, 4, 512>{});
    if constexpr (kTable != Table::kPair) {
      if (vectors <= 4096) return launch(Mapping<512, 8, 512>{});
    }
  }
  return launch(Streaming{});
}

// The same for rows of any other length. How many lanes of a warp share a row decides which columns
// they have, and so the order of summation: all tables have the same.
template <Table kTable, typename Launch>
void with_spread_mapping(int64_t vectors, Launch&& launch) {
  if constexpr (kIsPacked<kTable>) {
    if (vectors <= 4096) return launch(Mapping<512, 8, 512>{});  // shorter ones: SpreadForm
  } else if constexpr (kIsRare<kTable>) {
    if (vectors <= 4) return launch(Mapping<4, 1, 320>{});
    if (vectors <= 16) return launch(Mapping<8, 2, 320>{});
    if (vectors <= 48) return launch(Mapping<16, 3, 320>{});
    if (vectors <= 128) return launch(Mapping<32, 4, 320>{});
    if (vectors <= 512) return launch(Mapping<128, 4, 320>{});
  } else {
    // Every value is a load: what hides them is threads.
    constexpr bool kIsWide = kTable == Table::kWide;
    constexpr int kFour = kTable == Table::kSpread ? 896 : 640;
    if (vectors <= 4) return launch(Mapping<4, 1>{});
    if (vectors <= 8) return launch(Mapping<8, 1>{});
    if (vectors <= 16) return launch(Mapping<8, 2, kIsWide ? 768 : 1024>{});
    if (vectors <= 32) return launch(Mapping<16, 2, kIsWide ? 768 : 1024>{});
    if (vectors <= 48) return launch(Mapping<16, 3, 768>{});
    if (vectors <= 64) return launch(Mapping<32, 2, kIsWide ? 768 : 1024>{});
    if (vectors <= 96) return launch(Mapping<32, 3, 768>{});
    if constexpr (kTable == Table::kPair) {
      if (vectors <= 128) return launch(Mapping<64, 2>{});
      if (vectors <= 192) return launch(Mapping<64, 3, 768>{});
      if (vectors <= 256) return launch(Mapping<128, 2>{});
      if (vectors <= 384) return launch(Mapping<128, 3, 768>{});
      if (vectors <= 512) return launch(Mapping<256, 2>{});
      if (vectors <= 768) return launch(Mapping<256, 3, 768>{});
      if (vectors <= 1024) return launch(Mapping<512, 2>{});
      if (vectors <= 1280) return launch(Mapping<256, 5, 512>{});
    } else {
      if (vectors <= 128) return launch(Mapping<32, 4, kFour>{});
      if (vectors <= 160) return launch(Mapping<32, 5, 640>{});
      if (vectors <= 256) return launch(Mapping<64, 4, kFour>{});
      if constexpr (!kIsWide) {
        if (vectors <= 320) return launch(Mapping<64, 5, 640>{});
      }
      if (vectors <= 512) return launch(Mapping<128, 4, kFour>{});
      if constexpr (!kIsWide) {
        if (vectors <= 640) return launch(Mapping<128, 5, 640>{});
      }
      if (vectors <= 1024) return launch(Mapping<256, 4, kFour>{});
      if constexpr (!kIsWide) {
        if (vectors <= 1280) return launch(Mapping<256, 5, 512>{});
      }
    }
    if (kTable == Table::kSpread || vectors <= kMaxSpread) return launch(Mapping<512, 4, 512>{});
  }
  if constexpr (kTable != Table::kSpread) launch(Streaming{});
}

// Calls `launch` with the mapping for rows of `vectors` vectors that are reached by kAccess.
template <Table kTable, Access kAccess, typename Launch>
void with_mapping_of(int64_t vectors, bool is_causal, Launch&& launch) {
  if constexpr (kAccess == Access::kWhole) {
    with_mapping<kTable>(vectors, is_causal, launch);
  } else if constexpr (kAccess == Access::kShifted) {
    with_shifted_mapping<kTable>(vectors, launch);
  } else {
    with_spread_mapping<kTable>(vectors, launch);
  }
}

// The same for the kernel that also sums a bias gradient: it holds 32 bits more for each element,
// and the loads of the next row.
template <typename T>
constexpr int64_t kMaxBiasedVectors = sizeof(T) == 8 ? 256 : 1024;

template <typename T, Access kAccess, typename Launch>
void with_biased_mapping(int64_t vectors, Launch&& launch) {
  constexpr bool kIsNarrow = sizeof(T) == 4 && kAccess == Access::kWhole;
  if constexpr (kAccess == Access::kShifted) {
    if (vectors <= 8) return launch(Mapping<8, 1, 640>{});
    if (vectors <= 32) return launch(Mapping<16, 2, 320>{});
    if (vectors <= 96) return launch(Mapping<32, 3, 256>{});
    if (vectors <= 256) return launch(Mapping<128, 2, 320>{});
  } else {
    constexpr int kMost = kAccess == Access::kWhole ? 1024 : 768;
    if (vectors <= 4) return launch(Mapping<4, 1, kMost>{});
    if (vectors <= 8) return launch(Mapping<8, 1, kMost>{});
    if constexpr (kAccess == Access::kSpread) {
      if (vectors <= 16) return launch(Mapping<8, 2, sizeof(T) == 2 ? 512 : 640>{});
    } else {
      if (vectors <= 16) return launch(Mapping<16, 1>{});
    }
    if constexpr (kIsNarrow) {
      if (vectors <= 32) return launch(Mapping<32, 1>{});
      if (vectors <= 64) return launch(Mapping<64, 1>{});
    } else {
      if (vectors <= 32) return launch(Mapping<16, 2, 512>{});
      if (vectors <= 48) return launch(Mapping<16, 3, 384>{});
      if (vectors <= 64) return launch(Mapping<32, 2, 512>{});
    }
    if (vectors <= 96) return launch(Mapping<32, 3, 384>{});
    if (vectors <= 128) return launch(Mapping<64, 2, 512>{});
    if (vectors <= 192) return launch(Mapping<64, 3, 384>{});
    if (vectors <= 256) return launch(Mapping<128, 2, 512>{});
  }
  if constexpr (sizeof(T) < 8) {
    if (vectors <= 512) return launch(Mapping<256, 2, 512>{});
    if (vectors <= 768) return launch(Mapping<256, 3, 256>{});
    return launch(Mapping<256, 4, 256>{});
  }
}

}  // namespace sms_plugin
