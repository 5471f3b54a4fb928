// Memory that is not taken yet, and that questions count as taken (memory_left.h).
#pragma once

#include <cstdint>

namespace baton::base {

// Promises so many bytes more, or fewer, to a part of this program, or a child of it, that takes
// them later without asking: memory_left() is less by them. Any thread.
void promise_memory(int64_t more);

}  // namespace baton::base
