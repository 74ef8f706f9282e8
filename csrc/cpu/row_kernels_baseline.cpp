// Row kernels for any processor of the architecture that the compiler was asked for.

#if defined(__aarch64__)
#define SMS_PLUGIN_HAS_FMA
#endif

#include "row_kernels_impl.h"

namespace sms_plugin {

const RowKernelSet kBaselineKernels = kernel_set();

}  // namespace sms_plugin
