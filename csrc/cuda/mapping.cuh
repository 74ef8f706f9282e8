// Which threads own a row: the launch table.

#pragma once

#include <cstdint>

#include "primitives.cuh"

namespace sms_plugin {

// kLanes threads share a row, kVectors vectors of 16 bytes each; blocks have kThreads threads.
template <int kLanes_, int kVectors_>
struct Mapping {
  static constexpr int kLanes = kLanes_;
  static constexpr int kVectors = kVectors_;
  static constexpr int kThreads = kLanes_ > kWarpSize ? kLanes_ : 128;
  static constexpr int kRowsPerBlock = kThreads / kLanes_;
};

// Rows that don't fit in registers are read in steps of a vector a thread, summed in this many
// accumulators in turn. Eight of them give the order of the tree for rows of up to eight steps:
// where a kernel keeps such a row in registers and where it streams is no part of the result.
// Doubles have one limit for all kernels, so that one accumulator is enough.
constexpr int kStreamingThreads = 512;
template <typename Acc>
constexpr int kStreamingSums = sizeof(Acc) == sizeof(double) ? 1 : 8;

// Which table a load functor uses.
enum class Table {
  kFine,    // rows stay packed: the mapping decides the speed
  kCoarse,  // z is held in 32 or 64 bits: fewer kernels, and none that spills
};

// Blocks that a multiprocessor has to hold: left to itself the compiler spills to make room for
// more. Load::kResidentThreads is what keeps enough loads in flight in as many registers as its row
// needs.
template <typename Load>
constexpr int min_blocks(int threads) {
  return Load::kResidentThreads > threads ? Load::kResidentThreads / threads : 1;
}

// Calls `launch` with the mapping of a row of `vectors` vectors. Rows of up to 1 KB share a warp,
// so that each lane has two loads in flight; from 4 KB on a block owns a row, as narrow as the row
// allows: several rows then overlap their barriers. The order of summation is the same under every
// mapping (tree_sum): the table can be tuned without changing a bit of any result.
template <typename Load, typename Launch>
void with_mapping(int64_t vectors, Launch&& launch) {
  if constexpr (Load::kTable == Table::kCoarse) {
    if (vectors <= 8) return launch(Mapping<4, 2>{});
    if (vectors <= 32) return launch(Mapping<16, 2>{});
    if (vectors <= 128) return launch(Mapping<32, 4>{});
    if (vectors <= 256) return launch(Mapping<64, 4>{});
    if (vectors <= 512) return launch(Mapping<128, 4>{});
    if constexpr (Load::kMaxResident > 512) {
      if (vectors <= 2048) return launch(Mapping<512, 4>{});
    }
    if constexpr (Load::kMaxResident > 2048) return launch(Mapping<1024, 4>{});
  } else {
    if (vectors <= 2) return launch(Mapping<2, 1>{});
    if (vectors <= 8) return launch(Mapping<4, 2>{});
    if (vectors <= 16) return launch(Mapping<8, 2>{});
    if (vectors <= 32) return launch(Mapping<16, 2>{});
    if (vectors <= 64) return launch(Mapping<32, 2>{});
    if (vectors <= 128) return launch(Mapping<32, 4>{});
    if (vectors <= 256) return launch(Mapping<64, 4>{});
    if (vectors <= 512) return launch(Mapping<512 / Load::kMaxVectors, Load::kMaxVectors>{});
    if (vectors <= 1024) return launch(Mapping<1024 / Load::kMaxVectors, Load::kMaxVectors>{});
    if (vectors <= 2048) return launch(Mapping<2048 / Load::kMaxVectors, Load::kMaxVectors>{});
    if constexpr (Load::kMaxResident > 2048) return launch(Mapping<512, 8>{});
  }
}

// The same for the kernel that also sums a bias gradient: it holds 32 bits more for each element,
// hence fewer vectors a lane.
template <typename Load>
constexpr int64_t kMaxBiasedVectors = sizeof(typename Load::Scalar) == 8 ? 256 : 2048;

template <typename Load, typename Launch>
void with_biased_mapping(int64_t vectors, Launch&& launch) {
  if (vectors <= 8) return launch(Mapping<4, 2>{});
  if (vectors <= 16) return launch(Mapping<8, 2>{});
  if (vectors <= 32) return launch(Mapping<16, 2>{});
  if (vectors <= 64) return launch(Mapping<32, 2>{});
  if (vectors <= 128) return launch(Mapping<64, 2>{});
  if (vectors <= 256) return launch(Mapping<128, 2>{});
  if constexpr (kMaxBiasedVectors<Load> > 256) {
    if (vectors <= 512) return launch(Mapping<256, 2>{});
    if (vectors <= 1024) return launch(Mapping<512, 2>{});
    if (vectors <= 2048) return launch(Mapping<512, 4>{});
  }
}

}  // namespace sms_plugin
