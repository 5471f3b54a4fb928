// Memory files: sealed memfds of our own, and mappings of those that a peer sent us.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/unique_fd.h"
#include "transport/internal/device_memory.h"
#include "transport/region.h"

namespace baton::shm {

// A shared mapping of a whole file. Unmapped with the object.
class MappedFile {
 public:
  enum class Protection { kReadOnly, kReadWrite };

  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  // Maps a file that a peer sent, after checking that touching the mapping cannot raise SIGBUS
  // because the peer truncates the file: it must be a memfd of at least `bytes` bytes, sealed
  // against shrinking. `what` names it in messages.
  static absl::StatusOr<MappedFile> map(int fd, size_t bytes, Protection protection,
                                        const char* what);

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

  // Faults in the next `bytes` bytes, so that no copy waits for a page fault; false when all of it
  // is there (or the kernel cannot, before 5.14).
  bool populate(size_t bytes);
  bool populated() const { return populated_ >= size_; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  size_t populated_ = 0;
};

// A new memfd of zeros with a mapping of it, sealed against changes of its size.
struct OwnFile {
  base::UniqueFd fd;
  MappedFile mapping;
};
absl::StatusOr<OwnFile> create_file(const char* name, size_t bytes);

// From now on no process can map the file writable or write to it; mappings that exist stay
// writable.
void forbid_new_writers(int fd);

// Whether the file can be handed to peers: a memfd that cannot shrink. Seals it where it can.
bool shareable(int fd);

// Shared memory of two workers on one machine: the layouts of the control and the connection
// segment.
//
// The control segment of a worker tells its peers which regions it has; peers map it read-only. The
// connection segment belongs to one connection and both sides write to it: one lane a direction.

// One region of the owner. The other fields are written before `generation` is set and stay as they
// are until after it has been cleared; generations never come back.
struct alignas(64) SharedRegion {
  std::atomic<uint32_t> generation;  // 0: none
  std::atomic<uint32_t> access;
  std::atomic<uint64_t> key;
  std::atomic<uint64_t> size;
  std::atomic<uint64_t> base;    // address in the owner, for process_vm_readv and writev
  std::atomic<uint64_t> file;    // number of the file behind it, 0: none
  std::atomic<uint64_t> offset;  // in that file
};

inline constexpr size_t kNonceBytes = 16;

struct ControlSegment {
  std::array<uint8_t, kNonceBytes> unused;  // older builds have it
  SharedRegion regions[RegionTable::kCapacity];
};

// One direction. Aligned so that the two sides write to different cache lines, and so that a line
// that one side looks at all the time is written only when there is something to see: every other
// write would cost the writer a message between two cores.
struct Lane {
  static constexpr size_t kRingBytes = 256 << 10;

  // Written by the sender, for each chunk that it copies; looked at by the receiver when it takes
  // memory away.
  alignas(64) std::atomic<uint32_t> busy;  // 1 + index of the region it copies to or from, else 0

  // Written by the sender, looked at by the receiver in each round.
  alignas(64) std::atomic<uint32_t> activity;  // + 1 after each delivery
  std::atomic<uint64_t> tail;                  // of the ring: bytes ever written

  // Written by the sender: 1 + index of the region that each copy between devices is under way to
  // or from, else 0.
  alignas(64) std::array<std::atomic<uint32_t>, internal::DeviceCopies::kSlots> copying;

  // Written by the sender: the number of the file behind each handle of the receiver's that it has
  // open, else 0. The receiver adds kAskedBack when that memory goes, and waits for the 0.
  static constexpr size_t kMostOpened = 256;
  static constexpr uint64_t kAskedBack = uint64_t{1} << 63;
  alignas(64) std::array<std::atomic<uint64_t>, kMostOpened> opened;

  // Written by the receiver, for each record that it reads.
  alignas(64) std::atomic<uint64_t> head;  // of the ring: bytes ever read

  // Written by the receiver, once; looked at by the sender before and after each chunk.
  alignas(64) std::atomic<uint32_t> closed;  // 1: copy nothing any more

  // Written by both.
  alignas(64) std::atomic<uint32_t> asleep;  // receiver sets it before it sleeps; sender clears it
  std::atomic<uint32_t> sender_waits;        // sender found the ring full; receiver clears it

  // Written by the receiver, once: 1 when its worker has this connection. Nothing is delivered
  // before: the receiver may yet lose the connection without ever having looked at the ring.
  alignas(64) std::atomic<uint32_t> open;

  alignas(64) std::byte ring[kRingBytes];
};

struct ConnectionSegment {
  Lane from_client;
  Lane from_server;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(offsetof(Lane, activity) / 64 != offsetof(Lane, busy) / 64);
static_assert(offsetof(Lane, closed) / 64 != offsetof(Lane, head) / 64);

}  // namespace baton::shm
