// What an agent has to requantise KV on its way: staging memory, in a few slots, and one thread
// that converts for all transfers in turns (agent_requantise_transfer.h). For caches on a device
// the slots are memory of it and a kernel converts, which the thread begins and asks about.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvtransfer/internal/agent_transfer.h"
#include "transport/internal/device_memory.h"
#include "transport/region.h"
#include "transport/worker.h"

namespace baton::kvtransfer {

class AgentOutbox;
class AgentRequantiseTransfer;

class AgentConverter final : public AgentStaging {
 public:
  AgentConverter(Worker& worker, AgentOutbox& outbox, uint64_t staging_bytes);
  ~AgentConverter() override;
  AgentConverter(const AgentConverter&) = delete;
  AgentConverter& operator=(const AgentConverter&) = delete;

  // A transfer has two at most, to convert one while the other one travels. Those with one agent
  // leave one for others: it may be silent, and keeps what it has.
  static constexpr size_t kSlots = 4;
  static constexpr size_t kSlotsOfTransfer = 2;
  static constexpr uint64_t kSlotUnit = 4096;
  static uint64_t slot_bytes(uint64_t staging_bytes) {
    return staging_bytes / kSlots / kSlotUnit * kSlotUnit;
  }
  // The least staging_bytes with such slots.
  static uint64_t staging_bytes(uint64_t slot_bytes) {
    return (slot_bytes + kSlotUnit - 1) / kSlotUnit * kSlotUnit * kSlots;
  }

  // Slots in one place, and who converts there.
  struct Room {
    MemoryPlace place;
    std::byte* memory = nullptr;  // of the host's
    MemoryRegion region;
    std::array<std::string_view, kSlots> users;  // with which agent a slot is used; "": it is free
    std::unique_ptr<internal::DeviceBuffer> device_memory;  // of a device's
    std::unique_ptr<internal::RowConversions> kernel;       // null: the processor

    std::byte* slot(uint32_t number, uint64_t bytes) const { return region.base + number * bytes; }
    // A free slot for a transfer with that agent, if it may have one: kSlots where not.
    uint32_t slot_for(std::string_view agent) const;
  };

  // The room for caches in a place, and a thread, where they are not there yet. It stays as long as
  // this. ResourceExhausted; of a device also Unimplemented, or the driver's words.
  absl::StatusOr<Room*> prepare(const MemoryPlace& place);
  void stop() override;
  bool uses(const MemoryRegion& memory) override;

 private:
  friend class AgentRequantiseTransfer;
  static_assert(kSlots <= internal::RowConversions::kSlots);

  Room* find(const MemoryPlace& place);  // locked, or while rooms are made; null: not there yet
  absl::StatusOr<std::unique_ptr<Room>> make(const MemoryPlace& place) const;
  absl::Status fill_host(Room& room) const;
  absl::Status fill_device(Room& room) const;
  void work();
  void sleep(bool ask);  // until poked; with `ask`, not for long
  // Tells the thread to look. Whoever calls may have whatever lock but poke_mutex_.
  void poke();
  // Wakes the waiters of transfers that have ended, after unlocking, since they take the lock.
  void unlock_and_wake(std::unique_lock<std::mutex>& lock);

  Worker& worker_;
  AgentOutbox& outbox_;
  const uint64_t slot_bytes_;

  std::mutex make_mutex_;  // so that a room is made once; before mutex_
  std::mutex mutex_;       // of what follows, and of all transfers' states
  std::condition_variable converted_;
  std::vector<std::unique_ptr<Room>> rooms_;                       // changed with both locks
  std::vector<std::shared_ptr<AgentRequantiseTransfer>> running_;  // until nothing of them moves
  size_t turn_ = 0;                                                // of these, whose is next
  bool stop_ = false;
  bool wake_ = false;      // one has ended, or something was submitted, and no waiter was woken yet
  size_t at_kernels_ = 0;  // pieces that kernels convert
  std::thread thread_;

  // By itself, so that whoever has whatever lock can say that there is something to do.
  std::mutex poke_mutex_;
  std::condition_variable poked_;
  bool poke_ = false;
};

}  // namespace baton::kvtransfer
