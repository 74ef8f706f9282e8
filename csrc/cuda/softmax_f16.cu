#include "launch.cuh"

namespace sms_plugin {

template void launch_forward<__half>(const ForwardArguments&, cudaStream_t);
template void launch_backward<__half>(const BackwardArguments&, cudaStream_t);
template bool takes_backward_biased<__half>(const RowLayout&, bool);
template bool takes_dz<__half>(const BiasGradArguments&);
template void launch_backward_biased<__half>(const BiasGradArguments&, cudaStream_t);
template void launch_bias_grad<__half>(const BiasGradArguments&, cudaStream_t);

}  // namespace sms_plugin
