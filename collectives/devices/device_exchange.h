// all_reduce on memory of devices without the host's memory: ranks of one machine write parts of
// their vectors into each other's memory on the device, a kernel adds them up there, and the sums
// go back the same way.
//
//   input --copy--> slab --transfer--> the others' slabs --kernel--> slab --transfer--> slabs
//   --copy--> output
//
// Rank r adds up part r, its sources in the order of the ranks: the bits are those of an ordered
// call in the host's memory. Transfers take what way there is (CUDA IPC, or through pinned memory):
// no CPU touches a byte. The slab is ours, so that no peer ever maps or outlives a caller's memory;
// it is as large as kSlots pieces need, however much a call moves.
//
// All ranks run the same pieces in the same order: piece t of all pieces ever lies in slot
// t % kSlots, and is sent when its receiver has said that the one before has left that slot.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collectives/executor/executor.h"
#include "transport/internal/device_memory.h"
#include "transport/worker.h"

namespace baton::collectives::devices {

// Everything under the communicator's lock.
class DeviceExchange {
 public:
  static constexpr size_t kSlots = 2;
  static constexpr size_t kPieceBytes = 32 << 20;
  static constexpr uint32_t kMostRanks = baton::internal::VectorSums::kMostSources;

  // The ranks, and how they tell each other where their memory is.
  struct Group {
    Worker& worker;
    uint32_t rank = 0, ranks = 0;
    std::function<PeerId(uint32_t rank)> peer;
    std::function<void(uint32_t rank, const std::string& offer)> tell;
    std::function<std::string_view(uint32_t rank)> told;  // empty: it has not come yet
  };
  // Takes up to 3 * kSlots * kPieceBytes of the device, and tells the others where. `sums` are the
  // device's, of which it uses the last slots; they and the worker outlive this.
  static absl::StatusOr<std::unique_ptr<DeviceExchange>> create(Group group, int device,
                                                                baton::internal::VectorSums& sums);
  ~DeviceExchange();
  DeviceExchange(const DeviceExchange&) = delete;
  DeviceExchange& operator=(const DeviceExchange&) = delete;

  int device() const { return device_; }

  // Begins an all_reduce whose two buffers lie on the device, which all ranks begin here.
  void start(executor::Call& call);
  // Advances the calls, and tells those that are over that they are. An error is the device's, or a
  // transfer's; nothing advances any more.
  absl::StatusOr<bool> advance();
  bool idle() const { return jobs_.empty(); }
  // Something of ours is on the device, and wakes no thread up when it is done.
  bool on_device() const;
  // What the oldest call waits for; `call` is null if there is none.
  executor::Blocked blocked() const;
  // Nothing of any call touches memory any more when it returns.
  void stop();

 private:
  enum class Stage : uint8_t {
    kFree,
    kCopyIn,
    kSend,
    kParts,
    kSum,
    kAnswer,
    kSums,
    kCopyOut,
    kEnd
  };
  // The state between this rank and one other for one slot.
  struct Ways {
    CounterId part, sum, room;  // raised by the other: it has sent that; we may send to it
    RemoteCounter to_part, to_sum, to_room;
    bool sent = false;  // what the stage sends
    TransferId part_on_way, sum_on_way;
  };
  struct Job {
    executor::Call* call = nullptr;
    size_t pieces = 0, part_elements = 0;
    size_t begun = 0, done = 0;
  };
  struct Piece {
    Stage stage = Stage::kFree;
    Job* job = nullptr;
    size_t index = 0;   // in the job
    uint64_t uses = 0;  // of the slot, this one included
    std::vector<Ways> ways;
    std::atomic<uint32_t> on_way{0};  // transfers
    DeviceExchange* owner = nullptr;
  };
  struct Range {
    size_t offset = 0, bytes = 0;  // in the vectors
  };

  DeviceExchange(Group group, int device, baton::internal::VectorSums& sums);
  absl::Status open();
  bool read_offer(uint32_t rank);
  static size_t part_room(uint32_t ranks) { return kPieceBytes / ranks / 256 * 256; }
  Job job_of(executor::Call& call) const;
  Range range_of(const Piece& piece, uint32_t part) const;
  // What of a slot lies where in a slab: what goes to `to`; what `from` sends to `owner`, parts and
  // sums; our own sum.
  size_t first_place(size_t slot) const { return slot * (3 * ranks_ - 2) * part_room(ranks_); }
  size_t out_place(size_t slot, uint32_t to) const;
  size_t part_place(size_t slot, uint32_t owner, uint32_t from) const;
  size_t sum_place(size_t slot, uint32_t owner, uint32_t from) const;
  size_t own_place(size_t slot) const;
  size_t slab_bytes() const { return first_place(kSlots); }

  absl::StatusOr<bool> step(size_t slot);
  absl::Status begin_copy_in(size_t slot);
  absl::Status begin_sum(size_t slot);
  absl::Status begin_copy_out(size_t slot);
  // True when all ranks have been sent what this stage sends.
  absl::StatusOr<bool> send_all(size_t slot);
  absl::StatusOr<bool> send(size_t slot, uint32_t to);
  bool all_raised(const Piece& piece, CounterId Ways::*counter) const;
  bool give_room(size_t slot);  // whether all have it
  absl::Status transfer_failure();
  static void on_end(void* context, TransferId id, const absl::Status& status);

  const Group group_;
  Worker& worker_;
  const int device_;
  const uint32_t rank_, ranks_;
  baton::internal::VectorSums& sums_;
  std::unique_ptr<baton::internal::DeviceCopies> copies_;
  std::unique_ptr<baton::internal::DeviceBuffer> slab_;
  MemoryRegion region_;
  std::vector<RemoteRegion> theirs_;  // generation 0: not told yet
  std::array<Piece, kSlots> pieces_;
  std::deque<Job> jobs_;
  uint64_t next_ = 0;  // piece of all pieces ever
  std::vector<baton::internal::DeviceRun> runs_;
  std::vector<baton::internal::VectorSum::Source> sources_;
  std::mutex mutex_;      // transfers end on whatever thread drives the worker
  absl::Status failure_;  // of a transfer
  std::atomic<bool> failed_{false};
};

}  // namespace baton::collectives::devices
