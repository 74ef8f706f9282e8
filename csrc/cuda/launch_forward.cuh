// Launches of the forward over a load functor. Included by the files that instantiate them.

#pragma once

#include "forward.cuh"
#include "launch.cuh"
#include "terms.cuh"

namespace sms_plugin {

// Vectors of a part that a thread holds.
constexpr int kForwardPartVectors = 8;

template <bool kIsPlain, typename Load>
void launch_forward_as(const Load& load, const ForwardArguments& arguments, cudaStream_t stream) {
  using T = typename Load::Scalar;
  const DeviceRowLayout layout(arguments.layout);
  const CausalLimit causal = arguments.causal;
  auto* probs = static_cast<T*>(arguments.probs);
  const int64_t vectors = vectors_of<T>(layout.cols);
  if constexpr (Load::kTable == Table::kPacked || Load::kTable == Table::kMasked) {
    if (vectors > kMaxWhole<Load::kTable> && layout.cols <= kMaxPartedCols) {
      constexpr int kVectors = kForwardPartVectors;
      launch_parts(softmax_forward_parts<Load, kVectors, kIsPlain, Stage::kCluster>,
                   softmax_forward_parts<Load, kVectors, kIsPlain, Stage::kTake>,
                   softmax_forward_parts<Load, kVectors, kIsPlain, Stage::kFinish>,
                   cut_rows(vectors, kPartThreads * kVectors), layout.rows, arguments.workspace,
                   stream, load, probs, layout, causal);
      return check_launch("softmax_forward_parts");
    }
  }
  with_mapping<Load::kTable>(vectors, causal.is_causal, [&](auto mapping) {
    using M = decltype(mapping);
    const unsigned int blocks = blocks_for(layout.rows, M::kRowsPerBlock);
    if constexpr (M::kIsStreaming) {
      softmax_forward_streaming<Load, M, kIsPlain>
          <<<blocks, M::kThreads, 0, stream>>>(load, probs, layout, causal);
    } else {
      softmax_forward<Load, M, kIsPlain>
          <<<blocks, M::kThreads, 0, stream>>>(load, probs, layout, causal);
    }
  });
  check_launch("softmax_forward");
}

template <typename Load>
void launch_forward_with(const Load& load, const ForwardArguments& arguments, bool is_plain,
                         cudaStream_t stream) {
  if (is_plain) {
    launch_forward_as<true>(load, arguments, stream);
  } else {
    launch_forward_as<false>(load, arguments, stream);
  }
}

}  // namespace sms_plugin
