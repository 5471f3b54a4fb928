// The owner's side: which regions peers may reach, published in the control segment, and the files
// behind them.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/region.h"
#include "transport/shm/cma.h"
#include "transport/shm/memory_file.h"
#include "transport/shm/segment.h"

namespace baton::shm {

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
  static void fill(SharedRegion& out, const RegionEntry& region, uint64_t base, uint64_t number,
                   uint64_t offset);
  SharedRegion& row(uint32_t index) { return file_.mapping.as<ControlSegment>()->regions[index]; }

  OwnFile file_;
  Gate gate_;
  std::vector<File> files_;
  uint64_t next_number_ = 1;
};

}  // namespace baton::shm
