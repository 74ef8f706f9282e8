// Row kernels for AVX-512.

#if defined(__x86_64__)

// Standard headers come before the target: what they define is shared with the rest of the library.
#include <immintrin.h>

#include <cfloat>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

#include "row_cursor.h"
#include "row_kernels.h"

#define SMS_PLUGIN_VECTOR_BYTES 64

#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
// GCC's own intrinsics start from registers that they leave undefined on purpose.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#include "row_kernels_impl.h"

namespace sms_plugin {

const RowKernelSet kAvx512Kernels = kernel_set();

}  // namespace sms_plugin

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
