// How much memory this process can still take before something is killed for it.
#pragma once

#include <cstddef>
#include <string>

namespace baton::base {

struct MemoryLeft {
  size_t bytes;
  std::string limit;  // for people: what ends there, and how to have more
};

// The least of what the machine and the memory cgroups of this process leave (version 2 and 1, and
// those above them). Without swapping; file pages that the kernel would drop count as free. Not of
// pages from the pool of huge pages, which are counted elsewhere.
MemoryLeft memory_left();

// In tests: /proc and /sys/fs/cgroup are looked for below this folder from now on. "": where they
// are.
void look_for_memory_below(std::string folder);

}  // namespace baton::base
