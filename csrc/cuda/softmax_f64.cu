#include "launch.cuh"

namespace sms_plugin {

template void launch_forward<double>(const ForwardArguments&, cudaStream_t);
template void launch_backward<double>(const BackwardArguments&, cudaStream_t);
template bool takes_backward_biased<double>(const RowLayout&, bool);
template bool takes_dz<double>(const BiasGradArguments&);
template void launch_backward_biased<double>(const BiasGradArguments&, cudaStream_t);
template void launch_bias_grad<double>(const BiasGradArguments&, cudaStream_t);

}  // namespace sms_plugin
