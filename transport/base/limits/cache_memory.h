// Memory of a cache: touched when it is made, so that no transfer waits for pages, and a file where
// other processes of this machine shall map it.
#pragma once

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "transport/base/unique_fd.h"

namespace baton::base {

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
