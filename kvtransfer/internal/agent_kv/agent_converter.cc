// Staging memory, and the thread that takes transfers on, one step of each in turn.
#include "kvtransfer/internal/agent_kv/agent_converter.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "absl/strings/str_format.h"
#include "kvtransfer/internal/agent_kv/agent_requantise_transfer.h"

namespace baton::kvtransfer {

AgentConverter::AgentConverter(Worker& worker, AgentOutbox& outbox, uint64_t staging_bytes)
    : worker_(worker), outbox_(outbox), slot_bytes_(slot_bytes(staging_bytes)) {}

AgentConverter::~AgentConverter() {
  stop();
  if (staging_ != nullptr) munmap(staging_, kSlots * slot_bytes_);
}

absl::Status AgentConverter::prepare() {
  const std::lock_guard lock(mutex_);
  if (stop_) return absl::FailedPreconditionError("the agent is being destroyed");
  if (staging_ == nullptr) {
    const uint64_t bytes = kSlots * slot_bytes_;
    void* const memory =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      return absl::ResourceExhaustedError(
          absl::StrFormat("no %u bytes of staging memory: %s; AgentOptions::staging_bytes says how "
                          "many there are",
                          bytes, strerror(errno)));
    }
    absl::StatusOr<MemoryRegion> region = worker_.register_memory(memory, bytes, Access::kLocal);
    if (!region.ok()) {
      munmap(memory, bytes);
      return region.status();
    }
    staging_ = static_cast<std::byte*>(memory);
    region_ = *region;
    for (uint32_t slot = 0; slot < kSlots; ++slot) free_slots_.push_back(slot);
  }
  if (thread_.joinable()) return absl::OkStatus();
  try {
    thread_ = std::thread([this] { work(); });
  } catch (const std::system_error& none) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("no thread to requantise KV: %s; raise `ulimit -u`", none.what()));
  }
  return absl::OkStatus();
}

void AgentConverter::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  poke();
  if (thread_.joinable()) thread_.join();
}

bool AgentConverter::uses(const MemoryRegion& memory) {
  std::unique_lock lock(mutex_);
  const auto busy = [&](const auto& transfer) {
    return transfer->stop_ && transfer->converting_ && transfer->uses(memory);
  };
  converted_.wait(lock, [&] { return std::none_of(running_.begin(), running_.end(), busy); });
  return std::any_of(running_.begin(), running_.end(), [&](const auto& transfer) {
    return !transfer->stop_ && transfer->uses(memory);
  });
}

void AgentConverter::work() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    bool did_something = false;
    const size_t transfers = running_.size();
    for (size_t i = 0; i < transfers && !running_.empty() && !stop_; ++i) {
      const std::shared_ptr<AgentRequantiseTransfer> transfer = running_[turn_++ % running_.size()];
      did_something |= transfer->step(lock);
      unlock_and_wake(lock);
      lock.lock();
    }
    if (did_something) continue;
    lock.unlock();
    {
      std::unique_lock poked(poke_mutex_);
      poked_.wait(poked, [this] { return poke_; });
      poke_ = false;
    }
    lock.lock();
  }
}

void AgentConverter::poke() {
  {
    const std::lock_guard lock(poke_mutex_);
    poke_ = true;
  }
  poked_.notify_one();
}

void AgentConverter::unlock_and_wake(std::unique_lock<std::mutex>& lock) {
  const bool wake = std::exchange(wake_, false);
  lock.unlock();
  if (wake) worker_.wake();
}

}  // namespace baton::kvtransfer
