// The CPU's accesses to device memory for windows: adding to words there, and a rank's accesses to
// its own window. One after the other, so that a word is never seen before what was asked for
// earlier; through pinned memory, by the device's copy engines.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>

#include "absl/status/status.h"
#include "transport/internal/device_memory.h"

namespace baton::collectives::internal {

// The device that memory lies on, or -1.
int device_of(const void* data, size_t bytes);

// Under the endpoint's lock.
class WindowCopies {
 public:
  using OnEnd = void (*)(void* context, const absl::Status& status);
  // Bytes, and then a word to add to: either may be none.
  struct Job {
    struct Place {
      std::byte* data = nullptr;
      bool on_device = false;
    };
    Place from, to;
    size_t bytes = 0;
    Place word;
    uint64_t add = 0;
    OnEnd on_end = nullptr;
    void* context = nullptr;
  };

  // To a word of the host's.
  static void add(std::byte* word, uint64_t value) {
    std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(word))
        .fetch_add(value, std::memory_order_acq_rel);
  }
  // Makes what it takes to copy to and from one device, the first that is asked for. Blocks.
  void open(int device);
  // Whether it copies to and from that one.
  bool reaches(int device) const { return ring_ != nullptr && device == device_; }
  void start(const Job& job);
  // False: there is nothing to do. Never blocks.
  bool advance();
  // Until no byte moves any more.
  void finish() {
    while (advance()) {
    }
  }

 private:
  void step();
  void ended(const absl::Status& status);

  int device_ = -1;
  std::unique_ptr<baton::internal::StagingRing> ring_;
  std::deque<Job> jobs_;
  size_t at_ = 0, piece_ = 0;  // of the first one: what has moved, and what is in the ring
  bool fetched_ = false;       // what is in the ring has to go to its place
  bool waits_ = false;         // a copy is under way
};

}  // namespace baton::collectives::internal
