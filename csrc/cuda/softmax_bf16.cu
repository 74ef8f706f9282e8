#include "launch.cuh"

namespace sms_plugin {

template void launch_forward<__nv_bfloat16>(const ForwardArguments&, cudaStream_t);
template void launch_backward<__nv_bfloat16>(const BackwardArguments&, cudaStream_t);
template bool takes_backward_biased<__nv_bfloat16>(const RowLayout&, bool);
template bool takes_dz<__nv_bfloat16>(const BiasGradArguments&);
template void launch_backward_biased<__nv_bfloat16>(const BiasGradArguments&, cudaStream_t);
template void launch_bias_grad<__nv_bfloat16>(const BiasGradArguments&, cudaStream_t);

}  // namespace sms_plugin
