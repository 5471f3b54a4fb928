// What two workers say to each other about their rails, besides the slices of transfers: carried as
// the notification of a transfer of no bytes whose counter is CounterTable::kControl, so that every
// provider can carry it, and like any other it arrives once.
//
//   kAddress  a side that dialled -> the other   where I listen, and which provider I insist on
//   kFence    either way                         close your end of this rail; which of these slices
//                                                had landed by then?
//   kFenced   the answer                         no byte comes over that rail any more; those that
//                                                had landed
//
// Layout (little-endian): kind (1 byte), then
//   kAddress  require (text), address (text)
//   kFence    link (8), count (4), then for each slice: slot (4), generation (4), slice (4)
//   kFenced   link (8), count (4), then a byte for each slice of the question, in order: 0 or 1
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/transfer.h"

namespace baton::internal {

// A slice of a write, by the numbers of its sender.
struct SliceName {
  TransferId transfer;
  uint32_t slice = 0;
  bool operator==(const SliceName&) const = default;
};

struct ControlMessage {
  enum class Kind : uint8_t { kAddress = 1, kFence, kFenced };
  // More than any rail takes at a time; a question with more is asked in parts.
  static constexpr uint32_t kMaxSlices = 4096;
  static constexpr size_t kMaxAddress = 32 << 10;

  Kind kind = Kind::kFence;
  uint64_t link = 0;              // kFence, kFenced: HelloInfo::link of the rail
  std::vector<SliceName> slices;  // kFence
  std::vector<bool> landed;       // kFenced
  std::string require;            // kAddress
  std::string address;            // kAddress

  std::string encode() const;
  // InvalidArgument for what no correct peer sends.
  static absl::StatusOr<ControlMessage> decode(std::string_view bytes);
};

}  // namespace baton::internal
