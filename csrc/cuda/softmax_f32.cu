#include "launch.cuh"

namespace sms_plugin {

template void launch_forward<float>(const ForwardArguments&, cudaStream_t);
template void launch_backward<float>(const BackwardArguments&, cudaStream_t);
template bool takes_backward_biased<float>(const RowLayout&, bool);
template bool takes_dz<float>(const BiasGradArguments&);
template void launch_backward_biased<float>(const BiasGradArguments&, cudaStream_t);
template void launch_bias_grad<float>(const BiasGradArguments&, cudaStream_t);

}  // namespace sms_plugin
