// The messages of two shm providers on their socket after both have authenticated.
//
// One message is one packet; the files it speaks of travel with it as descriptors. Doorbells wake a
// peer that sleeps; everything else concerns the life of the connection, never a transfer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "transport/shm/segment.h"

namespace baton::shm {

inline constexpr size_t kMaxMessage = 1024;
inline constexpr size_t kMaxMessageFds = 3;

struct Message {
  enum class Kind : uint8_t {
    kSetup = 1,  // fds: control segment, counter table, and from the client the connection segment
    kFile = 2,   // fd: a file behind one or more regions
    kDrop = 3,   // no region uses that file any more: unmap it
    kGoodbye = 4,  // closing, and why
    kDoorbell = 5,
    kDeviceFile = 6,    // fd: an allocation of a device behind one or more regions
    kDeviceHandle = 7,  // the same by a handle of the driver's, without a descriptor
  };
  Kind kind = Kind::kDoorbell;

  // kSetup. Sizes of the structures that both sides share: a mismatch is another build.
  uint64_t control_bytes = 0;
  uint64_t counter_bytes = 0;
  uint64_t connection_bytes = 0;
  uint64_t nonce_address =
      0;  // in the sender's memory: its gate for CMA, or of older builds any such place
  std::array<uint8_t, kNonceBytes> nonce{};

  // kFile, kDeviceFile, kDeviceHandle, kDrop.
  uint64_t file = 0;  // its number, never 0 and never used again
  uint64_t file_bytes = 0;
  std::array<uint8_t, 16> device_uuid{};  // kDeviceFile, kDeviceHandle
  // kDeviceHandle.
  std::array<uint64_t, 2> allocation{};
  std::array<uint8_t, DeviceExport::kHandleBytes> handle{};

  // kGoodbye, at most 256 bytes.
  std::string text;

  size_t expected_fds(bool from_client) const;
  std::string encode() const;
  static absl::StatusOr<Message> decode(std::string_view packet);
};

}  // namespace baton::shm
