#include "launch_forward.cuh"

namespace sms_plugin {

template <typename T>
void launch_general(const ForwardArguments& arguments, cudaStream_t stream) {
  const auto scores = operand_of<T>(arguments.scores, arguments.layout, 0);
  const Term mask{arguments.mask.data, static_cast<TermKind>(arguments.mask.kind)};
  const Term bias{arguments.bias.data, static_cast<TermKind>(arguments.bias.kind)};
  const GeneralScores<T> load(scores, arguments.scale, mask, bias);
  // Terms are read value by value: nothing would be gained from kernels for aligned scores.
  if (access_of<T>(arguments.layout.cols, false) == Access::kSpread) {
    launch_forward_as<Access::kSpread>(load, arguments, stream);
  } else {
    launch_forward_as<Access::kShifted>(load, arguments, stream);
  }
}

template void launch_general<__half>(const ForwardArguments&, cudaStream_t);
template void launch_general<__nv_bfloat16>(const ForwardArguments&, cudaStream_t);
template void launch_general<float>(const ForwardArguments&, cudaStream_t);
template void launch_general<double>(const ForwardArguments&, cudaStream_t);

}  // namespace sms_plugin
