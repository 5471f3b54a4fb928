// Unix sockets that keep packets apart and carry descriptors: the control path of shm.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "transport/shm/memory_file.h"

namespace baton::shm {

// The messages of two shm providers on their socket after both have authenticated.
//
// One message is one packet; the files it speaks of travel with it as descriptors. Doorbells wake a
// peer that sleeps; everything else concerns the life of the connection, never a transfer.

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

// A packet and the descriptors that came with it.
struct Packet {
  std::array<char, kMaxMessage> buffer;
  size_t bytes = 0;
  std::array<base::UniqueFd, kMaxMessageFds> fds;
  size_t fd_count = 0;
  std::string_view view() const { return {buffer.data(), bytes}; }
};

// All sockets are non-blocking and live in the abstract namespace: no file is left behind.
class PacketSocket {
 public:
  PacketSocket() = default;
  explicit PacketSocket(base::UniqueFd fd) : fd_(std::move(fd)) {}

  static absl::StatusOr<PacketSocket> listen(const std::string& name);
  // Unavailable when no peer listens there any more; ResourceExhausted when the listener's backlog
  // is full for the moment.
  static absl::StatusOr<PacketSocket> dial(const std::string& name);
  // NotFound when no peer is waiting.
  absl::StatusOr<PacketSocket> accept() const;

  enum class Io { kDone, kLater, kClosed };
  // kLater: the peer has not read enough yet, or the machine has no memory for it now.
  Io send(std::string_view bytes, absl::Span<const int> fds = {}) const;
  // kClosed: the peer is gone. An error when the packet was cut, too long, or lost descriptors.
  // Descriptors are accepted only `with_fds`; a peer that is not authenticated yet sends none.
  absl::StatusOr<Io> receive(Packet& packet, bool with_fds) const;

  // True if the other end is closed in both directions, asked of the kernel now. A peer that shut
  // down one direction is alive.
  bool peer_gone() const;
  // The process at the other end as the kernel knows it; 0 when it is in another pid namespace.
  pid_t peer_pid() const;
  // Whether that process runs as the user that this one runs as.
  bool peer_is_this_user() const;

  int fd() const { return fd_.get(); }
  void close() { fd_.reset(); }

 private:
  base::UniqueFd fd_;
};

}  // namespace baton::shm
