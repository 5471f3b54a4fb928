// The owner's side of shm: regions published in the control segment, and the files behind them.
#include "transport/shm/exports.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "transport/base/limits/refusals.h"

namespace baton::shm {

absl::StatusOr<Exports> Exports::create() {
  auto file = create_file("baton-control", sizeof(ControlSegment));
  if (!file.ok()) return file.status();
  auto gate = Gate::create();
  if (!gate.ok()) return gate.status();
  Exports exports;
  exports.file_ = *std::move(file);
  exports.gate_ = *std::move(gate);
  forbid_new_writers(exports.file_.fd.get());
  return exports;
}

absl::StatusOr<uint64_t> Exports::publish(const RegionEntry& region) {
  if (region.place.kind != MemoryKind::kHost) return publish_on_device(region);
  uint64_t number = 0;
  uint64_t fresh = 0;
  // A file that may shrink would raise SIGBUS in peers: such memory is reached like any other.
  if (region.file.fd >= 0 && !region.file.dma_buf && region.access != Access::kLocal &&
      shareable(region.file.fd)) {
    struct stat info {};
    if (fstat(region.file.fd, &info) != 0) {
      return absl::InvalidArgumentError(
          absl::StrFormat("the file behind the region cannot be used: %s", strerror(errno)));
    }
    const auto bytes = static_cast<uint64_t>(info.st_size);
    if (region.size > bytes || region.file.offset > bytes - region.size) {
      return absl::InvalidArgumentError(
          absl::StrFormat("the file behind the region has %u bytes, too few for %u bytes at %u",
                          bytes, region.size, region.file.offset));
    }
    number = share_file(false, info.st_dev, info.st_ino);
    if (number == 0) {
      base::UniqueFd fd(fcntl(region.file.fd, F_DUPFD_CLOEXEC, 0));
      if (!fd.valid()) {
        return absl::ResourceExhaustedError(
            base::refusal("a descriptor for the file behind the region", errno));
      }
      number = fresh = next_number_++;
      files_.push_back({number, info.st_dev, info.st_ino, bytes, std::move(fd), 1});
    }
  }
  fill(row(region.index), region, reinterpret_cast<uint64_t>(region.base), number,
       region.file.offset);
  return fresh;
}

// Peers get no address of it: none that they could use, and none to be mistaken for the host's.
absl::StatusOr<uint64_t> Exports::publish_on_device(const RegionEntry& region) {
  const DeviceExport& shared = region.shared;
  uint64_t number = share_file(true, shared.allocation[0], shared.allocation[1]);
  uint64_t fresh = 0;
  if (number == 0) {
    base::UniqueFd fd;
    if (!shared.by_handle) fd.reset(fcntl(shared.fd, F_DUPFD_CLOEXEC, 0));
    if (!shared.by_handle && !fd.valid()) {
      return absl::ResourceExhaustedError(
          base::refusal("a descriptor for memory of a device", errno));
    }
    const absl::Status kept = fd.valid() ? may_be_kept(fd.get()) : absl::OkStatus();
    if (!kept.ok()) {
      return absl::ResourceExhaustedError(absl::StrCat("no CUDA IPC: ", kept.message()));
    }
    number = fresh = next_number_++;
    files_.push_back({number, shared.allocation[0], shared.allocation[1], shared.bytes,
                      std::move(fd), 1, true, shared});
    files_.back().exported.fd = -1;
  }
  fill(row(region.index), region, 0, number, shared.offset);
  return fresh;
}

uint64_t Exports::share_file(bool on_device, uint64_t device, uint64_t inode) {
  for (File& file : files_) {
    if (file.on_device != on_device || file.device != device || file.inode != inode) continue;
    ++file.regions;
    return file.number;
  }
  return 0;
}

void Exports::fill(SharedRegion& out, const RegionEntry& region, uint64_t base, uint64_t number,
                   uint64_t offset) {
  out.access.store(static_cast<uint32_t>(region.access), std::memory_order_relaxed);
  out.key.store(region.key, std::memory_order_relaxed);
  out.size.store(region.size, std::memory_order_relaxed);
  out.base.store(base, std::memory_order_relaxed);
  out.file.store(number, std::memory_order_relaxed);
  out.offset.store(offset, std::memory_order_relaxed);
  out.generation.store(region.generation, std::memory_order_seq_cst);
}

void Exports::revoke(uint32_t index) { row(index).generation.store(0, std::memory_order_seq_cst); }

uint64_t Exports::forget_file(uint32_t index) {
  const uint64_t number = row(index).file.exchange(0, std::memory_order_relaxed);
  if (number == 0) return 0;
  for (size_t i = 0; i < files_.size(); ++i) {
    if (files_[i].number != number || --files_[i].regions != 0) continue;
    files_.erase(files_.begin() + static_cast<ptrdiff_t>(i));
    return number;
  }
  return 0;
}

const Exports::File* Exports::find_file(uint64_t number) const {
  for (const File& file : files_) {
    if (file.number == number) return &file;
  }
  return nullptr;
}

}  // namespace baton::shm
