// A staging ring: pinned memory of the host, and copies between it and one device, for the routes
// that move bytes by the CPU.
//
// A byte of a device that goes over such a route takes three steps, and chunks of a transfer are in
// different steps at the same time:
//
//   device --copy--> ring ==wire==> ring --copy--> device
//
// Who has how much of the ring, and what travels when, is the worker's business
// (transport/internal/worker/staging.h). Here are the copies:
//   - each direction has a stream of its own, never the legacy one, and at most kQueuedAhead copies
//     are on it: an engine takes them in the order in which they came, whatever is urgent. What is
//     urgent goes first when the next one is put there;
//   - no single copy is longer than kLongestCopy; and where something urgent has lately come by, as
//     it will again, copies of bulk are cut into parts of kShortCopy, which cost a tenth of the
//     rate;
//   - a list of pieces goes the way that costs least (copier.h): small ones are packed by a kernel,
//     where there are kernels, for each descriptor takes a copy engine's time;
//   - an event stands behind each, and progress() asks it; nothing here waits;
//   - a copy that fails ends with the driver's words once the engine has let go of its memory. A
//     lost device moves nothing any more: all its copies end so.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gpudirect/contract/stream_slot.h"
#include "gpudirect/copies/copier.h"
#include "gpudirect/device.h"
#include "transport/internal/device_memory.h"

namespace baton::gpudirect {

// Pins host memory until the last caller in this process releases it: several groups copy to and
// from the same memory. Any thread; the device outlives what is returned.
absl::StatusOr<std::shared_ptr<void>> pin_host(const Device& device, absl::Span<std::byte> memory);

// The means to copy lists of pieces on a device: a launcher for kernels and a table of measured
// costs.
struct CopyMeans {
  const Launcher* launcher = nullptr;  // null: no kernels
  CopyTable table;                     // what each way costs
};

// Not thread-safe. Ends after its copies have; the device and the launcher outlive it.
class PinnedRing final : public internal::StagingRing {
 public:
  static constexpr size_t kLongestCopy = 4 << 20;
  static constexpr size_t kQueuedAhead = 2;
  static constexpr size_t kShortCopy = 1 << 20;
  static constexpr size_t kShortFor = 64 << 20;  // bytes of bulk, from an urgent copy on

  // ResourceExhausted where the host has no such memory, or the driver's words where it cannot be
  // pinned. Blocks for about a second per 2 GiB. With kernels it takes 8 MiB of the device.
  static absl::StatusOr<std::unique_ptr<PinnedRing>> create(const Device& device, size_t bytes,
                                                            const CopyMeans& means = {});
  ~PinnedRing() override;
  PinnedRing(const PinnedRing&) = delete;
  PinnedRing& operator=(const PinnedRing&) = delete;

  absl::Span<std::byte> memory() const override { return {base_, size_}; }
  int fd() const override { return fd_; }
  void copy(internal::CopyDirection direction, uint64_t cookie, bool urgent,
            absl::Span<const internal::CopyRun> runs) override;
  void drop(uint64_t cookie) override;
  bool progress(const Ended& ended) override;
  bool busy() const override;
  std::string explain() const override;
  absl::Status alive() const override { return device_.alive(); }
  absl::StatusOr<std::shared_ptr<void>> pin(absl::Span<std::byte> memory) const override {
    return pin_host(device_, memory);
  }

 private:
  struct Copy {
    uint64_t cookie = 0;
    std::vector<internal::CopyRun> runs;
    absl::Status status;
    // Progress of bulk, which is begun part by part.
    size_t run = 0;   // the first that is not begun, or not all of it,
    size_t done = 0;  // but so much
    bool begun() const { return run != 0 || done != 0; }
    bool all_begun() const { return run == runs.size(); }
  };
  struct Flight {
    Copy copy;  // of a part that others follow: its cookie and status
    bool last = true;
    Event event = nullptr;  // null: it could not be recorded, so the stream itself is asked
    PollErrorLimit poll_errors;
  };
  struct Lane {
    std::deque<Copy> urgent;
    std::deque<Copy> bulk;
    std::deque<Flight> flying;
    std::vector<Event> events;  // not in use
    size_t short_left = 0;      // bytes of bulk that go in short copies
    std::unique_ptr<Copier> copier;
  };

  explicit PinnedRing(const Device& device) : device_(device) {}
  absl::Status map(size_t bytes);
  absl::Status pin();
  absl::Status open_copiers(const CopyMeans& means);
  CopyRoute route(const Lane& lane) const;
  Stream stream(const Lane& lane) const;
  void begin(Lane& lane, Copy& copy, size_t most);
  void end(Lane& lane, Flight& flight);
  void end_dropped(Lane& lane);
  bool over(Lane& lane, Flight& flight);
  void work(Lane& lane);

  const Device& device_;
  std::byte* base_ = nullptr;
  size_t size_ = 0;
  int fd_ = -1;
  bool pinned_ = false;
  std::array<Lane, 2> lanes_;  // by CopyDirection
  PollErrorLimit making_current_;
  std::vector<Event> made_;
  std::vector<CopyPiece> pieces_;
  std::vector<std::pair<uint64_t, absl::Status>> ended_;      // not told yet
  std::vector<std::pair<uint64_t, absl::Status>> announced_;  // being told; keeps its memory
  std::vector<std::vector<internal::CopyRun>> spare_;
};

}  // namespace baton::gpudirect
