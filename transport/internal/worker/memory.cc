// How memory is registered: with the providers that take it, and with a ring for what is staged.
#include <algorithm>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "transport/internal/mapped.h"
#include "transport/internal/worker/core.h"
#include "transport/internal/worker/staging.h"

namespace baton::internal {

absl::StatusOr<MemoryRegion> WorkerCore::register_examined(void* data, size_t size, Access access,
                                                           const Examined& memory,
                                                           const absl::Status& no_ring) {
  const std::lock_guard lock(mutex);
  auto entry = regions.add(static_cast<std::byte*>(data), size, access, memory.file);
  if (!entry.ok()) return entry.status();
  RegionEntry& row = **entry;
  row.writable = memory.writable;
  row.place = memory.place;
  row.shared = memory.shared;
  row.by_address = memory.why_not_by_address.ok();
  const MemoryRegion region{row.base, row.size, row.index, row.generation, row.access, row.place};
  if (absl::Status status = add_region(
          row, {memory.why_no_dma_buf, memory.why_not_by_address, memory.why_not_shared, no_ring});
      !status.ok()) {
    regions.remove(region).IgnoreError();
    return status;
  }
  // Closed with `memory`.
  if (memory.made.valid()) row.file.fd = -1;
  row.shared.fd = -1;
  return region;
}

// True if some provider cannot reach such memory by itself.
bool WorkerCore::wants_ring(const RegionEntry& row) const {
  return row.place.device >= 0 &&
         std::any_of(providers.begin(), providers.end(),
                     [&](const auto& provider) { return !provider->takes(row).ok(); });
}

absl::Status WorkerCore::make_ring(int device) {
  {
    const std::lock_guard lock(mutex);
    if (staging != nullptr && staging->has_ring(device)) return absl::OkStatus();
  }
  const DeviceMemory* devices = device_memory();
  if (devices == nullptr)
    return absl::UnavailableError("built without CUDA support (link gpudirect)");
  absl::StatusOr<std::unique_ptr<StagingRing>> made =
      devices->staging_ring(device, RingMarks::with_room(ring_bytes), ring_kernels);
  if (!made.ok()) return made.status();
  const std::lock_guard lock(mutex);
  if (staging_for_device_memory().has_ring(device)) return absl::OkStatus();
  return staging->add_ring(device, *std::move(made));
}

Staging& WorkerCore::staging_for_device_memory() {
  if (staging == nullptr) staging = std::make_unique<Staging>(*this);
  return *staging;
}

// Gives a region to all providers that take it; all of them take memory of the host.
absl::Status WorkerCore::add_region(RegionEntry& row, std::initializer_list<absl::Status> missing) {
  std::vector<Provider*> have;
  std::vector<Provider*> sharing;  // what their peers cannot map is staged
  const auto take_back = [&] {
    // No peer has heard of it yet, so no transfer can be using it.
    for (const auto* list : {&have, &sharing}) {
      for (Provider* other : *list) other->remove_region(row, *this).IgnoreError();
    }
  };
  std::vector<std::string> reasons;
  for (const auto& provider : providers) {
    absl::Status status = provider->takes(row);
    if (!status.ok()) {
      reasons.emplace_back(status.message());
      if (!provider->shares(row)) continue;
      if (status = provider->add_region(row); status.ok()) {
        sharing.push_back(provider.get());
      } else {
        reasons.emplace_back(status.message());
      }
      continue;
    }
    status = provider->add_region(row);
    if (!status.ok() && staging != nullptr && staging->has_ring(row.place.device)) {
      reasons.emplace_back(status.message());
      continue;
    }
    if (!status.ok()) {
      take_back();
      return status;
    }
    have.push_back(provider.get());
  }
  row.direct = row.place.kind != MemoryKind::kHost && !have.empty();
  if (reasons.empty()) return absl::OkStatus();
  for (const absl::Status& why : missing) {
    if (!why.ok() && !why.message().empty()) reasons.emplace_back(why.message());
  }
  if (staging != nullptr && staging->has_ring(row.place.device)) {
    staging->note(row.place.device, absl::StrJoin(reasons, "; "));
    return absl::OkStatus();
  }
  if (!have.empty()) return absl::OkStatus();
  take_back();
  return absl::FailedPreconditionError(absl::StrFormat(
      "registering %u bytes of %s: %s", row.size, row.place.name(), absl::StrJoin(reasons, "; ")));
}

}  // namespace baton::internal
