// Transfers: the one operation. A transfer moves bytes between local and remote memory.
//
// Every transfer ends exactly once: done, failed, cancelled or past its deadline. After it has
// ended no byte of it moves any more, so its pages can be reused at once. The target may know more
// than the sender: when a transfer ends as cancelled or past its deadline, all bytes may have
// arrived, the counter may have risen and the notification may have been delivered; only the
// acknowledgement came too late. A transfer that is cancelled or out of time while its target is
// silent stays `ending` until the target answers or is declared dead. That delays no other
// transfer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "transport/clock.h"
#include "transport/counter.h"
#include "transport/layout.h"
#include "transport/region.h"

namespace baton {

// A peer of this worker. Stale after the peer went down: an error, never a crash.
struct PeerId {
  uint32_t index = 0;
  uint32_t generation = 0;  // 0: none
  bool operator==(const PeerId&) const = default;
};

// A transfer of this worker, valid from submit() to release().
struct TransferId {
  uint32_t slot = 0;
  uint32_t generation = 0;  // 0: none
  bool operator==(const TransferId&) const = default;
};

enum class Op : uint8_t {
  kWrite,  // local -> remote; done when the bytes are visible at the target
  kRead,   // remote -> local; done when the bytes are here
};

enum class TransferState : uint8_t {
  kActive,     // submitted, not ended
  kEnding,     // cancelled, out of time or failed; bytes of it may move until the target has spoken
  kDone,       // all bytes moved
  kFailed,     // status() says why and what to do
  kCancelled,  // ended by cancel()
  kDeadline,   // ended by its timeout
};
constexpr bool ended(TransferState s) {
  return s != TransferState::kActive && s != TransferState::kEnding;
}

// Up to this many bytes, a notification costs no heap allocation.
inline constexpr size_t kInlineNotification = 256;
inline constexpr size_t kMaxNotification = 64 << 10;

// Called on the progress thread when a transfer has ended, before anyone can see its state. Must
// not block; of the worker it may call submit(), cancel() and counter_value(). The status is OK, or
// says what ended it.
using EndCallback = void (*)(void* context, TransferId id, const absl::Status& status);

// A stream or an event of a CUDA device, by the driver's handle (CUstream and CUevent; cudaStream_t
// and cudaEvent_t are the same). A device of -1: none.
//
// A transfer cannot be part of a CUDA graph: submit() refuses a stream that is being captured
// (FailedPrecondition), because a graph may be launched many times and a transfer runs once; an
// event that was recorded into a graph fails its transfer. Name the stream before or after the
// recording, or the one that the graph is launched on. A stream is of the device's primary context,
// which frameworks use, else it is refused (InvalidArgument); an event may be of any.
struct DeviceStream {
  int device = -1;
  // Null or CU_STREAM_LEGACY: the device's legacy stream, which is PyTorch's default one.
  // CU_STREAM_PER_THREAD: that of the thread which calls submit().
  void* handle = nullptr;
};
struct DeviceEvent {
  int device = -1;
  void* handle = nullptr;
};

// A kernel reads here whether the transfer that its stream waited for (TransferRequest::release)
// succeeded: the 8 bytes at `address` equal `delivered` if it did. With any other value the
// transfer failed, and its bytes must not be used. The device reads the address; it stays until
// release(id), so keep the transfer until the kernels behind the wait have run.
struct StreamOutcome {
  uint64_t address = 0;
  uint64_t delivered = 0;
};

// The most waits between one worker's transfers and the streams of one device at a time.
inline constexpr size_t kMostStreamWaits = 1024;

// What to move. Copied by submit(), except the page lists inside the layouts.
struct TransferRequest {
  Op op = Op::kWrite;
  PeerId peer;
  MemoryRegion local;
  Layout local_layout;
  RemoteRegion remote;
  Layout remote_layout;
  RemoteCounter counter;   // writes only: incremented at the target when all bytes are there
  uint64_t increment = 1;  // at most CounterTable::kMaxValue
  // Writes only: set if the target polls the bytes before the counter rises, as NCCL's LL and LL128
  // do: it takes a line of 128 bytes as complete when its last word has arrived. Over shm, into
  // memory that is mapped, bytes then become visible in the order of their addresses. Elsewhere the
  // kernel (tcp, shm's other memory) or the adapter decides the order; within a line it was
  // ascending wherever we measured; PCIe's relaxed ordering promises less (verbs.relaxed_ordering).
  bool polled = false;
  // Writes only: delivered at the target when all bytes are there. A peer's inbox takes 4 MiB of
  // them from one sender (each counts 64 bytes more than it has): a transfer with the next one
  // stays active until the application there has read some with next_notification(), and counts
  // for the peer's share of the transfers (Worker::submit()).
  std::string_view notify;
  Time timeout = kNever;  // from submit(); past it the transfer ends as kDeadline
  EndCallback on_end = nullptr;
  void* context = nullptr;
  bool detached = false;  // the worker releases it when it has ended; on_end still comes

  // Order with streams of CUDA devices, for memory of theirs or of the host's; no thread waits.
  // These need a `timeout`, for nothing else ends a stream's wait. Of one worker at most
  // kMostStreamWaits are under way for a device: ResourceExhausted from submit() beyond. Each of
  // the three is one; the first two until the transfer begins or ends, `release` until release(id).
  DeviceStream after;       // not begun before all that is on this stream now has run
  DeviceEvent after_event;  // nor before this event, recorded already, which stays until then
  // Work put on this stream from now on runs when the transfer has ended, or at its timeout;
  // kernels read which one at Worker::outcome(). The thread that drives the worker enforces the
  // timeout: on that thread call nothing that waits for the stream (cudaStreamSynchronize). A
  // legacy stream that waits also blocks cudaMemcpy and cudaFree in any thread, and all streams
  // that were not created non-blocking: give the worker a thread of its own then.
  DeviceStream release;
};

}  // namespace baton
