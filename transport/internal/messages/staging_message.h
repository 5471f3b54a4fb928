// What two workers say to each other about chunks that are staged at the target: the notification
// of a transfer whose counter is CounterTable::kStaging, so every provider carries it, and it
// arrives once.
//
// A write of a chunk, and a read of one; the initiator speaks first:
//   kWant       room for so many bytes, for this region   kFetch     copy these bytes off the
//   device
//   <- kRoom    here; the initiator writes there           <- kRoom   they lie here
//   kLand       with the bytes: copy them to the device    kRelease   read, or not wanted any more
//   <- kEnded   copied, or why not
// kRelease also ends a write that has been given room; kEnded answers it. Where the target cannot
// do what it was asked for, kEnded comes instead of kRoom.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/region.h"

namespace baton::internal {

// A number of the side that made it up. Generation 0: none.
struct Handle {
  uint32_t index = 0;
  uint32_t generation = 0;
  bool operator==(const Handle&) const = default;
};

// Bytes of a region, next to each other.
struct Run {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

struct StagingMessage {
  enum class Kind : uint8_t { kWant = 1, kFetch, kRoom, kLand, kEnded, kRelease };
  static constexpr uint32_t kMaxRuns = 256;
  static constexpr uint64_t kMaxBytes = 4 << 20;  // of a chunk
  static constexpr size_t kMaxText = 1024;

  Kind kind = Kind::kWant;
  Handle chunk;           // the initiator's: in all
  Handle room;            // the target's: kRoom, kLand, kRelease
  RemoteRegion region;    // kWant, kFetch, kLand: of the device. kRoom: the target's ring
  uint64_t offset = 0;    // kRoom: in the ring
  uint64_t bytes = 0;     // kWant, kFetch, kLand, kRoom: of the chunk
  bool urgent = false;    // kWant, kFetch
  std::vector<Run> runs;  // kFetch, kLand: in the region, `bytes` in all
  absl::Status status;    // kEnded

  // Writes over `out`, whose memory stays.
  void encode(std::string& out) const;
  // InvalidArgument for what no correct peer sends.
  static absl::StatusOr<StagingMessage> decode(std::string_view bytes);
};

}  // namespace baton::internal
