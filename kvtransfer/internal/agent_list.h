// A prepared list of descriptors: where each lies in which region, in as few segments as the list's
// regularity allows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvtransfer/agent.h"
#include "kvtransfer/internal/agent_files.h"
#include "kvtransfer/internal/agent_ranges.h"

namespace baton::kvtransfer {

// Descriptors that follow each other with one step and one size, all in one region.
struct AgentSegment {
  uint64_t offset = 0;  // of the first, in its region
  uint64_t step = 0;    // modulo 2^64: may go backwards
  uint64_t bytes = 0;   // of each
  uint32_t use = 0;     // which AgentList::Use
  uint32_t first = 0;   // index of the first descriptor
};

// What a transfer needs to know of one registered range that a list touches. Offsets of the list's
// descriptors differ by multiples of `unit`.
struct AgentUse {
  MemoryRegion local;   // of a local list
  RemoteRegion remote;  // of a remote one
  FileRegion file;      // of one of files
  uint64_t unit = 0;    // 0: all offsets are equal
  uint64_t lowest = 0;  // offset
};

// Immutable once made; shared by the transfers that are being made from it.
class AgentList {
 public:
  struct Place {
    const AgentSegment* segment;
    uint64_t offset;
  };

  uint64_t size() const { return size_; }
  const std::vector<AgentUse>& uses() const { return uses_; }

  // index < size()
  Place at(uint64_t index) const {
    const AgentSegment* segment = segments_.data();
    if (per_segment_ != 0) {
      segment += per_segment_ == 1 ? index : index / per_segment_;
    } else if (!segment_of_.empty()) {
      segment += segment_of_[index];
    }
    return {segment, segment->offset + (index - segment->first) * segment->step};
  }

  bool of_files() const { return uses_[0].file.file != nullptr; }

  MemoryKind kind = MemoryKind::kDram;  // of all that it lists
  // Whose memory it lists: empty for this agent's own.
  std::string agent;
  uint64_t epoch = 0;  // of that agent's metadata

 private:
  template <typename Region>
  friend class AgentListMaker;

  std::vector<AgentUse> uses_;
  std::vector<AgentSegment> segments_;
  uint64_t size_ = 0;
  uint64_t per_segment_ = 0;          // descriptors in each but the last; 0: they differ
  std::vector<uint32_t> segment_of_;  // of each descriptor, where they differ
};

// Makes a list out of descriptors, or of rows of them. NotFound names the first one that `ranges`
// do not cover; InvalidArgument a row that makes no sense, or a list that is empty or too long.
// `whose` and `kind` say what is listed. Region: MemoryRegion, RemoteRegion, FileRegion; Row:
// Descriptor, StridedDescriptor.
template <typename Region, typename Row>
absl::StatusOr<AgentList> make_agent_list(const AgentRanges<Region>& ranges,
                                          absl::Span<const Row> rows, const std::string& whose,
                                          MemoryKind kind = MemoryKind::kDram);

}  // namespace baton::kvtransfer
