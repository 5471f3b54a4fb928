// The initiator's side of shm: finds, checks and maps the regions of a peer.
#include "transport/shm/peer_memory.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "transport/shm/exports.h"

namespace baton::shm {
namespace {

absl::Status stale() {
  return absl::NotFoundError(
      "the remote region is stale: its owner deregistered it; fetch its RemoteRegion again");
}

}  // namespace

absl::Status PeerMemory::unreachable(const absl::Status& mapping) const {
  if (absl::IsUnavailable(cma_))
    return cma_;  // the peer is gone, which its connection is about to say
  const std::string why = mapping.ok()
                              ? "its memory does not come from a MemoryPool, so it cannot be mapped"
                              : std::string(mapping.message());
  return absl::FailedPreconditionError(
      absl::StrFormat("shm cannot reach the remote region: %s, and %s. Allocate it from a "
                      "MemoryPool, or make CMA work",
                      why, cma_.message()));
}

absl::Status PeerMemory::resolve(const TransferDescriptor& transfer, Target& target) const {
  const RemoteRegion& remote = transfer.remote;
  if (remote.index >= RegionTable::kCapacity || remote.generation == 0) return stale();
  const SharedRegion& row = rows()[remote.index];
  if (row.generation.load(std::memory_order_acquire) != remote.generation) return stale();
  const uint64_t key = row.key.load(std::memory_order_relaxed);
  const uint64_t size = row.size.load(std::memory_order_relaxed);
  const uint64_t base = row.base.load(std::memory_order_relaxed);
  const uint64_t number = row.file.load(std::memory_order_relaxed);
  const uint64_t offset = row.offset.load(std::memory_order_relaxed);
  const auto access = static_cast<Access>(row.access.load(std::memory_order_relaxed));
  // Read again: the row may have been given to another region meanwhile.
  if (!live(remote.index, remote.generation)) return stale();
  if (key != remote.key) {
    return absl::PermissionDeniedError(
        "the remote region's key is wrong: use the RemoteRegion that its owner gave out");
  }
  const bool write = transfer.op == Op::kWrite;
  if (!allows(access, write ? Access::kRemoteWrite : Access::kRemoteRead)) {
    return absl::PermissionDeniedError(
        absl::StrFormat("the remote region does not allow remote %s: its owner must register it so",
                        write ? "writes" : "reads"));
  }
  if (absl::Status status = transfer.remote_layout.check(size, "remote"); !status.ok()) {
    return status;
  }
  absl::Status mapping;
  if (number != 0) {
    const auto file = files_.find(number);
    if (file == files_.end()) {
      target.path = Path::kNotYet;
      return absl::OkStatus();
    }
    mapping = file->second.status;
    if (file->second.on_device) {
      if (!mapping.ok()) return mapping;
      target.path = Path::kNotYet;
      if (file->second.device == nullptr) return absl::OkStatus();
      const size_t mapped = file->second.device->size();
      if (size > mapped || offset > mapped - size) {
        return absl::OutOfRangeError("the remote region lies outside what its owner has shared");
      }
      target.path = Path::kDevice;
      target.device = file->second.device;
      target.address = offset;
      return absl::OkStatus();
    }
    if (mapping.ok()) {
      const size_t mapped = file->second.mapping->size();
      if (size > mapped || offset > mapped - size) {
        return absl::OutOfRangeError("the remote region lies outside the file that its owner sent");
      }
      target.path = Path::kMapped;
      target.mapped = file->second.mapping->data() + offset;
      target.file = number;
      return absl::OkStatus();
    }
  }
  if (!cma_.ok()) return unreachable(mapping);
  target.path = Path::kCma;
  target.address = base;
  return absl::OkStatus();
}

absl::StatusOr<RemoteView> PeerMemory::view(const RemoteRegion& region) const {
  TransferDescriptor read;
  read.op = Op::kRead;
  read.remote = region;
  read.remote_layout = Layout::contiguous(0, region.size);
  Target target;
  if (absl::Status status = resolve(read, target); !status.ok()) return status;
  switch (target.path) {
    case Path::kNotYet:
      return absl::UnavailableError("the region's file has not arrived yet: ask again");
    case Path::kDevice:
      return absl::UnimplementedError("the region is memory of a device");
    case Path::kCma:
      return absl::UnimplementedError("the region's memory does not come from a MemoryPool");
    case Path::kMapped:
      break;
  }
  return RemoteView{target.mapped, region.size, files_.at(target.file).mapping};
}

absl::Status PeerMemory::reaches(const RemoteRegion& region) const {
  // Errors of a stale or forged region are reported when it is used.
  if (cma_.ok() || region.index >= RegionTable::kCapacity) return absl::OkStatus();
  const SharedRegion& row = rows()[region.index];
  if (!live(region.index, region.generation)) return absl::OkStatus();
  const uint64_t number = row.file.load(std::memory_order_relaxed);
  if (number == 0) return unreachable(absl::OkStatus());
  const auto file = files_.find(number);
  if (file == files_.end() || file->second.status.ok()) return absl::OkStatus();
  return unreachable(file->second.status);
}

absl::Status PeerMemory::add_file(uint64_t number, int fd, uint64_t bytes) {
  if (number == 0 || files_.size() >= RegionTable::kCapacity || files_.contains(number)) {
    return absl::InvalidArgumentError("the peer sent more files than it can have regions");
  }
  auto mapping = MappedFile::map(fd, bytes, MappedFile::Protection::kReadWrite, "region file");
  File file;
  if (mapping.ok()) {
    file.mapping = std::make_shared<MappedFile>(*std::move(mapping));
    populating_ = number;
  } else if (absl::IsResourceExhausted(mapping.status())) {
    file.status = mapping.status();
  } else {
    return mapping.status();
  }
  files_.emplace(number, std::move(file));
  return absl::OkStatus();
}

absl::Status PeerMemory::add_device_file(uint64_t number, base::UniqueFd fd,
                                         const DeviceExport& memory) {
  if (number == 0 || files_.size() >= RegionTable::kCapacity || files_.contains(number)) {
    return absl::InvalidArgumentError("the peer sent more files than it can have regions");
  }
  File file;
  file.on_device = true;
  file.memory = memory;
  // It is open until the memory is first used, and most never is: none that is too many.
  const absl::Status kept = fd.valid() ? may_be_kept(fd.get()) : absl::OkStatus();
  if (kept.ok()) {
    file.fd = std::move(fd);
  } else {
    file.status = absl::FailedPreconditionError(absl::StrCat("no CUDA IPC: ", kept.message()));
  }
  files_.emplace(number, std::move(file));
  return absl::OkStatus();
}

std::atomic<uint64_t>* PeerMemory::free_mark() const {
  if (out_ == nullptr) return nullptr;
  for (std::atomic<uint64_t>& mark : out_->opened) {
    if (mark.load(std::memory_order_relaxed) == 0) return &mark;
  }
  return nullptr;
}

// Once: what could not be mapped is not tried again.
absl::Status PeerMemory::map(uint64_t number, File& file, const RemoteRegion& remote) const {
  const internal::DeviceMemory* devices = internal::device_memory();
  if (devices != nullptr) {
    if (absl::Status status = devices->may_map(file.memory); !status.ok()) return status;
  }
  std::atomic<uint64_t>* mark = nullptr;
  if (file.memory.by_handle && !file.memory.same_process) {
    mark = free_mark();
    if (mark == nullptr) {
      return file.status = absl::FailedPreconditionError(
                 absl::StrFormat("no CUDA IPC: %u allocations of the peer are open here already; "
                                 "register fewer and "
                                 "larger ones",
                                 Lane::kMostOpened));
    }
    // The owner clears its rows and then looks at the marks: it sees this one, or we see its row.
    mark->store(number, std::memory_order_seq_cst);
    if (!live(remote.index, remote.generation)) {
      mark->store(0, std::memory_order_release);
      return stale();
    }
  }
  file.memory.fd = file.fd.get();
  absl::StatusOr<std::unique_ptr<internal::PeerMapping>> mapped =
      devices == nullptr
          ? absl::UnimplementedError("no CUDA IPC: built without CUDA support (link gpudirect)")
          : devices->map(file.memory);
  file.fd.reset();
  if (mapped.ok()) {
    // The mark goes when the mapping has: the owner may free the memory then.
    file.device = std::shared_ptr<const internal::PeerMapping>(
        mapped->release(), [mark](const internal::PeerMapping* mapping) {
          delete mapping;
          if (mark != nullptr) mark->store(0, std::memory_order_release);
        });
    return absl::OkStatus();
  }
  if (mark != nullptr) mark->store(0, std::memory_order_release);
  // Unavailable would mean: ask again.
  return file.status = absl::FailedPreconditionError(absl::StrCat(
             "no CUDA IPC: ", absl::StripPrefix(mapped.status().message(), "no CUDA IPC: ")));
}

bool PeerMemory::has_handles() const {
  return out_ != nullptr && std::any_of(out_->opened.begin(), out_->opened.end(),
                                        [](const auto& mark) { return mark.load() != 0; });
}

bool PeerMemory::asked_back() const {
  return out_ != nullptr &&
         std::any_of(out_->opened.begin(), out_->opened.end(),
                     [](const auto& mark) { return (mark.load() & Lane::kAskedBack) != 0; });
}

void PeerMemory::give_back() {
  for (const std::atomic<uint64_t>& mark : out_->opened) {
    const uint64_t asked = mark.load(std::memory_order_acquire);
    if ((asked & Lane::kAskedBack) != 0) files_.erase(asked & ~Lane::kAskedBack);
  }
}

absl::Status PeerMemory::maps(int device, const RemoteRegion& remote) const {
  if (remote.index >= RegionTable::kCapacity) return stale();
  const SharedRegion& row = rows()[remote.index];
  if (!live(remote.index, remote.generation)) return stale();
  const auto file = files_.find(row.file.load(std::memory_order_relaxed));
  if (file == files_.end()) {
    // Its owner may just have given the row to another region.
    if (!live(remote.index, remote.generation)) return stale();
    return absl::UnavailableError("the export of the peer's memory has not arrived yet");
  }
  if (!file->second.on_device) return absl::FailedPreconditionError("memory of the host");
  if (!file->second.status.ok()) return file->second.status;
  if (file->second.device == nullptr) {
    if (absl::Status status = map(file->first, file->second, remote); !status.ok()) return status;
  }
  return file->second.device->reached_by(device);
}

std::string PeerMemory::about_devices() const {
  size_t mapped = 0;
  size_t by_handle = 0;
  std::string why;
  for (const auto& [number, file] : files_) {
    if (file.device != nullptr) ++mapped;
    if (file.device != nullptr && file.memory.by_handle) ++by_handle;
    if (!file.status.ok() && file.on_device) why = std::string(file.status.message());
  }
  if (mapped == 0) return why;
  std::string handles;
  if (by_handle > 0) handles = absl::StrFormat(" (%u of cudaMalloc, by its handles)", by_handle);
  return absl::StrFormat("CUDA IPC: %u allocations mapped%s%s%s", mapped, handles,
                         why.empty() ? "" : "; ", why);
}

bool PeerMemory::populate(size_t bytes) {
  if (populating_ == 0) return false;
  if (const auto file = files_.find(populating_); file != files_.end()) {
    if (file->second.mapping->populate(bytes)) return true;
  }
  populating_ = 0;
  for (const auto& [number, file] : files_) {
    if (file.mapping != nullptr && !file.mapping->populated()) populating_ = number;
  }
  return populating_ != 0;
}

}  // namespace baton::shm
