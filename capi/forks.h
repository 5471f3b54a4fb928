// What a fork must not find half done, and how a child knows that it is one.
#pragma once

#include <cstdint>

namespace baton::capi {

// Counts in a child what forks lie between it and the process that loaded the library.
uint32_t forks();

// A fork waits until nobody has one of these, for a second at most: what is done meanwhile takes
// locks and makes objects that are the whole process's, and a child would find them taken or half
// made, for ever. While a fork waits, others wait for it.
class ForkWaits {
 public:
  ForkWaits();
  ~ForkWaits();
  ForkWaits(const ForkWaits&) = delete;
  ForkWaits& operator=(const ForkWaits&) = delete;
};

}  // namespace baton::capi
