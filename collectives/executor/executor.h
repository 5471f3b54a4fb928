// The executor: runs calls, cut into pieces, over links.
//
// A lane is a virtual thread: it runs one piece of one call after another, step by step, and waits
// where a step has to wait. kLanes of them run side by side; that is the pipeline. Every lane of
// every rank runs the same pieces in the same order, so messages need no tags: piece t of all
// pieces ever belongs to lane t % kLanes. Sends and receives are matched and moved beside them
// (point_to_point.h).
//
// Not thread-safe: the communicator guards it. Never blocks. No allocation in the steady state.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "collectives/executor/call.h"
#include "collectives/executor/control_block.h"
#include "collectives/executor/device_sums.h"
#include "collectives/executor/flight_recorder.h"
#include "collectives/executor/geometry.h"
#include "collectives/executor/link.h"
#include "collectives/executor/memory.h"
#include "collectives/executor/point_to_point.h"
#include "collectives/executor/prepared.h"
#include "transport/clock.h"

namespace baton::collectives::executor {

// A call as the executor runs it. Owned by the communicator, at a fixed address.
struct Call {
  CallDescriptor descriptor;
  uint32_t fingerprint = 0;
  Geometry geometry;
  DataType type = DataType::kF32;
  ReduceOp op = ReduceOp::kSum;
  std::byte* in = nullptr;
  std::byte* out = nullptr;
  // By channel; null for sends and receives.
  const std::vector<PreparedProgram>* programs = nullptr;
  DeviceSums* sums = nullptr;  // null: the CPU combines
  DeviceInput input;           // on the device of `sums`
  // For sends and receives: the other rank (PointToPoint::kAnyPeer: any, until one is found).
  uint32_t peer = 0;
  bool sends = false;
  int32_t tag = 0;
  size_t pieces = 1;
  size_t pieces_done = 0;
  Time began{};
  Time deadline = kNever;
  // Called once, when the last piece is done.
  void (*on_done)(Call& call, void* context) = nullptr;
  void* context = nullptr;
};

// Why a lane stands still.
struct Blocked {
  const Call* call = nullptr;
  uint32_t lane = 0;
  size_t piece = 0;
  uint32_t step = 0;
  uint32_t peer = 0;       // whom it waits for
  bool to_send = false;    // for room at the peer, or for the peer to take what was sent
  bool combining = false;  // for a device of its own: `peer` is the rank itself
  bool from_any = false;   // for whichever rank sends: `peer` is the rank itself
  bool on_stream = false;  // for a stream of a device, or for the input to leave it: likewise
};

class Executor {
 public:
  // `links` by rank; null at our own. All outlive the executor. `recorder` may be null.
  Executor(uint32_t rank, std::vector<Link*> links, Memory* memory, const Clock& clock,
           FlightRecorder* recorder);
  ~Executor();

  // Overwrites past the caches what peers have just read in place, where that is measured to be
  // faster. Results do not depend on it.
  void set_stream_over_read(bool streams) { stream_over_read_ = streams; }

  // Another link to a rank, from now on: no message has passed the one before.
  void set_link(uint32_t peer, Link* link);

  // Starts a call. Collectives run in the order in which they are started.
  void start(Call& call);
  // Advances everything as far as it goes; true if anything happened. An error ends the executor:
  // nothing advances any more.
  absl::StatusOr<bool> advance() {
    if (idle()) return false;
    return advance_open();
  }
  bool idle() const { return calls_.empty() && point_to_point_.idle(); }
  // Kernels sum, and wake no thread up when they are done: advance() wants to be called.
  bool combining() const { return combining_ > 0; }
  // OK, or the error of a device of ours that advance() has returned: no peer had a part in it.
  const absl::Status& device_error() const { return device_error_; }

  // The lane that has stalled (of several, the one furthest behind), for messages to the user.
  Blocked blocked() const;
  uint64_t messages() const { return messages_ + point_to_point_.messages(); }
  uint64_t bytes_sent() const { return bytes_sent_ + point_to_point_.bytes_sent(); }
  uint64_t steps() const { return steps_; }

 private:
  absl::StatusOr<bool> advance_open();
  struct Lane {
    uint32_t number = 0;   // of the links' lanes
    uint64_t task = 0;     // the piece to run next or now, counted over all calls
    Call* call = nullptr;  // whose piece runs; null: none
    size_t piece = 0;
    const PreparedProgram* program = nullptr;
    uint32_t step = 0;
    size_t part_bytes = 0;          // of a full part of its call
    size_t delivered = 0;           // sends known as delivered, while the piece ends
    size_t combined = 0;            // runs of this step that a kernel has combined
    bool combining = false;         // and one that it combines now
    bool grants = false;            // messages of this piece may be large enough to wait for grants
    std::vector<uint64_t> numbers;  // of the messages sent, by step
    Block scratch;
  };
  // A collective that has pieces left.
  struct Active {
    Call* call = nullptr;
    uint64_t first_task = 0;
  };

  // The result of a lane's turn. A StatusOr<bool> here would cost a small call a tenth of its time.
  enum class Turn : uint8_t { kWaits, kMoved, kFailed };  // kFailed: `error_` says why
  Turn fail(absl::Status why);
  Turn run(Lane& lane);
  Turn begin_piece(Lane& lane);
  Turn run_step(Lane& lane);
  Turn receive(Lane& lane, const schedules::Step& step);
  void grant(Lane& lane, uint32_t step, uint32_t ahead);
  CallTag tag(const Lane& lane, const schedules::Step& step) const {
    return {&lane.call->descriptor, lane.call->fingerprint, step.parts * lane.part_bytes};
  }
  bool hazards_clear(Lane& lane, uint32_t step);
  bool all_delivered(Lane& lane);
  void end_piece(Lane& lane);
  bool last_piece(const Lane& lane) const;
  bool any_stray(uint32_t lane, uint64_t sequence) const;
  bool any_stray_of_last() const;
  Segments locate(const Lane& lane, const schedules::Place& place, uint32_t parts) const;
  // These wait while a kernel is at it: ask again.
  Turn combine(Lane& lane, const schedules::Step& step, const Segments& target, const Segments& a,
               const Segments& b);
  Turn fold_step(Lane& lane, const schedules::Step& step);
  // One run, by the kernel of the call's device.
  Turn combine_on_device(Lane& lane, std::byte* target, absl::Span<const void* const> sources,
                         size_t bytes, uint32_t divide_by, size_t original);
  // Whether the current step of `lane` writes its `bytes` past the caches.
  bool streams(const Lane& lane, size_t bytes) const;
  absl::Status grow_scratch(Lane& lane, size_t bytes);
  void record(FlightEvent::Kind kind, const Lane& lane, uint32_t peer, size_t bytes);

  const uint32_t rank_;
  std::vector<Link*> links_;
  std::vector<Link*> made_;  // those that are made(): few of thousands
  Memory* memory_;
  const Clock& clock_;
  FlightRecorder* recorder_;
  std::array<Lane, kLanes> lanes_;
  PointToPoint point_to_point_;
  uint32_t open_lanes_ = 0;    // bits: those with pieces to run
  uint64_t next_task_ = 0;     // of the next collective's first piece
  std::vector<Active> calls_;  // in order
  // The last call with a root that has ended. A rank that only sends in it learns only from
  // messages that other ranks named another root: it checks again when the next call begins.
  uint64_t rooted_ = 0;  // its sequence; 0: it was looked at
  uint64_t rooted_task_ = 0;
  uint64_t rooted_pieces_ = 0;
  bool strayed_ = false;  // and what was found then
  std::vector<const void*> fold_sources_;
  Time now_{};
  size_t moved_ = 0;        // bytes since the last look at the clock
  uint32_t combining_ = 0;  // lanes for which a kernel combines
  absl::Status device_error_;
  absl::Status error_;            // of the lane that has failed
  bool touched_ = false;          // links want flush()
  bool stream_over_read_ = true;  // until measured
  uint64_t messages_ = 0, bytes_sent_ = 0, steps_ = 0;
};

}  // namespace baton::collectives::executor
