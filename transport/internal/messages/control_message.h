// What two workers say to each other about their rails, besides the slices of transfers: carried as
// the notification of a transfer of no bytes whose counter is CounterTable::kControl, so that every
// provider can carry it, and like any other it arrives once.
//
//   kFence    close your end of this rail; which of these slices had landed by then?
//   kFenced   the answer: no byte comes over that rail any more, and those had landed
//   kPart     no transfer of ours is open any more; end yours, and close the connection
//
// Layout (little-endian): kind (1 byte), link (8), count (4; of a kPart 0), then
//   kFence    for each slice: slot (4), generation (4), slice (4); or, of one that the target only
//             counts, kNoSlot (4), and epoch (4) and number (4) of its message on that rail
//   kFenced   a byte for each slice of the question, in order: Fate
// Link 0 is no rail: the question is a sign of life, and so is its answer.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/region.h"
#include "transport/transfer.h"

namespace baton::internal {

// The slot of a slice that has no name but the number of its message.
inline constexpr uint32_t kNoSlot = UINT32_MAX;

// kUnknown: the target does not remember that rail any more.
enum class Fate : uint8_t { kNever, kLanded, kUnknown };

// A slice of a write, by the numbers of its sender.
struct SliceName {
  TransferId transfer;
  uint32_t slice = 0;
  bool operator==(const SliceName&) const = default;
};

struct ControlMessage {
  enum class Kind : uint8_t { kFence = 1, kFenced, kPart };
  static constexpr uint32_t kMaxSlices = 4096;  // more than any rail takes at a time

  Kind kind = Kind::kFence;
  uint64_t link = 0;              // HelloInfo::link of the rail; 0 in a kPart
  std::vector<SliceName> slices;  // kFence
  std::vector<Fate> landed;       // kFenced

  std::string encode() const;
  // InvalidArgument for what no correct peer sends.
  static absl::StatusOr<ControlMessage> decode(std::string_view bytes);
};

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
//
// A peer that maps our ring can copy from there (transport/internal/staging/ring_marks.h); both
// speak kLendingProtocol:
//   kRing       here is a ring of ours     <- kBorrows   from now on, lend me what you write
//   kOffer      a write's bytes lie in it: copy them to the device
//   <- kEnded   copied, or why not

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
  enum class Kind : uint8_t {
    kWant = 1,
    kFetch,
    kRoom,
    kLand,
    kEnded,
    kRelease,
    kRing,
    kBorrows,
    kOffer,
  };
  static constexpr uint32_t kMaxRuns = 256;
  static constexpr uint64_t kMaxBytes = 4 << 20;  // of a chunk
  static constexpr size_t kMaxText = 1024;

  Kind kind = Kind::kWant;
  Handle chunk;           // the initiator's: in all
  Handle room;            // the target's: kRoom, kLand, kRelease. The ring: kRing, kBorrows, kOffer
  RemoteRegion region;    // kWant, kFetch, kLand, kOffer: of the device. kRoom, kRing: the ring
  uint64_t offset = 0;    // kRoom, kOffer: in the ring
  uint64_t bytes = 0;     // kWant, kFetch, kLand, kRoom, kOffer: of the chunk
  bool urgent = false;    // kWant, kFetch, kOffer
  std::vector<Run> runs;  // kFetch, kLand, kOffer: in the region, `bytes` in all
  absl::Status status;    // kEnded

  // Writes over `out`, whose memory stays.
  void encode(std::string& out) const;
  // InvalidArgument for what no correct peer sends.
  static absl::StatusOr<StagingMessage> decode(std::string_view bytes);
};

}  // namespace baton::internal
