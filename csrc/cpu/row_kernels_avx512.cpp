// Row kernels for AVX-512.

#if defined(__x86_64__)

// Standard headers come before the target: what they define is shared with the rest of the library.
#include <immintrin.h>

#include <cfloat>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "row_kernels.h"

#define SMS_PLUGIN_HAS_FMA
#define SMS_PLUGIN_HAS_F16C

#if defined(__clang__)
#pragma clang attribute push(                                                                 \
    __attribute__((                                                                           \
        target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif

#include "row_kernels_impl.h"

namespace sms_plugin {

const RowKernelSet kAvx512Kernels = kernel_set();

}  // namespace sms_plugin

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
