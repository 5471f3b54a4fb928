// System calls that fail on demand: a test program that links failing_calls.cc has its own send(),
// recv(), mmap() and so on in front of libc's. Of the calls that one thread makes while armed, the
// k-th fails as the kernel may let it fail: with an error that belongs to it, or short.
#pragma once

#include <cstddef>
#include <string>

namespace baton::hostile {

// From now on the calls of this thread are counted, and number `which` (from 1; 0: none) fails in
// the `flavour`-th of the ways that it can (modulo their number), and the next `more` of the same
// kind with it.
void arm(size_t which, size_t flavour, size_t more);
// Stops counting; returns how many calls there were.
size_t disarm();
// What was made to fail since arm(), such as "recvmsg ECONNRESET"; empty if nothing was.
const std::string& what_failed();

}  // namespace baton::hostile
