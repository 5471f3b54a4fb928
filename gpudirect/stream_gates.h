// Orders transfers and the streams of a GPU, without a thread that waits.
//
//   before: a transfer must not read what a stream has still to write. after() notes where the
//   stream is;
//           poll() says when it has come there, and then the transfer may be submitted.
//   after:  a stream must not read what a transfer has still to deliver. hold() makes the stream
//   wait,
//           release() lets it go on when the transfer has ended.
//
// Every wait has a deadline, and nothing but the word that it waits for ends a stream's wait: so at
// the deadline, and by abort(), the stream is let go on with a word that says that nothing was
// delivered. A kernel behind the wait reads it (Hold::outcome) before it believes the data.
//
// CUDA does not see these waits when it orders its own work: a stream that is held must not be one
// that the transfer needs. The device's streams for copies are refused. So is a stream that is
// being recorded into a CUDA graph, where the wait would be one of the graph's, for each of its
// launches; and one of another device or context.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpudirect/device.h"
#include "gpudirect/registered_pages.h"
#include "transport/clock.h"

namespace baton::gpudirect {

// A gate of a StreamGates, valid from after() or hold() to close().
struct GateId {
  uint32_t slot = 0;
  uint32_t generation = 0;  // 0: none
  bool operator==(const GateId&) const = default;
};

enum class GateState : uint8_t {
  kWaiting,
  kOpen,      // the stream has come there; or the transfer has delivered
  kAborted,   // abort(), or the device was lost
  kDeadline,  // ended by its deadline
};

// A stream that waits.
struct Hold {
  GateId id;
  // A kernel behind the wait reads `delivered` here; any other value means that nothing was
  // delivered. Host memory that the device can read, valid until close().
  DevicePointer outcome = 0;
  uint64_t delivered = 0;
};

// For one thread at a time. The device outlives it.
class StreamGates {
 public:
  // Unavailable where the device or its driver cannot let a stream wait for a word: after() would
  // work there, hold() would not, so there are no gates at all. `gates`: how many at a time, at
  // most kMostGates.
  static constexpr size_t kMostGates = 1 << 16;
  static absl::StatusOr<std::unique_ptr<StreamGates>> open(const Device& device, size_t gates = 64);
  // Aborts what is still held and waits for the streams to have passed, for a second at most; what
  // a stream may read even then stays allocated.
  ~StreamGates();
  StreamGates(const StreamGates&) = delete;
  StreamGates& operator=(const StreamGates&) = delete;

  // All that is on the stream now. ResourceExhausted when all gates are taken, until close().
  absl::StatusOr<GateId> after(Stream stream, Time deadline);
  // A gate that opens when the event has happened. The event was recorded before, and stays until
  // close().
  absl::StatusOr<GateId> after(Event event, Time deadline);
  // The stream waits here, from now on. InvalidArgument for the device's streams for copies.
  absl::StatusOr<Hold> hold(Stream stream, Time deadline);

  // A query of the driver at most; ends a gate that is past its deadline. NotFound for a gate that
  // was closed.
  absl::StatusOr<GateState> poll(GateId id, Time now);
  // Why the driver could not tell poll() how far the stream is: its words. OK: it could.
  absl::Status failure(GateId id) const;
  // The transfer has delivered: the stream goes on. FailedPrecondition when it went on before.
  absl::Status release(GateId id);
  absl::Status abort(GateId id);
  // A gate that still waits is aborted. What holds a stream is used again when the stream has
  // passed.
  absl::Status close(GateId id);

 private:
  // Host memory that the device reads; a line of its own, so that polling does not slow others.
  struct alignas(64) Words {
    uint64_t flag = 0;     // the stream waits until it is not behind its epoch
    uint64_t outcome = 0;  // 2 x epoch: delivered; one more: not
  };
  struct Gate {
    uint32_t generation = 0;
    bool taken = false;
    bool holds = false;    // a stream waits for the flag
    bool passing = false;  // closed, but the stream may not have passed
    GateState state = GateState::kWaiting;
    Time deadline = kNever;
    uint64_t epoch = 0;
    Event own = nullptr;      // made when it is first needed
    Event awaited = nullptr;  // `own`, or the caller's
    absl::Status failure;     // of asking for it
  };

  explicit StreamGates(const Device& device) : device_(device) {}
  absl::Status start(size_t gates);
  // OK if transfers can be ordered with the stream.
  absl::Status check(Stream stream) const;
  // `marks`: with an event of its own.
  absl::StatusOr<uint32_t> take(Time deadline, bool marks);
  GateId id_of(uint32_t slot) const { return {slot, gates_[slot].generation}; }
  absl::StatusOr<Gate*> find(GateId id);
  bool passed(Gate& gate) const;
  absl::Status mark(const Gate& gate, Stream stream) const;
  void end(Gate& gate, GateState state);

  const Device& device_;
  std::vector<Gate> gates_;
  std::unique_ptr<RegisteredPages> pages_;
  Words* words_ = nullptr;  // in them, one for each gate
  bool unmarked_ = false;   // a stream waits, and nothing can tell when it has passed
};

}  // namespace baton::gpudirect
