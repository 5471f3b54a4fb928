// Transfers that wait for streams of a device, and streams that wait for transfers
// (TransferRequest::after, after_event, release).
//
// submit() notes where the streams are, under this one's own lock: a stream is held from the moment
// that submit() returns. The transfer is then taken up like any other, but stands aside until its
// streams have come so far: the progress thread asks, and no thread blocks.
//
// Calls of communicators keep order with streams in the same way, by numbers of their own.
//
// Internal to the worker and to communicators.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/internal/device_memory.h"
#include "transport/transfer.h"

namespace baton::internal {

// Thread-safe.
class StreamOrder {
 public:
  static constexpr size_t kGates = kMostStreamWaits;  // of a device

  explicit StreamOrder(size_t slots) : slots_(slots) {}

  static bool wanted(const TransferRequest& request) {
    return request.after.device >= 0 || request.after_event.device >= 0 ||
           request.release.device >= 0;
  }

  // Makes the gates of a device where there are none yet; blocks while the driver does. No other
  // thread waits for it but others that make gates.
  absl::Status prepare(int device);
  // Notes the waits of a transfer. Blocks where prepare() does, for a device that it was not called
  // for. After an error nothing waits for anything.
  absl::Status begin(TransferId id, const TransferRequest& request, Time deadline);
  // Has one more stream wait for a transfer that has not ended, from here on.
  absl::Status hold(TransferId id, const DeviceStream& stream, Time deadline);
  // Whether the streams have come so far: nothing as long as they have not; then OK, or why they
  // never will. To be asked until it answers.
  std::optional<absl::Status> may_begin(TransferId id, Time now);
  // The transfer has ended, or its time is over: a stream that waits goes on. The first word
  // counts.
  void ended(TransferId id, bool delivered);
  // Its slot will be another's.
  void forget(TransferId id);
  // FailedPrecondition where no stream waits for it.
  absl::StatusOr<StreamOutcome> outcome(TransferId id);

 private:
  using Gate = TransferGates::Gate;
  struct Wait {
    TransferGates* of = nullptr;
    Gate gate = 0;
  };
  struct Entry {
    uint32_t generation = 0;  // of the transfer in the slot; 0: it has no waits
    std::array<Wait, 2> before;
    std::vector<Wait> held;
    StreamOutcome outcome;  // of the first
  };
  TransferGates* gates_of(int device);
  absl::Status note(Entry& entry, const TransferRequest& request, Time deadline);
  absl::Status hold(Entry& entry, const DeviceStream& stream, Time deadline);
  static void close(Wait& wait);
  static void close(Entry& entry);
  Entry* find(TransferId id);

  const size_t slots_;
  std::mutex making_;  // gates; before the other
  std::mutex mutex_;
  absl::flat_hash_map<int, std::unique_ptr<TransferGates>> devices_;
  std::vector<Entry> entries_;  // by slot; empty until the first is noted
};

}  // namespace baton::internal
