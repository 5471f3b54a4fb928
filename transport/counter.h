// Counters: how a receiver learns that bytes have arrived without trusting any order.
//
// A transfer may carry an increment of a counter at its target. The increment becomes visible after
// every byte of that transfer is, exactly once, whatever number of rails carried it. "Layer 7 has
// arrived" is then `counter >= n`.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/region.h"

namespace baton {

// Handle to a counter of this worker. A plain value. Generation 0: none.
struct CounterId {
  uint32_t index = 0;
  uint16_t generation = 0;
};

// A peer needs this to increment a counter.
struct RemoteCounter {
  WorkerUid owner;
  uint32_t index = 0;
  uint16_t generation = 0;  // 0: none

  static constexpr size_t kEncodedBytes = 24;
  std::string encode() const;
  static absl::StatusOr<RemoteCounter> decode(std::string_view bytes);
};

// All counters of one worker, in one memfd so that a peer on the same machine can map and increment
// them itself. A word holds generation (16 bits) and value (48 bits) together: a late increment for
// a counter that was freed changes nothing, unless its word has been reused 32,767 times since. A
// freed word is reused only after kRest others, while others are left. Pages of the table take
// memory when their first word is used.
class CounterTable {
 public:
  static constexpr size_t kCapacity = 1 << 20;
  static constexpr size_t kRest = 16384;
  // Values are counted modulo one more.
  static constexpr uint64_t kMaxValue = (uint64_t{1} << 48) - 1;
  // No counter at all, but credits for notifications: between workers, travels as a counter does.
  static constexpr uint32_t kCredits = UINT32_MAX;
  // Likewise: what workers say to each other about their rails
  // (internal/messages/control_message.h).
  static constexpr uint32_t kControl = UINT32_MAX - 1;
  // And about memory of devices (internal/messages/staging_message.h).
  static constexpr uint32_t kStaging = UINT32_MAX - 2;
  static constexpr bool reserved(uint32_t index) { return index >= kStaging; }
  using Word = std::atomic<uint64_t>;

  static absl::StatusOr<CounterTable> create(WorkerUid owner);
  CounterTable(CounterTable&& other) noexcept;
  CounterTable& operator=(CounterTable&&) = delete;
  ~CounterTable();

  // Not thread-safe: under the worker's progress lock.
  absl::StatusOr<CounterId> allocate();
  absl::Status free(CounterId id);

  // Thread-safe, wait-free. A counter that does not exist reads as 0.
  uint64_t value(CounterId id) const;

  // Adds `amount`; false when the counter is gone. Release order. Lock-free; works on a mapped
  // table of another process too.
  static bool add(Word* words, uint32_t index, uint16_t generation, uint64_t amount);
  bool add(uint32_t index, uint16_t generation, uint64_t amount) {
    return add(words_, index, generation, amount);
  }

  RemoteCounter describe(CounterId id) const { return {owner_, id.index, id.generation}; }
  int fd() const { return fd_; }  // -1 where memfd is missing: peers then cannot map it
  static constexpr size_t kBytes = kCapacity * sizeof(Word);

 private:
  CounterTable() = default;
  WorkerUid owner_;
  Word* words_ = nullptr;
  int fd_ = -1;
  uint32_t used_ = 0;            // words that were ever given out, from the first
  std::vector<uint32_t> freed_;  // a ring
  size_t first_freed_ = 0;
  size_t freed_count_ = 0;
};

}  // namespace baton
