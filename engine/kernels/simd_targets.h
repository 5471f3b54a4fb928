// Include before Highway: which instruction sets the kernels are compiled for, and unrolling.
#pragma once

// AVX2 with FMA, AVX-512, SSE4 and a scalar fallback are enough; fewer targets compile faster.
#define HWY_DISABLED_TARGETS HWY_SSSE3

#define BATON_INLINE static HWY_INLINE
#if defined(__clang__)
#define BATON_UNROLL _Pragma("clang loop unroll(full)")
#else
#define BATON_UNROLL _Pragma("GCC unroll 16")
#endif
