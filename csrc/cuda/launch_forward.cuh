// Launches of the forward over a load functor. Included by the files that instantiate them.

#pragma once

#include "forward.cuh"
#include "held_values.cuh"
#include "launch.cuh"
#include "terms.cuh"

namespace sms_plugin {

// Vectors of a part that a thread holds.
constexpr int kForwardPartVectors = 8;

// Rows that are cut into parts. Functors that hold z are rare there: two stages do, and one way to
// reach whole vectors. The order of summation is the same for all.
template <Access kAccess, typename Load>
void launch_forward_parts(const Load& load, const ForwardArguments& arguments, const Parts& parts,
                          cudaStream_t stream) {
  using T = typename Load::Scalar;
  constexpr int kVectors = kForwardPartVectors;
  const DeviceRowLayout layout(arguments.layout);
  auto* probs = static_cast<T*>(arguments.probs);
  if constexpr (kIsPacked<Load::kTable>) {
    launch_parts(softmax_forward_parts<Load, kVectors, kAccess, Stage::kCluster>,
                 softmax_forward_parts<Load, kVectors, kAccess, Stage::kTake>,
                 softmax_forward_parts<Load, kVectors, kAccess, Stage::kFinish>, parts, layout.rows,
                 arguments.workspace, stream, load, probs, layout, arguments.causal);
  } else {
    using Eighths = InEighths<Load>;
    constexpr Access kReached = kAccess == Access::kWhole ? Access::kShifted : kAccess;
    launch_stages(softmax_forward_parts<Eighths, kVectors, kReached, Stage::kTake>,
                  softmax_forward_parts<Eighths, kVectors, kReached, Stage::kFinish>, parts,
                  layout.rows, arguments.workspace, stream, Eighths(load), probs, layout,
                  arguments.causal);
  }
  check_launch("softmax_forward_parts");
}

template <Access kAccess, typename Load>
void launch_forward_as(const Load& load, const ForwardArguments& arguments, cudaStream_t stream) {
  using T = typename Load::Scalar;
  check_is_aligned(arguments.probs);
  const DeviceRowLayout layout(arguments.layout);
  const CausalLimit causal = arguments.causal;
  auto* probs = static_cast<T*>(arguments.probs);
  const int64_t vectors = vectors_of<T>(layout.cols);
  if constexpr (sizeof(T) < 8 && Load::kTable != Table::kSpread) {
    constexpr int64_t kMost = kPartThreads * kForwardPartVectors;
    if (vectors > kMost && layout.cols <= kMaxPartedCols) {
      return launch_forward_parts<kAccess>(load, arguments, cut_rows(vectors, kMost), stream);
    }
  }
  with_mapping_of<Load::kTable, kAccess>(vectors, causal.is_causal, [&](auto mapping) {
    using M = decltype(mapping);
    const unsigned int blocks = blocks_for(layout.rows, M::kRowsPerBlock);
    if constexpr (M::kIsStreaming) {
      softmax_forward_streaming<Load, M, kAccess>
          <<<blocks, M::kThreads, 0, stream>>>(load, probs, layout, causal);
    } else {
      softmax_forward<Load, M, kAccess>
          <<<blocks, M::kThreads, 0, stream>>>(load, probs, layout, causal);
    }
  });
  check_launch("softmax_forward");
}

// `are_aligned`: whether the operands lie on boundaries.
template <typename Load>
void launch_forward_with(const Load& load, const ForwardArguments& arguments, bool are_aligned,
                         cudaStream_t stream) {
  using T = typename Load::Scalar;
  switch (access_of<T>(arguments.layout.cols, are_aligned)) {
    case Access::kWhole:
      return launch_forward_as<Access::kWhole>(load, arguments, stream);
    case Access::kShifted:
      return launch_forward_as<Access::kShifted>(load, arguments, stream);
    case Access::kSpread:
      if (vectors_of<T>(arguments.layout.cols) > kMaxSpread) {
        return launch_forward_as<Access::kSpread>(load, arguments, stream);
      }
      return launch_forward_as<Access::kSpread>(typename SpreadForm<Load>::type(load), arguments,
                                                stream);
  }
}

}  // namespace sms_plugin
