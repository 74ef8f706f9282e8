#include "launch.cuh"

namespace sms_plugin {

template void launch_forward<__half>(const ForwardArguments&, cudaStream_t);
template void launch_backward<__half>(const BackwardArguments&, cudaStream_t);
template void launch_bias_grad<__half>(const BiasGradArguments&, cudaStream_t);

}  // namespace sms_plugin
