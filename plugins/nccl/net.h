// The net door: one table that knows no version of NCCL's interface. What each function has to do
// is NCCL's contract (docs/nccl.md); README.md says how a message travels.
//
// Threads, as NCCL has them: listen, connect, accept, memory and close on one, send, receive, test
// on another; comms of one process in several pairs of them.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "plugins/nccl/abi.h"
#include "plugins/nccl/plugin.h"

namespace baton::nccl {

inline constexpr uint32_t kNetVersion = 1;  // of handles, messages and grants: not NCCL's
inline constexpr int kMostReceives = 8;     // of a group
inline constexpr uint32_t kGroups = 32;     // in flight on a comm (NCCL_NET_MAX_REQUESTS)
inline constexpr uint32_t kSends = kGroups * kMostReceives;
inline constexpr std::chrono::milliseconds kMostClosing{20};  // for what is under way to end
inline constexpr size_t kMostBytes = size_t{1} << 40;         // of a message
inline constexpr size_t kMostBytesV8 = size_t{1} << 30;       // sizes are ints there

// A receiver's permission to write a message, as it lies in the sender's ring. Little-endian.
struct Grant {
  uint64_t key = 0;  // of the region, and what else a RemoteRegion has
  uint64_t region_bytes = 0;
  uint64_t offset = 0;  // in it
  uint64_t bytes = 0;   // at most
  uint32_t region = 0;
  uint32_t generation = 0;
  uint32_t counter = 0;  // to be raised by the bytes sent + 1
  uint16_t counter_generation = 0;
  uint8_t count = 0;  // of the group's grants
  uint8_t flags = 0;
  int32_t tag = 0;
  uint32_t group = 0;  // its number, the low bits
  uint64_t unused = 0;

  enum : uint8_t { kOfDevice = 1, kDirect = 2, kPolled = 4 };
};
static_assert(sizeof(Grant) == 64);

class NetComm;

// Registered memory of a comm.
struct NetMemory {
  const NetComm* comm = nullptr;
  uintptr_t number = 0;  // what NCCL has; 0: deregistered
  std::byte* data = nullptr;
  size_t size = 0;
  int fd = -1;  // of a dma-buf: ours
  int users = 0;
  MemoryRegion region;  // generation 0: no bytes
  RemoteRegion remote;  // of a receiver's
};

// One direction of data between two processes.
class NetComm {
 public:
  NetComm(Hub& of, HubPeer* to, bool sender) : hub(of), peer(to), sends(sender) {}
  virtual ~NetComm();
  NetComm(const NetComm&) = delete;
  NetComm& operator=(const NetComm&) = delete;

  // Before a comm is closed: asks its transfers to end, and takes back what it has granted.
  virtual void revoke() = 0;

  // Registers memory; returns NCCL's handle for it.
  absl::StatusOr<void*> add(void* data, size_t size, uint64_t offset, int fd);
  absl::Status remove(const void* handle);
  void remove_all();
  // Null: it is not registered with this comm.
  const NetMemory* memory(const void* handle) const;
  struct Place {
    const NetMemory* memory = nullptr;  // null: no bytes
    size_t offset = 0;                  // in its region
  };
  // The place of the bytes in the memory behind NCCL's handle.
  absl::StatusOr<Place> place_of(const void* handle, const void* data, size_t bytes) const;

  // Why it can be used no more; OK: it can.
  absl::Status status();
  // The same, without a lock while there is nothing to tell.
  bool broken() const {
    return failed.load(std::memory_order_acquire) || peer->down.load(std::memory_order_acquire) ||
           hub.worker().counter_value(ended) != 0;
  }
  // From a transfer's end, or wherever something went wrong: the first reason counts; the other
  // side is told that there is one.
  void fail(const absl::Status& why);
  void tell_end();

  Hub& hub;
  HubPeer* peer;
  const bool sends;
  uint32_t number = 0;            // in the process; 0: none
  CounterId ended;                // the other side raises it when it closes or fails
  RemoteCounter their_end;        // and this side that one
  std::atomic<uint32_t> open{0};  // transfers that have not ended
  std::atomic<bool> failed{false};
  std::atomic<bool> told{false};
  std::atomic<bool> said{false};  // why it failed, in the log

 private:
  std::mutex mutex_;
  absl::Status why_;
  std::mutex memory_mutex_;
  std::map<std::tuple<const void*, size_t, uint64_t>, std::unique_ptr<NetMemory>> memory_;
  std::vector<std::unique_ptr<NetMemory>> left_;  // deregistered; transfers of ours still use it
};

class SendComm final : public NetComm {
 public:
  SendComm(Hub& of, HubPeer* to) : NetComm(of, to, true) {}
  ~SendComm() override;

  absl::Status prepare();  // ring and counters
  void revoke() override;
  // `request` null: NCCL has to ask again.
  absl::Status send(const void* data, size_t size, int tag, const void* memory, void** request);
  absl::StatusOr<bool> test(uint32_t index, uint16_t generation, int* sizes);
  // Asks for the end of what reads this memory, or any (null).
  void cancel(const NetMemory* memory);
  bool reads(const NetMemory* memory) const;

  // Setting up:
  uint64_t key = 0;  // names it in messages
  std::array<char, kHandleBytes> handle{};
  bool asked = false;
  std::atomic<bool> accepted{false};
  std::string refused;

  Block ring_block;
  MemoryRegion ring;  // under a key of its own
  std::array<CounterId, kGroups> posted{};

 private:
  enum State : uint8_t { kFree, kActive, kDone, kFailed };
  struct Send {
    std::atomic<State> state{kFree};
    uint16_t generation = 0;
    SendComm* comm = nullptr;
    size_t bytes = 0;
    // Another thread that deregisters memory looks at these: it reads `id` first, and they are
    // written in the other order, so that it cancels no later send of other memory.
    std::atomic<const NetMemory*> memory{nullptr};
    std::atomic<TransferId> id{};
  };
  const Grant* grants(uint64_t group) const {
    return reinterpret_cast<const Grant*>(ring_block.data) +
           size_t{group % kGroups} * kMostReceives;
  }
  bool is_posted(uint64_t group) const {
    return hub.worker().counter_value(posted[group % kGroups]) > group / kGroups;
  }
  // The oldest grant with this tag that is not taken. False: none.
  absl::StatusOr<bool> find(int tag, uint64_t& group, int& slot) const;
  static void on_end(void* context, TransferId id, const absl::Status& status);
  void note_no_match(int tag);

  uint64_t head_ = 0;                     // the oldest group with a grant that is not taken
  std::array<uint8_t, kGroups> taken_{};  // of each group's grants
  std::array<uint8_t, kGroups> all_{};    // of these groups: what taken_ becomes
  std::array<Send, kSends> sends_;
  std::array<uint16_t, kSends> free_{};
  uint32_t free_count_ = 0;
  uint32_t polls_ = 0;
  Time no_match_since_ = kNever;
};

class ReceiveComm final : public NetComm {
 public:
  ReceiveComm(Hub& of, HubPeer* to) : NetComm(of, to, false) {}
  ~ReceiveComm() override;

  absl::Status prepare();
  void revoke() override { remove_all(); }
  absl::Status receive(int count, void** data, const size_t* sizes, const int* tags, void** memory,
                       bool polled, void** request);
  absl::StatusOr<bool> test(uint32_t index, uint16_t generation, int* sizes);

  RemoteRegion their_ring;
  uint64_t ring_offset = 0;
  std::array<RemoteCounter, kGroups> their_posted;

 private:
  struct Group {
    bool active = false;
    uint16_t generation = 0;
    int count = 0;
    std::array<CounterId, kMostReceives> arrived{};  // made when first used
    std::array<uint64_t, kMostReceives> before{};    // their values when it was posted
    std::array<size_t, kMostReceives> sizes{};
  };
  static void on_end(void* context, TransferId id, const absl::Status& status);

  Block records_;  // grants, as they are sent
  uint64_t next_ = 0;
  std::array<Group, kGroups> groups_;
};

namespace net_door {

// Registers the door's messages, when a hub is made; and forgets what the hub has of the door.
void open_door(Hub& hub);
void close_door(Hub& hub);

Result listen(int device, void* handle, void** listener);
Result connect(int device, void* handle, void** comm);
Result accept(void* listener, void** comm);
Result register_memory(void* comm, void* data, size_t size, int type, uint64_t offset, int fd,
                       void** memory);
Result deregister(void* comm, void* memory);
Result send(void* comm, void* data, size_t size, int tag, void* memory, void** request);
Result receive(void* comm, int count, void** data, const size_t* sizes, const int* tags,
               void** memory, bool polled, void** request);
// Nothing to do: memory that is not registered is an error.
Result flush(void* comm, int count, const int* sizes, void** memory, void** request);
Result test(void* request, int* done, int* sizes);
Result close_send(void* comm);
Result close_receive(void* comm);
Result close_listen(void* listener);

// Requests name a comm, by its number, and a place in its pool: no pointer, so a stale one is an
// error and no crash.
void* request_of(const NetComm& comm, uint32_t index, uint16_t generation);
// NCCL's handle of a comm is the comm's number, so that using a comm that is closed, or that
// belongs to the parent process, is an error and not a crash.
void* handle_of(const NetComm& comm);
// Gives a comm its number, and takes it back. False: all are in use.
bool enlist(NetComm& comm);
void strike(NetComm& comm);

}  // namespace net_door

}  // namespace baton::nccl
