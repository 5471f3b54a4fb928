// Include before Highway: which instruction sets the loops are compiled for.
#pragma once

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define BATON_SANITIZED_LOOPS 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define BATON_SANITIZED_LOOPS 1
#endif
#endif

// AVX-512, AVX2, SSE4 and a fallback are enough; fewer targets compile faster. Sanitizers' builds,
// which do not optimise the loops, have what machines that run them take, and the fallback:
// emulated vectors, whose every lane is looked at, take six times as long.
#ifdef BATON_SANITIZED_LOOPS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3 | HWY_AVX3_DL)
#else
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#endif
