// What the row kernels may assume of an instruction set. The sources of the kernels are compiled
// once for each; row_kernels_<name>.cpp sets the width before it includes them.

#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Bytes of one vector register: 64 AVX-512, 32 AVX2 with FMA and F16C, 16 any processor.
#if !defined(SMS_PLUGIN_VECTOR_BYTES)
#define SMS_PLUGIN_VECTOR_BYTES 16
#endif

#define SMS_PLUGIN_INLINE inline __attribute__((always_inline))
#define SMS_PLUGIN_INLINE_LAMBDA __attribute__((always_inline))

// Before a loop over the registers of one group: they stay registers only if it is unrolled early.
#if defined(__clang__)
#define SMS_PLUGIN_UNROLL _Pragma("clang loop unroll(full)")
#else
#define SMS_PLUGIN_UNROLL _Pragma("GCC unroll 8")
#endif
