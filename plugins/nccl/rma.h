// The RMA door: puts with signals, in the order that NCCL asks for, over windows
// (collectives/window.h) of a group that its ranks make from each other's handles.
//
//   listen -> handles of all ranks -> connect: a group      register: a window, by all ranks
//   put, put_signal, get, flush: an access of a window       test, progress: NCCL's thread drives
//
// A context is a number of its own for the order of signals. A signal adds to 8 bytes of the
// target's registered memory: the target's processor does it when NCCL makes progress there.
//
// Threads: any function from any thread. connect() and register_memory() are collective and block,
// as all of this interface do; nothing else waits for others, but for room where 4,096 accesses are
// open. What rma_versions.cc shows to NCCL are views of these functions.
//
// What NCCL has are numbers (numbers.h). Of a comm that is closed its contexts, memory and requests
// are errors.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collectives/communicator.h"
#include "collectives/window.h"
#include "plugins/nccl/abi_rma.h"

namespace baton::nccl {

class RmaComm;

// Registered memory.
struct RmaMemory {
  const RmaComm* comm = nullptr;
  uintptr_t number = 0;  // what NCCL has
  std::shared_ptr<Window> window;
  int fd = -1;  // of a dma-buf: ours

  ~RmaMemory();
};

// An access that NCCL tests. Never null for NCCL, however many are open.
struct RmaRequest {
  uint32_t index = 0;
  std::atomic<uint32_t> generation{0};  // odd: NCCL has it
  std::atomic<bool> done{false};
  absl::Status result;  // before `done`
};

// A collective comm of NCCL's RMA interface.
class RmaComm {
 public:
  explicit RmaComm(std::shared_ptr<Communicator> comm);
  ~RmaComm();

  // NCCL's handle of it; 0: there are too many.
  uintptr_t number() const { return number_; }
  Communicator& comm() { return *comm_; }
  // The first of so many numbers that no other context of this comm has.
  int32_t take_tags(int count) { return next_tag_.fetch_add(count); }

  // Keeps the memory and returns NCCL's handle for it; null: there are too many.
  void* keep(std::unique_ptr<RmaMemory> memory);
  // False: it is not one of this comm's.
  bool drop(const void* handle);
  // InvalidArgument: `what` is not one of this comm's.
  absl::StatusOr<const RmaMemory*> memory(const void* handle, const char* what) const;
  const RmaMemory* any_memory();

  // Null: NCCL has not tested a million of them.
  RmaRequest* take();
  void give_back(RmaRequest* request);
  void* handle_of(const RmaRequest& request) const;
  // Null: it is not one of this comm's, or done.
  RmaRequest* request(const void* handle) const;

 private:
  static constexpr uint32_t kChunk = 1024;  // requests that are made at once

  const uintptr_t number_;
  std::mutex mutex_;  // guards what is free, the making of chunks, and the list of memory
  std::array<std::atomic<RmaRequest*>, 1024> chunks_{};
  std::vector<std::unique_ptr<RmaRequest[]>> made_;
  std::vector<RmaRequest*> free_;
  std::atomic<int32_t> next_tag_{1};
  const std::shared_ptr<Communicator> comm_;
  std::vector<std::unique_ptr<RmaMemory>> memory_;
};

struct RmaContext {
  uintptr_t comm = 0;  // its number
  int32_t first_tag = 0;
  int count = 0;
};

// An access as NCCL gives it; offsets are into registered memory, whose handles these are.
struct RmaAccess {
  int number = 0;  // of the context
  void* local = nullptr;
  void* remote = nullptr;
  uint64_t local_offset = 0, remote_offset = 0;
  size_t size = 0;
  uint32_t rank = 0;
  // The words that a put with a signal adds to.
  void* words = nullptr;
  uint64_t word_offset = 0, value = 0;
  uint32_t operation = 0;
  bool strong = true;
  uint32_t flags = 0;
};

namespace rma {

Result init(void** context, uint64_t communicator, Logger log);
Result devices(int* count);
Result properties(int device, int device_type, PropertiesV12* out);
Result listen(void* context, int device, void* handle, void** listener);
Result connect(void* context, void* handles[], int ranks, int rank, void* listener, void** comm);
Result create_context(void* comm, int contexts, void** context);
Result register_memory(void* comm, void* data, size_t size, int type, int fd, uint64_t offset,
                       void** memory);
Result deregister(void* comm, void* memory);
Result destroy_context(void* context);
Result close_comm(void* comm);
Result close_listen(void* listener);
Result put(void* context, const RmaAccess& access, void** request);
Result put_signal(void* context, const RmaAccess& access, void** request);
Result get(void* context, const RmaAccess& access, void** request);
Result flush(void* context, int number, void* memory, uint32_t rank, void** request);
Result test(void* comm, void* request, int* done);
Result progress(void* context);
Result query_last_error(void* context, bool* failed);
Result finalize(void* context);

}  // namespace rma
}  // namespace baton::nccl
