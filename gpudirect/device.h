// One CUDA device, opened: its primary context, its facts, and a stream for each direction of
// copies.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpudirect/driver.h"
#include "gpudirect/facts.h"

namespace baton::gpudirect {

enum class Direction : uint8_t { kToHost, kToDevice, kBetween };  // kBetween: devices

// Thread-safe except for its destruction. It uses the primary context, as frameworks do, so their
// allocations can be used here. It outlives what was made with it: slabs, rings, regions. In a
// forked child the device is unusable: calls fail with FailedPrecondition, and the child's copies
// of such objects may be destroyed without harm to the parent's.
class Device {
 public:
  // NotFound: no such device. The driver's words and the remedy otherwise.
  static absl::StatusOr<std::unique_ptr<Device>> open(const Driver& driver, int ordinal);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Driver& driver() const { return driver_; }
  const DeviceFacts& facts() const { return facts_; }
  int ordinal() const { return facts_.ordinal; }
  Context context() const { return context_; }
  Stream stream(Direction direction) const { return streams_[static_cast<size_t>(direction)]; }

  // Makes the device's context current on this thread until the end of the scope; what was current
  // before is so again then. What is called in it has no part in CUDA graphs that the application
  // records meanwhile, on whichever thread: the driver would refuse most of it, and spoil the
  // graph.
  class Current {
   public:
    explicit Current(const Device& device);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    const absl::Status& status() const { return status_; }

   private:
    const Device& device_;
    absl::Status status_;
    std::optional<int> mode_;  // the thread's own, of recordings
  };

  // For destructors: gives something back while the context is current. What one failing call would
  // leave behind is the process's for good, so that is tried twice. On a lost device nothing is.
  template <typename Function>
  void give_back(const Function& function) const {
    for (int attempt = 0; attempt < 2; ++attempt) {
      const Current current(*this);
      if (!current.status().ok()) continue;
      function();
      return;
    }
  }

  // The driver's answer in words. From a loss on the device stays lost.
  absl::Status check(Result result, std::string_view what) const;
  // The same of a call that names another library's event or stream. What comes of it may be said
  // of the context that this was made in: a loss is the device's where our own stream says so too,
  // and else FailedPrecondition. The device's context is current.
  absl::Status check_named(Result result, std::string_view what) const;
  // OK as long as the device is of use.
  absl::Status alive() const;

 private:
  Device(const Driver& driver, DeviceFacts facts) : driver_(driver), facts_(std::move(facts)) {}
  absl::Status start();

  const Driver driver_;
  const DeviceFacts facts_;
  int handle_ = 0;
  Context context_ = nullptr;
  std::array<Stream, 3> streams_{};
  mutable std::atomic<Result> lost_{kSuccess};  // or why it is
};

}  // namespace baton::gpudirect
