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

#include "absl/status/statusor.h"
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

}  // namespace baton::internal
