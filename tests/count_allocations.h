// Counts the heap allocations of a test program. Link count_allocations.cc into it; not with
// sanitizers, which bring their own allocator.
#pragma once

#include <atomic>
#include <cstdint>

namespace baton {

// Allocations of this process so far, on all threads.
extern std::atomic<uint64_t> allocations;

}  // namespace baton
