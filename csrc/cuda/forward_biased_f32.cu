#include "launch_biased.cuh"

namespace sms_plugin {

template void launch_biased<__half, float>(const ForwardArguments&, int, cudaStream_t);
template void launch_biased<__nv_bfloat16, float>(const ForwardArguments&, int, cudaStream_t);

}  // namespace sms_plugin
