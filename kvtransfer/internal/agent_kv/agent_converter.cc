// Staging memory, and the thread that takes transfers on, one step of each in turn.
#include "kvtransfer/internal/agent_kv/agent_converter.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kvtransfer/internal/agent_kv/agent_requantise_transfer.h"
#include "kvtransfer/internal/agent_kv/device_rows.h"
#include "transport/base/limits/memory_left.h"

namespace baton::kvtransfer {

namespace {

// How often it is looked whether kernels have ended, which take microseconds for a slot.
constexpr std::chrono::microseconds kAskKernels{10};

}  // namespace

AgentConverter::AgentConverter(Worker& worker, AgentOutbox& outbox, uint64_t staging_bytes)
    : worker_(worker), outbox_(outbox), slot_bytes_(slot_bytes(staging_bytes)) {}

AgentConverter::~AgentConverter() {
  stop();
  for (const auto& room : rooms_) {
    if (room->memory != nullptr) munmap(room->memory, kSlots * slot_bytes_);
  }
}

uint32_t AgentConverter::Room::slot_for(std::string_view agent) const {
  const auto free = std::find(users.begin(), users.end(), "");
  const bool last = std::count(users.begin(), users.end(), "") == 1;
  const bool has_some = std::find(users.begin(), users.end(), agent) != users.end();
  return last && has_some ? kSlots : static_cast<uint32_t>(free - users.begin());
}

AgentConverter::Room* AgentConverter::find(const MemoryPlace& place) {
  const auto at = std::find_if(rooms_.begin(), rooms_.end(),
                               [&](const auto& room) { return room->place == place; });
  return at == rooms_.end() ? nullptr : at->get();
}

absl::StatusOr<AgentConverter::Room*> AgentConverter::prepare(const MemoryPlace& place) {
  const std::lock_guard making(make_mutex_);
  std::unique_ptr<Room> made;
  if (find(place) == nullptr) {
    auto room = make(place);
    if (!room.ok()) return room.status();
    made = *std::move(room);
  }
  const std::lock_guard lock(mutex_);
  if (made != nullptr) rooms_.push_back(std::move(made));
  if (stop_) return absl::FailedPreconditionError("the agent is being destroyed");
  if (thread_.joinable()) return find(place);
  try {
    thread_ = std::thread([this] { work(); });
  } catch (const std::system_error& none) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("no thread to requantise KV: %s; raise `ulimit -u`", none.what()));
  }
  return find(place);
}

absl::StatusOr<std::unique_ptr<AgentConverter::Room>> AgentConverter::make(
    const MemoryPlace& place) const {
  auto room = std::make_unique<Room>();
  room->place = place;
  absl::Status status =
      place.kind == baton::MemoryKind::kHost ? fill_host(*room) : fill_device(*room);
  if (!status.ok()) return status;
  return room;
}

absl::Status AgentConverter::fill_host(Room& room) const {
  const uint64_t bytes = kSlots * slot_bytes_;
  absl::Status fits = base::memory_fits("staging (AgentOptions::staging_bytes)", bytes);
  if (!fits.ok()) return fits;
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "cannot allocate %u bytes of staging memory: %s; AgentOptions::staging_bytes sets the size",
        bytes, strerror(errno)));
  }
  absl::StatusOr<MemoryRegion> region = worker_.register_memory(memory, bytes, Access::kLocal);
  if (!region.ok()) {
    munmap(memory, bytes);
    return region.status();
  }
  room.memory = static_cast<std::byte*>(memory);
  room.region = *region;
  return absl::OkStatus();
}

absl::Status AgentConverter::fill_device(Room& room) const {
  const uint64_t bytes = kSlots * slot_bytes_;
  const internal::DeviceMemory* const devices = internal::device_memory();
  if (devices == nullptr) {
    return absl::UnimplementedError(
        on_another_side("no kernel can requantise: built without CUDA support (link gpudirect)"));
  }
  auto kernel = devices->conversions(room.place.device);
  if (!kernel.ok()) {
    return absl::Status(
        kernel.status().code(),
        on_another_side(absl::StrCat("no requantising kernel for ", room.place.name(), ": ",
                                     kernel.status().message())));
  }
  auto memory = devices->allocate(room.place.device, bytes);
  absl::Status status = memory.status();
  absl::StatusOr<MemoryRegion> region = absl::UnknownError("");
  if (status.ok()) {
    region = worker_.register_memory((*memory)->data(), bytes, Access::kLocal);
    status = region.status();
  }
  if (!status.ok()) {
    return absl::Status(status.code(),
                        absl::StrFormat("cannot allocate %u bytes of staging memory on %s: %s; "
                                        "AgentOptions::staging_bytes sets the size",
                                        bytes, room.place.name(), status.message()));
  }
  room.kernel = *std::move(kernel);
  room.device_memory = *std::move(memory);
  room.region = *region;
  return absl::OkStatus();
}

void AgentConverter::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  poke();
  if (thread_.joinable()) thread_.join();
  // Nothing of the caches is touched any more when they have ended.
  for (const auto& room : rooms_) room->kernel = nullptr;
}

bool AgentConverter::uses(const MemoryRegion& memory) {
  std::unique_lock lock(mutex_);
  const auto busy = [&](const auto& transfer) {
    return transfer->at_processor() && transfer->stop_ && transfer->uses(memory);
  };
  converted_.wait(lock, [&] { return std::none_of(running_.begin(), running_.end(), busy); });
  return std::any_of(running_.begin(), running_.end(), [&](const auto& transfer) {
    return (!transfer->stop_ || transfer->converting_ != 0) && transfer->uses(memory);
  });
}

void AgentConverter::work() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    bool did_something = false;
    const size_t transfers = running_.size();
    for (size_t i = 0; i < transfers && !running_.empty() && !stop_; ++i) {
      const auto& next = running_[turn_++ % running_.size()];
      if (next->waits_for_slot()) continue;  // as thousands may
      const std::shared_ptr<AgentRequantiseTransfer> transfer = next;
      did_something |= transfer->step(lock);
      unlock_and_wake(lock);
      lock.lock();
    }
    if (did_something) continue;
    const bool ask = at_kernels_ != 0;
    lock.unlock();
    sleep(ask);
    lock.lock();
  }
}

void AgentConverter::sleep(bool ask) {
  std::unique_lock poked(poke_mutex_);
  const auto ready = [this] { return poke_; };
  if (ask) {
    poked_.wait_for(poked, kAskKernels, ready);
  } else {
    poked_.wait(poked, ready);
  }
  poke_ = false;
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
