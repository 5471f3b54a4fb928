// Orders transfers and the streams of a GPU, without a thread that waits.
//
//   before: a transfer must not read what a stream has still to write. after_stream() notes where
//           the stream is; passed() says when it has come there.
//   after:  a stream must not read what a transfer has still to deliver. hold() makes the stream
//           wait, end() lets it go on.
//
// Nothing but end() and close() ends a stream's wait, so who makes one has a deadline, and then
// ends it with a word that says that nothing was delivered. A kernel behind the wait reads that
// word (Hold::outcome) before it believes the data.
//
// CUDA does not see these waits when it orders its own work: a stream that is held must not be one
// that the transfer needs. The device's streams for copies are refused. So is a stream that is
// being recorded into a CUDA graph, where the wait would be one of the graph's, for each of its
// launches; and one of another device or context.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "gpudirect/device.h"
#include "gpudirect/registered_pages.h"
#include "transport/internal/device_memory.h"

namespace baton::gpudirect {

// For one thread at a time. The device outlives it.
class StreamGates final : public internal::TransferGates {
 public:
  // Unavailable where the device or its driver cannot let a stream wait for a word: after_...()
  // would work there, hold() would not, so there are no gates at all. `gates`: how many at a time,
  // at most kMostGates.
  static constexpr size_t kMostGates = 1 << 16;
  static absl::StatusOr<std::unique_ptr<StreamGates>> open(const Device& device, size_t gates = 64);
  // Ends what is still held and waits for the streams to have passed, for a second at most; what a
  // stream may read even then stays allocated.
  ~StreamGates() override;
  StreamGates(const StreamGates&) = delete;
  StreamGates& operator=(const StreamGates&) = delete;

  absl::StatusOr<Gate> after_stream(void* stream, Time deadline) override;
  // The event stays until close().
  absl::StatusOr<Gate> after_event(void* event, Time deadline) override;
  absl::StatusOr<Hold> hold(void* stream, Time deadline) override;
  // A query of the driver at most. NotFound for a gate that was closed.
  std::optional<absl::Status> passed(Gate gate, Time now) override;
  void end(Gate gate, bool delivered) override;
  // What holds a stream is used again when the stream has passed.
  void close(Gate gate) override;

 private:
  // Host memory that the device reads; a line of its own, so that polling does not slow others.
  struct alignas(64) Words {
    uint64_t flag = 0;     // the stream waits until it is not behind its epoch
    uint64_t outcome = 0;  // 2 x epoch: delivered; one more: not
  };
  struct Slot {
    uint32_t generation = 0;
    bool taken = false;
    bool holds = false;    // a stream waits for the flag
    bool passing = false;  // closed, but the stream may not have passed
    // Nothing: it waits; OK: the stream has come there, or the transfer has delivered; or why not.
    std::optional<absl::Status> result;
    uint64_t epoch = 0;
    Event own = nullptr;      // made when it is first needed
    Event awaited = nullptr;  // `own`, or the caller's
  };

  explicit StreamGates(const Device& device) : device_(device) {}
  absl::Status start(size_t gates);
  // OK if transfers can be ordered with the stream.
  absl::Status check(Stream stream) const;
  // `marks`: with an event of its own.
  absl::StatusOr<uint32_t> take(Time deadline, bool marks);
  Gate number_of(uint32_t slot) const { return uint64_t{slots_[slot].generation} << 32 | slot; }
  // Null: it was closed.
  Slot* find(Gate gate);
  bool passed(Slot& slot) const;
  absl::Status mark(const Slot& slot, Stream stream) const;
  void end(Slot& slot, bool delivered);

  const Device& device_;
  std::vector<Slot> slots_;
  std::unique_ptr<RegisteredPages> pages_;
  Words* words_ = nullptr;  // in them, one for each slot
  bool unmarked_ = false;   // a stream waits, and nothing can tell when it has passed
};

}  // namespace baton::gpudirect
