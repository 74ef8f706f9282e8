// Launches of the forward over a load functor. Included by the files that instantiate them.

#pragma once

#include "forward.cuh"
#include "held_values.cuh"
#include "launch.cuh"
#include "terms.cuh"

namespace sms_plugin {

// Vectors of a part that a thread holds.
constexpr int kForwardPartVectors = 8;

template <Access kAccess, typename Load>
void launch_forward_as(const Load& load, const ForwardArguments& arguments, cudaStream_t stream) {
  using T = typename Load::Scalar;
  check_is_aligned(arguments.probs);
  const DeviceRowLayout layout(arguments.layout);
  const CausalLimit causal = arguments.causal;
  auto* probs = static_cast<T*>(arguments.probs);
  const int64_t vectors = vectors_of<T>(layout.cols);
  if constexpr (Load::kTable == Table::kPacked || Load::kTable == Table::kMasked) {
    if (vectors > kMaxWhole<Load::kTable> && layout.cols <= kMaxPartedCols) {
      constexpr int kVectors = kForwardPartVectors;
      launch_parts(softmax_forward_parts<Load, kVectors, kAccess, Stage::kCluster>,
                   softmax_forward_parts<Load, kVectors, kAccess, Stage::kTake>,
                   softmax_forward_parts<Load, kVectors, kAccess, Stage::kFinish>,
                   cut_rows(vectors, kPartThreads * kVectors), layout.rows, arguments.workspace,
                   stream, load, probs, layout, causal);
      return check_launch("softmax_forward_parts");
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
