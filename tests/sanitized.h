// Tests that repeat something in search of rare cases do so less often where a sanitizer makes each
// case five to thirty times as slow. What they cover stays; how much of chance does not.
#pragma once

#include <cstddef>
#include <iostream>

namespace baton {

#if defined(__SANITIZE_THREAD__)
#define BATON_THREAD_SANITIZED 1
#elif defined(__SANITIZE_ADDRESS__)
#define BATON_ADDRESS_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define BATON_THREAD_SANITIZED 1
#elif __has_feature(address_sanitizer)
#define BATON_ADDRESS_SANITIZED 1
#endif
#endif

#ifdef BATON_THREAD_SANITIZED
inline constexpr bool kThreadSanitized = true;
#else
inline constexpr bool kThreadSanitized = false;
#endif
#ifdef BATON_ADDRESS_SANITIZED
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = kThreadSanitized;
#endif

// How often: `all` times, or `few` under a sanitizer, which the test's output then says.
inline int rounds_of(int all, int few) {
  if (!kSanitized) return all;
  std::cout << "under a sanitizer: " << few << " rounds of " << all << "\n";
  return few;
}

// Whether the n-th of one list is tried with the k-th of another, which has so many: every pair is,
// but under a sanitizer each of the first with one of the second, in turn.
inline bool tried_together(size_t n, size_t k, size_t count) {
  return !kSanitized || n % count == k;
}

}  // namespace baton
