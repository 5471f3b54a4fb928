// Asks for a cache line that is about to be written, before there is anything to write.
#pragma once

namespace baton::base {

// A line that another core has read costs its next writer a round trip between the two: asked for
// early, it takes place while there is nothing else to do. Never faults, and is only a hint.
inline void prefetch_to_write(const void* line) {
#if defined(__x86_64__)
  // The builtin would fetch the line to read, unless all processors here were known to have this.
  asm volatile("prefetchw %0" ::"m"(*static_cast<const char*>(line)));
#else
  __builtin_prefetch(line, 1, 3);
#endif
}

}  // namespace baton::base
