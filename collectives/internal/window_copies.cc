// Copies through pinned memory: into it, and from there to where the bytes belong.
#include "collectives/internal/window_copies.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace baton::collectives::internal {

namespace {

constexpr size_t kRingBytes = 1 << 20;
using baton::internal::CopyDirection;

}  // namespace

int device_of(const void* data, size_t bytes) {
  const baton::internal::DeviceMemory* const devices = baton::internal::device_memory();
  if (devices == nullptr || bytes == 0) return -1;
  const absl::StatusOr<MemoryPlace> place = devices->place(data, bytes);
  return place.ok() && place->kind == MemoryKind::kDevice ? place->device : -1;
}

void WindowCopies::open(int device) {
  const baton::internal::DeviceMemory* const devices = baton::internal::device_memory();
  if (devices == nullptr || ring_ != nullptr) return;
  auto ring = devices->staging_ring(device, kRingBytes, false);
  if (!ring.ok()) return;
  ring_ = *std::move(ring);
  device_ = device;
}

void WindowCopies::start(const Job& job) {
  jobs_.push_back(job);
  if (jobs_.size() == 1) step();
}

bool WindowCopies::advance() {
  if (jobs_.empty()) return false;
  ring_->progress([this](uint64_t, const absl::Status& status) {
    waits_ = false;
    if (!status.ok()) ended(status);
    step();
  });
  return true;
}

// Runs as far as possible without waiting for a device.
void WindowCopies::step() {
  std::byte* const pinned = ring_->memory().data();
  const auto move = [&](CopyDirection direction, const Job::Place& place, size_t offset,
                        size_t bytes) {
    std::byte* const data = place.data + offset;
    if (place.on_device) {
      const baton::internal::CopyRun run{data, pinned, bytes};
      ring_->copy(direction, 0, true, {&run, 1});
      waits_ = true;
    } else if (direction == CopyDirection::kToHost) {
      std::memcpy(pinned, data, bytes);
    } else {
      std::memcpy(data, pinned, bytes);
    }
  };
  while (!waits_ && !jobs_.empty()) {
    Job& job = jobs_.front();
    const bool adds = at_ == job.bytes;
    if (adds && job.word.data == nullptr) {
      ended(absl::OkStatus());
    } else if (adds && !job.word.on_device) {
      add(std::exchange(job.word, {}).data, job.add);
    } else if (!std::exchange(fetched_, !fetched_)) {
      piece_ = adds ? sizeof(uint64_t) : std::min(job.bytes - at_, ring_->memory().size());
      move(CopyDirection::kToHost, adds ? job.word : job.from, adds ? 0 : at_, piece_);
    } else if (adds) {
      uint64_t value = 0;
      std::memcpy(&value, pinned, sizeof value);
      value += job.add;
      std::memcpy(pinned, &value, sizeof value);
      move(CopyDirection::kToDevice, std::exchange(job.word, {}), 0, sizeof value);
    } else {
      move(CopyDirection::kToDevice, job.to, std::exchange(at_, at_ + piece_), piece_);
    }
  }
}

void WindowCopies::ended(const absl::Status& status) {
  const Job job = jobs_.front();
  jobs_.pop_front();
  at_ = 0;
  fetched_ = false;
  job.on_end(job.context, status);
}

}  // namespace baton::collectives::internal
