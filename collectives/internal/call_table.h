// The call table: calls from their start to the moment when the caller has heard how they ended.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "collectives/communicator.h"
#include "collectives/executor/control_block.h"
#include "collectives/executor/executor.h"
#include "collectives/executor/flight_recorder.h"
#include "collectives/internal/arguments.h"
#include "collectives/internal/device_calls.h"
#include "collectives/internal/endpoint_impl.h"
#include "collectives/internal/tuner.h"
#include "transport/internal/stream_order.h"

namespace baton::collectives::internal {

// Everything under the communicator's lock. Starting a call hands it to the executor; it advances
// when the executor does.
class CallTable {
 public:
  // At a time; of those that all ranks make, by executor::ControlBlock::kFlags, fewer.
  static constexpr size_t kMost = 4096, kMostCollectives = 256;

  struct Slot;
  // One send or receive of an all_to_all_v.
  struct Part {
    executor::Call call;
    Slot* whole = nullptr;
  };
  // A call in flight, and what the caller will hear of it. What every call touches comes first.
  struct Slot {
    executor::Call call;
    uint64_t id = 0;     // Work::sequence; 0: free
    uint64_t group = 0;  // the work that it ends with; 0: its own
    size_t members = 0;  // that have yet to end, of such a work
    size_t own_bytes = 0;
    void (*on_end)(void* context, Work work, const absl::Status& status) = nullptr;
    void* context = nullptr;
    uint32_t entry = UINT32_MAX, candidate = 0;  // of the tuner
    bool done = false;
    bool callback_due = false;  // it has yet to return
    bool detached = false;
    bool collective = false;
    bool outlives = false;   // fail_all(): it stands for what comes after a failure
    bool in_parts = false;   // an all_to_all_v
    bool grouping = false;   // a work to which calls are still added
    bool failed = false;     // such a one: it ends with the callbacks of its calls
    bool on_device = false;  // of one that may go from device to device
    bool streams = false;    // some wait for it, or it for one
    bool gated = false;      // it still waits for one
    bool fetching = false;   // its input has yet to leave the device
    bool own_input = false;  // and is then made into another
    bool in_place = false;   // `request`
    absl::Status result;
    CallTable* owner = nullptr;
    DeviceCalls::StagedPtr staged;  // of a call on memory of devices
    std::vector<Part> parts;        // of an all_to_all_v: its sends and receives
    size_t parts_left = 0;
    const std::byte* own_in = nullptr;  // what it moves within this rank: own_bytes
    std::byte* own_out = nullptr;
    std::array<std::byte, 8> factor;      // of an input that is made
    Request request;                      // of one that may change on its way
    CallOptions options;                  // its
    std::vector<size_t> lengths, starts;  // of blocks of different lengths
  };

  // All outlive the table.
  struct Needs {
    const CommunicatorOptions& options;
    const uint32_t rank, ranks;
    const Clock& clock;
    executor::ControlBlock& control;  // says which call this rank is in
    Tuner& tuner;
    executor::Executor& executor;
    executor::FlightRecorder& recorder;
    DeviceCalls* devices = nullptr;        // null: no call has anything on one
    EndpointImpl* endpoint = nullptr;      // runs callbacks; null: there are none
    EndpointImpl::Group* group = nullptr;  // that the calls are of
  };
  explicit CallTable(const Needs& needs);
  // For a group that begins, with calls of its own numbers; those of the one before have ended.
  void begin_group(uint32_t rank, uint32_t ranks, executor::ControlBlock& control);

  // OK, or ResourceExhausted: so many calls more would be too many, `collectives` of all ranks.
  absl::Status room_for(size_t collectives, size_t others = 0) const {
    const bool room = slots_.size() - free_ + collectives + others <= kMost &&
                      collectives_ + collectives <= kMostCollectives;
    return room ? absl::OkStatus() : too_many();
  }
  // Without the lock: makes what waits for these streams take, where that is not there yet.
  absl::Status prepare(const DeviceStream& stream) { return streams_.prepare(stream.device); }
  // Call this right before a call starts: it notes the streams that the call waits for, the streams
  // that wait for the call, and that the group is open. After an error do not start the call.
  // drop() forgets the notes if the call was not started.
  absl::Status note(const CallOptions& options) {
    const bool plain =
        options.group.sequence == 0 && options.after.device < 0 && options.release.device < 0;
    return plain ? absl::OkStatus() : note_order(options);
  }
  void drop() { streams_.forget(ticket_of(next_work_)); }

  // Starts a call for which there is room, and whose arguments have been checked.
  // `on_device`: nothing of it is staged, and it goes from device to device if all ranks can.
  absl::StatusOr<Work> start(const Request& request, const Tuner::Pick& pick,
                             DeviceCalls::StagedPtr staged = nullptr, bool on_device = false,
                             bool in_place = false);
  absl::StatusOr<Work> start_point_to_point(bool sends, void* data, size_t count, DataType type,
                                            int other, const CallOptions& options,
                                            DeviceCalls::StagedPtr staged = nullptr);
  absl::StatusOr<Work> start_all_to_all_v(const std::byte* in, const Blocks& send, std::byte* out,
                                          const Blocks& receive, DataType type,
                                          const CallOptions& options,
                                          DeviceCalls::StagedPtr staged = nullptr);

  // As Communicator::source_of().
  int source_of(Work work) const;
  // A call that the table does not advance: it ends by end_plain(), or with all others in
  // fail_all(). `options` may be null; the code that ends the call enforces its deadline.
  absl::StatusOr<Work> start_plain(const CallOptions* options = nullptr);
  void end_plain(Work work, const absl::Status& result);
  Time began(Work work) const { return slot_of(work.sequence).call.began; }  // of an open one
  // As Communicator's.
  absl::StatusOr<Work> group_begin();
  absl::Status group_end(Work group);
  absl::Status hold(Work work, DeviceStream stream);
  void set_outlives(Work work, bool outlives);
  // Callbacks that have not returned yet.
  size_t callbacks_due() const { return callbacks_due_; }

  // Nothing while the call runs; then how it ended, once.
  std::optional<absl::Status> reap(Work work);
  // Calls that the executor is done with: finish() ends them well.
  bool any_done() const { return !done_.empty(); }
  void finish();
  // Calls that are over but for copies to devices: copy_out() advances those. An error of a device
  // breaks the communicator.
  bool any_leaving() const { return !leaving_.empty(); }
  absl::Status copy_out();
  // Calls that wait for a stream, for their input to leave a device or for others' word on where
  // their memory is, those behind them, and calls that go from device to device: advance_devices()
  // advances them. An error breaks the communicator.
  bool any_on_devices() const {  // asked in every turn
    const auto* const exchange = needs_.devices == nullptr ? nullptr : needs_.devices->exchange();
    return !undecided_.empty() || (exchange != nullptr && !exchange->idle());
  }
  absl::StatusOr<bool> advance_devices();
  // Something of theirs is on a device, which wakes no thread up.
  bool any_under_way_on_devices() const;
  // What the oldest of them waits for; `call` is null if there is none.
  executor::Blocked blocked_on_devices() const;
  // Ends every call with `why`.
  void fail_all(const absl::Status& why);

  const std::vector<Slot*>& in_flight() const { return in_flight_; }
  // But for groups that were left open, and stand for nothing.
  bool any_in_flight() const;
  uint64_t sequence() const { return sequence_; }  // of the last collective
  uint64_t calls_made() const { return calls_made_; }
  // Notified whenever a call has ended.
  std::condition_variable& ended() { return ended_; }

 private:
  Slot& slot_of(uint64_t id) const { return *slots_[id & (slots_.size() - 1)]; }
  absl::Status too_many() const;
  absl::Status note_order(const CallOptions& options);
  void grow();
  Slot& take_slot(bool collective);
  // `whole`: the all_to_all_v that it belongs to; null: none.
  void prepare_point_to_point(executor::Call& call, bool sends, std::byte* data, size_t count,
                              DataType type, uint32_t other, int32_t tag,
                              const executor::CallDescriptor* whole = nullptr);
  void publish(const executor::CallDescriptor& call);
  // Begins a call that is complete, unless it has to wait.
  void launch_or_wait(Slot& slot) {
    // The executor has collectives in the same order at all ranks.
    const bool waits = slot.on_device || slot.gated;
    if (waits || (!undecided_.empty() && waits_for_others(slot))) {
      undecided_.push_back(&slot);
    } else {
      launch(slot);
    }
  }
  void launch(Slot& slot);
  // Whether a call has been launched, or goes from device to device; false: it still waits.
  absl::StatusOr<bool> decide(Slot& slot);
  // Matched in the order in which they begin.
  static bool in_order(const Slot& first, const Slot& second);
  bool waits_for_others(const Slot& slot) const;
  // The name of a work for streams.
  static TransferId ticket_of(uint64_t id) {
    return {static_cast<uint32_t>(id % kMost), static_cast<uint32_t>(id / kMost) + 1};
  }
  void take_options(Slot& slot, const CallOptions& options) const;
  static void on_returned(void* table, uint64_t work);
  static void on_done(executor::Call& call, void* context);
  static void on_part_done(executor::Call& call, void* context);
  void end(Slot& slot, const absl::Status& result);
  void leave_group(const Slot& slot);
  void free_slot(Slot& slot);

  const Needs needs_;
  baton::internal::StreamOrder streams_{kMost};
  uint32_t rank_, ranks_;
  executor::ControlBlock* control_;
  std::vector<std::unique_ptr<Slot>> slots_;  // by Work::sequence % size, a power of two
  size_t free_ = 0;                           // of them
  size_t collectives_ = 0;                    // in the others
  uint64_t next_work_ = 1;
  uint64_t sequence_ = 0;
  uint64_t calls_made_ = 0;
  size_t callbacks_due_ = 0;
  // Point-to-point calls, by the other rank; behind the last one: receives from any.
  std::vector<uint64_t> sent_, received_;
  struct Source {
    uint64_t work = 0;  // of a receive that has ended well
    uint32_t rank = 0;  // that sent what it took
  };
  std::vector<Source> sources_;  // by Work::sequence % size
  std::vector<Slot*> done_;
  std::vector<Slot*> leaving_;
  std::vector<Slot*> undecided_;  // begun, in order, and not launched yet
  std::vector<Slot*> in_flight_;
  std::vector<std::vector<Part>> spare_parts_;  // their memory is reused
  std::condition_variable ended_;
};

}  // namespace baton::collectives::internal
