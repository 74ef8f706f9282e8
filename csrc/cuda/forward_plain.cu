#include "launch_forward.cuh"

namespace sms_plugin {

template <typename T>
void launch_plain(const ForwardArguments& arguments, cudaStream_t stream) {
  const auto scores = operand_of<T>(arguments.scores, arguments.layout, 0);
  launch_forward_with(PlainScores<T>(scores, arguments.scale), arguments,
                      starts_on_boundaries(scores, arguments.layout, 0), stream);
}

template void launch_plain<__half>(const ForwardArguments&, cudaStream_t);
template void launch_plain<__nv_bfloat16>(const ForwardArguments&, cudaStream_t);
template void launch_plain<float>(const ForwardArguments&, cudaStream_t);
template void launch_plain<double>(const ForwardArguments&, cudaStream_t);

}  // namespace sms_plugin
