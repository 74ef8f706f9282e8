// Row kernels for AVX2, FMA and F16C: x86-64 processors since 2013.

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

#define SMS_PLUGIN_VECTOR_BYTES 32

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include "row_kernels_impl.h"

namespace sms_plugin {

const RowKernelSet kAvx2Kernels = kernel_set();

}  // namespace sms_plugin

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
