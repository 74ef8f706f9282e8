#include "launch_biased.cuh"

namespace sms_plugin {

template void launch_biased<__half, __half>(const ForwardArguments&, int, cudaStream_t);
template void launch_biased<__nv_bfloat16, __nv_bfloat16>(const ForwardArguments&, int,
                                                          cudaStream_t);
template void launch_biased<float, float>(const ForwardArguments&, int, cudaStream_t);

}  // namespace sms_plugin
