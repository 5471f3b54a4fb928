// Calls on memory of devices: what a call reads is copied into memory of the communicator's before
// the call starts, and what it wrote is copied to the device when it has ended.
//
//   device --copy engine--> memory of the communicator   (the call)   and back
//
// Copy engines move it, and the CPU where that memory cannot be pinned, through a ring that is: no
// kernel has to run for bytes to move. What a call combines, the
// CPU combines or a kernel of the device (executor/device_sums.h), as the measured costs of the two
// say, or staging.sums; the bits are the same, and are those of the host's memory. Each rank
// decides by itself: other ranks see no difference, whatever memory and devices they have. The
// rings of pinned memory stay as large as they are however much a call moves; the memory of the
// communicator is as large as the call's, and is used again.
//
// An all_reduce that all ranks have on devices of one machine takes another way, without memory of
// the host (devices/device_exchange.h). Ranks know that of a call when all are in it.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "collectives/devices/device_exchange.h"
#include "collectives/executor/device_sums.h"
#include "collectives/executor/executor.h"
#include "collectives/internal/arguments.h"
#include "collectives/internal/mesh.h"
#include "transport/internal/device_memory.h"

namespace baton::collectives::internal {

// Everything under the communicator's lock.
class DeviceCalls {
 public:
  static constexpr size_t kPiece = 2 << 20;
  static constexpr size_t kPieces = 4;  // for each direction of a device

  // The host memory that stands in for one call's device memory.
  class Staged {
   public:
    ~Staged();
    Staged(const Staged&) = delete;
    Staged& operator=(const Staged&) = delete;

   private:
    friend class DeviceCalls;
    explicit Staged(DeviceCalls& owner) : owner_(owner) {}
    DeviceCalls& owner_;
    std::vector<Block> blocks_;
    std::vector<baton::internal::CopyRun> reads_, writes_;
    int reads_from_ = 0, writes_to_ = 0;  // devices
    size_t run_ = 0, at_ = 0;             // of the copy that is under way: what is next
    size_t open_ = 0;                     // pieces on their way
    absl::Status status_;
  };
  using StagedPtr = std::unique_ptr<Staged>;
  // True if the call's input is on a device.
  static bool reads(const StagedPtr& staged) {
    return staged != nullptr && !staged->reads_.empty();
  }

  // Where sums are computed: the setting staging.sums.
  enum class Sums : uint8_t { kAuto, kCpus, kKernel };

  // The mesh outlives this, and this every Staged.
  DeviceCalls(Mesh& mesh, Sums sums) : mesh_(mesh), sums_(sums) {}
  ~DeviceCalls();
  DeviceCalls(const DeviceCalls&) = delete;
  DeviceCalls& operator=(const DeviceCalls&) = delete;

  // Whether memory of a checked call may be a device's: not where no provider drives devices, nor
  // where all of it is ours. A small call in memory of ours pays for no more than this look.
  bool concerns(const Request& request, const Extents& extents) const;
  // Puts memory of the host's in the place of what a checked call has on devices; null where it has
  // nothing there. Both buffers of an uneven call become out of place. InvalidArgument for memory
  // that no call can use: managed, freed, in several allocations. Other errors: no ring, no memory.
  absl::StatusOr<StagedPtr> stage(Request& request, bool& in_place);
  // Whether what is combined is made of the input first: kPreMulSum, and a single rank's truth
  // values, which no other's turn into 0 and 1.
  static bool wants_own_input(const Request& request, uint32_t ranks) {
    return request.reduces() &&
           (request.op == ReduceOp::kPreMulSum || (request.type == DataType::kBool && ranks == 1));
  }
  // Makes it, for a call that has been staged: in `out` if that is as large, else in memory of the
  // call's own.
  absl::Status own_input(Request& request, StagedPtr& staged, bool& in_place);
  absl::StatusOr<StagedPtr> stage_point_to_point(bool sends, void*& data, size_t bytes);
  absl::StatusOr<StagedPtr> stage_blocks(const void*& in, const Blocks& send, void*& out,
                                         const Blocks& receive, size_t element);

  // True if calls like this one may go from device to device. All ranks get the same answer.
  bool may_exchange(const Request& request) const;
  // True if this rank can do that; prepares for it.
  bool can_exchange(const Request& request);
  // Tells the others of a call like that, which has been published, whether this rank can.
  void say_whether(uint64_t sequence, bool can);
  // Whether all can; nothing as long as some have not said it, of which `waits_for` is one, or one
  // has published another call.
  std::optional<bool> all_can(uint64_t sequence, uint32_t* waits_for = nullptr) const;
  // Null: there was no such call yet.
  devices::DeviceExchange* exchange() const { return exchange_.get(); }
  // Notes the seconds that such a call took, for explain_sums().
  void exchanged(const executor::Call& call, double seconds);

  // Chooses where the call's sums are combined, by these programs. Notes why, for explain_sums().
  void choose_sums(const Staged& staged, executor::Call& call);

  // Begins to copy what the call reads, and advances that: nothing while it runs, then how it
  // ended.
  void begin_copy_in(Staged& staged);
  std::optional<absl::Status> copied_in(Staged& staged);
  // Copies what the call reads. Blocks until it is there; not longer than until `deadline`, or
  // until pause(), which it calls meanwhile, returns an error.
  absl::Status copy_in(Staged& staged, Time deadline, const std::function<absl::Status()>& pause);
  // Begins to copy what the call wrote.
  void begin_copy_out(Staged& staged);
  // Advances it; nothing while it runs, then how it ended.
  std::optional<absl::Status> copy_out(Staged& staged);
  // Ends all copies: after it returns none of them moves a byte.
  void stop();

  uint64_t calls() const { return calls_; }
  uint64_t bytes() const { return bytes_; }  // copied to and from devices
  // A line for each device that has been used; empty: none.
  std::string explain() const;
  // A line for each type: where the last calls of this size on device memory were combined, and the
  // predicted cost of either way. Empty if there were none, or nothing to combine.
  std::string explain_sums(Collective collective, size_t bytes) const;

 private:
  using CopyDirection = baton::internal::CopyDirection;
  // Pinned memory, cut into pieces: the first half is for copies to the host.
  struct Ring {
    std::unique_ptr<baton::internal::StagingRing> copies;
    struct Piece {
      Staged* owner = nullptr;    // null: free
      std::byte* host = nullptr;  // null: the copy goes straight there
      size_t bytes = 0;
    };
    std::vector<Piece> pieces;
    // Memory of the communicator that copies go straight to and from, and how many of its regions
    // were looked at.
    std::vector<std::pair<absl::Span<std::byte>, std::shared_ptr<void>>> pins;
    size_t looked_at = 0;
    std::unique_ptr<executor::DeviceSums> sums;  // null: none, or not asked for yet
    absl::Status no_sums;                        // why there are none
  };
  struct Chosen {
    Collective collective{};
    DataType type{};
    size_t bytes = 0;
    std::string why;
  };

  bool ours(const void* data, size_t bytes) const;
  // The device of a range, or -1. Makes its ring.
  absl::StatusOr<int> device_of(const void* data, size_t bytes);
  absl::StatusOr<std::byte*> host_memory(Staged& staged, size_t bytes);
  void pin_memory(int device);
  executor::DeviceSums* sums_of(Ring& ring, int device);
  void note(Collective collective, DataType type, size_t bytes, std::string why);
  // Puts pieces on their way; false: all of them are.
  bool step(Staged& staged, CopyDirection direction);
  void collect(Ring& ring);
  void give_back(std::vector<Block>& blocks);

  Mesh& mesh_;
  const Sums sums_;
  std::vector<Chosen> chosen_;  // the newest last
  std::map<int, Ring> rings_;
  std::unique_ptr<devices::DeviceExchange> exchange_;
  bool no_exchange_ = false;  // there was no memory for it
  std::vector<Block> idle_;
  uint64_t calls_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace baton::collectives::internal
