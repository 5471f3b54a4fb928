// Include before Highway: which instruction sets the kernels are compiled for, and unrolling.
#pragma once

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define BATON_SANITIZED_KERNELS 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define BATON_SANITIZED_KERNELS 1
#endif
#endif

// AVX2 with FMA, AVX-512, SSE4 and a scalar fallback are enough; fewer targets compile faster. The
// fallback is not emulated vectors: GCC 12 cannot, and Clang takes longer for them than for the
// rest.
#define HWY_BROKEN_EMU128 1

// With a sanitizer, which checks every load, an unrolled loop takes minutes to compile. Those
// builds therefore keep loops rolled, and leave out targets that no machine that runs a sanitizer
// would select.
#ifdef BATON_SANITIZED_KERNELS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#define BATON_UNROLL
#else
#define HWY_DISABLED_TARGETS HWY_SSSE3
#ifdef __clang__
#define BATON_UNROLL _Pragma("clang loop unroll(full)")
#else
#define BATON_UNROLL _Pragma("GCC unroll 16")
#endif
#endif

#define BATON_INLINE static HWY_INLINE
