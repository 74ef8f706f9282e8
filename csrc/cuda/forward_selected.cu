#include "launch_forward.cuh"

namespace sms_plugin {

template <typename T>
void launch_selected(const ForwardArguments& arguments, cudaStream_t stream) {
  const RowLayout& layout = arguments.layout;
  const auto scores = operand_of<T>(arguments.scores, layout, 0);
  const auto flags = operand_of<uint8_t>(arguments.mask.data, layout, 1);
  const bool are_aligned = starts_on_boundaries(scores, layout, 0) &&
                           starts_at_multiples(flags, layout, 1, kVectorSize<T>);
  launch_forward_with(SelectedScores<T>(scores, arguments.scale, flags), arguments, are_aligned,
                      stream);
}

template void launch_selected<__half>(const ForwardArguments&, cudaStream_t);
template void launch_selected<__nv_bfloat16>(const ForwardArguments&, cudaStream_t);
template void launch_selected<float>(const ForwardArguments&, cudaStream_t);
template void launch_selected<double>(const ForwardArguments&, cudaStream_t);

}  // namespace sms_plugin
