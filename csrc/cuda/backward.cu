#include "launch_backward.cuh"

namespace sms_plugin {
namespace {

// Vectors of each operand of a part that a thread holds.
constexpr int kBackwardPartVectors = 4;

template <typename T, Access kAccess>
void launch_backward_as(const BackwardArguments& arguments, cudaStream_t stream) {
  using Load = GradAndProbs<T>;
  const Load load = backward_load<T>(arguments);
  const GradOut<T> out = backward_out<T>(arguments);
  const DeviceRowLayout layout(arguments.layout);
  const CausalLimit causal = arguments.causal;
  const int64_t vectors = vectors_of<T>(layout.cols);
  if constexpr (Load::kTable == Table::kPair) {
    constexpr int kVectors = kBackwardPartVectors;
    if (vectors > kPartThreads * kVectors && layout.cols <= kMaxPartedCols) {
      launch_parts(softmax_backward_parts<Load, kVectors, kAccess, Stage::kCluster>,
                   softmax_backward_parts<Load, kVectors, kAccess, Stage::kTake>,
                   softmax_backward_parts<Load, kVectors, kAccess, Stage::kFinish>,
                   cut_rows(vectors, kPartThreads * kVectors), layout.rows, arguments.workspace,
                   stream, load, out, layout, causal);
      return check_launch("softmax_backward_parts");
    }
  }
  with_mapping_of<Load::kTable, kAccess>(vectors, causal.is_causal, [&](auto mapping) {
    using M = decltype(mapping);
    const unsigned int blocks = blocks_for(layout.rows, M::kRowsPerBlock);
    if constexpr (M::kIsStreaming) {
      softmax_backward_streaming<Load, M, kAccess>
          <<<blocks, M::kThreads, 0, stream>>>(load, out, layout, causal);
    } else {
      softmax_backward<Load, M, kAccess>
          <<<blocks, M::kThreads, 0, stream>>>(load, out, layout, causal);
    }
  });
  check_launch("softmax_backward");
}

}  // namespace

template <typename T>
void launch_backward(const BackwardArguments& arguments, cudaStream_t stream) {
  if (arguments.layout.rows == 0 || arguments.layout.cols == 0) return;
  switch (backward_access<T>(arguments)) {
    case Access::kWhole:
      return launch_backward_as<T, Access::kWhole>(arguments, stream);
    case Access::kShifted:
      return launch_backward_as<T, Access::kShifted>(arguments, stream);
    case Access::kSpread:
      return launch_backward_as<T, Access::kSpread>(arguments, stream);
  }
}

template void launch_backward<__half>(const BackwardArguments&, cudaStream_t);
template void launch_backward<__nv_bfloat16>(const BackwardArguments&, cudaStream_t);
template void launch_backward<float>(const BackwardArguments&, cudaStream_t);
template void launch_backward<double>(const BackwardArguments&, cudaStream_t);

}  // namespace sms_plugin
