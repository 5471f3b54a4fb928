// How much memory this process can still take before something is killed for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/unique_fd.h"

namespace baton::base {

struct MemoryLeft {
  size_t bytes;
  std::string limit;  // for people: what ends there, and how to have more
};

// The least of what the machine and the memory cgroups of this process leave (version 2 and 1, and
// those above them). Without swapping; file pages that the kernel would drop count as free. Not of
// pages from the pool of huge pages, which are counted elsewhere.
MemoryLeft memory_left();
// ResourceExhausted: `what`, of `bytes` bytes, is larger than that. Ask before you touch memory.
absl::Status memory_fits(std::string_view what, size_t bytes);
// Touches every page of memory that was just mapped, 64 MiB at a time, and asks before each part:
// other processes may take memory meanwhile. ResourceExhausted: the rest does not fit any more.
absl::Status fault_in(std::string_view what, std::byte* data, size_t bytes);
// For arrays that have no status to return: throws OutOfMemory where `bytes` and 32 MiB more, for
// everything that is too small to ask for, do not fit. Asks from 1 MiB on.
void need_memory(size_t bytes);
class OutOfMemory final : public std::bad_alloc {
 public:
  explicit OutOfMemory(const absl::Status& why) : why_(why.message()) {}
  const char* what() const noexcept override { return why_.c_str(); }

 private:
  const std::string why_;
};
// Touches every page without asking.
void fault_in(std::byte* data, size_t bytes);

// In tests: /proc and /sys/fs/cgroup are looked for below this folder from now on. "": where they
// are.
void look_for_memory_below(std::string folder);

// Memory that is not taken yet, and that questions count as taken (memory_left.h).

// Promises so many bytes more, or fewer, to a part of this program, or a child of it, that takes
// them later without asking: memory_left() is less by them. Any thread.
void promise_memory(int64_t more);

// Memory of a cache: touched when it is made, so that no transfer waits for pages, and a file where
// other processes of this machine shall map it.

class CacheMemory {
 public:
  struct Wanted {
    size_t bytes = 0;        // rounded up to pages
    bool mappable = true;    // by other processes, unless a sandbox refuses memfd_create
    bool huge_pages = true;  // where the kernel has them
  };
  // ResourceExhausted: this machine, or this process's memory cgroup, has not so much memory left.
  static absl::StatusOr<CacheMemory> make(const Wanted& wanted);

  std::byte* data() const { return memory_.get(); }
  size_t size() const { return memory_.get_deleter().bytes; }
  int file() const { return file_.get(); }  // -1: other processes cannot map it

 private:
  struct Unmap {
    size_t bytes;
    void operator()(std::byte* memory) const;
  };
  UniqueFd file_;
  std::unique_ptr<std::byte, Unmap> memory_;
};

}  // namespace baton::base
