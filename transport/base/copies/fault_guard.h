// Copies of memory that may have gone away: unmapped or protected while it was registered, or a
// file that was truncated behind its mapping.
//
// A copy that meets such a page raises SIGSEGV or SIGBUS in the thread that copies. The kernel,
// asked to copy instead, would say EFAULT, but takes 0.5 us more for a small copy and twice the
// time for a large one. So the fault itself ends the copy: there is a handler for both signals from
// the first guarded copy on, which stays when the library is unloaded, and a thread that had them
// blocked at its first guarded copy has not any more: blocked, a fault is the end. What it was not
// asked to guard it leaves to the handler that was there before, or to the system, as if it were
// not there. But a handler of another signal that interrupts a copy, and faults, is taken for the
// copy. BATON_CATCH_FAULTS=no: there is none.
#pragma once

#include <cstddef>

#include "absl/status/status.h"

namespace baton::base {

bool run_guarded(void (*copy)(const void*), const void* what);

// Calls copy(), which reads and writes memory and does nothing else: takes no lock, calls no code
// of others, has nothing to destroy. False: some of that memory is not there any more, or may not
// be written; no caller can say how much was copied before. 5 ns.
template <typename Copy>
[[nodiscard]] bool guarded(const Copy& copy) {
  return run_guarded([](const void* what) { (*static_cast<const Copy*>(what))(); }, &copy);
}

// Whether both ends of this memory, which lies in two pages at most, can be read.
[[nodiscard]] bool readable(const std::byte* data, size_t bytes);

// The error that the initiator gets for memory that was unmapped.
absl::Status source_is_gone();
absl::Status target_is_gone();

}  // namespace baton::base
