// The owner's side: which regions peers may reach, published in the control segment, and the files
// behind them.
#pragma once

#include <sys/resource.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "transport/region.h"
#include "transport/shm/cma.h"
#include "transport/shm/memory_file.h"

namespace baton::shm {

// Descriptors that are kept in case a peer needs them, as those of devices' memory are: half of
// those that a process may have at most. The others are for its sockets and files.

// Whether this one may be kept. ResourceExhausted: so many are open that it had better be closed;
// the kernel gives the lowest number that is free.
inline absl::Status may_be_kept(int fd) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || static_cast<rlim_t>(fd) < limit.rlim_cur / 2) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(
      absl::StrFormat("%d descriptors are open here of %u, and half are reserved for sockets and "
                      "files: raise `ulimit -n`, or register fewer and larger allocations",
                      fd, limit.rlim_cur));
}

class Exports {
 public:
  // A file behind one or more regions.
  struct File {
    uint64_t number = 0;
    uint64_t device = 0;
    uint64_t inode = 0;
    uint64_t bytes = 0;
    base::UniqueFd fd;
    uint32_t regions = 0;
    bool on_device = false;  // `device` and `inode` then name an allocation, as DeviceExport does
    DeviceExport exported = {};
  };

  static absl::StatusOr<Exports> create();

  // Makes a region visible to peers. Returns the number of its file when that is one they do not
  // know yet, else 0.
  absl::StatusOr<uint64_t> publish(const RegionEntry& region);

  // From here on no peer begins to copy to or from the region. Peers that are in the middle of it
  // must still be waited for.
  void revoke(uint32_t index);
  // Returns the number of the region's file when it was its last region, else 0.
  uint64_t forget_file(uint32_t index);

  const std::vector<File>& files() const { return files_; }
  const File* find_file(uint64_t number) const;
  const Gate& gate() const { return gate_; }
  int control_fd() const { return file_.fd.get(); }

 private:
  absl::StatusOr<uint64_t> publish_on_device(const RegionEntry& region);
  // The number of a file that is there, which is now behind one region more; 0: it is new.
  uint64_t share_file(bool on_device, uint64_t device, uint64_t inode);
  static void fill(SharedRegion& out, const RegionEntry& region, uint64_t base, uint64_t number,
                   uint64_t offset);
  SharedRegion& row(uint32_t index) { return file_.mapping.as<ControlSegment>()->regions[index]; }

  OwnFile file_;
  Gate gate_;
  std::vector<File> files_;
  uint64_t next_number_ = 1;
};

}  // namespace baton::shm
