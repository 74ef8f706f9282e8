// Row kernels for any processor of the architecture that the compiler was asked for.

#include "row_kernels_impl.h"

namespace sms_plugin {

const RowKernelSet kBaselineKernels = kernel_set();

}  // namespace sms_plugin
