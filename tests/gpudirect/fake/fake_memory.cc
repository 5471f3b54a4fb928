// The fake's device memory: allocations are memfds, addresses are mappings of them without rights.
#include "absl/strings/str_format.h"
#include "tests/gpudirect/fake/entries.h"
#include "tests/std.h"

namespace baton::gpudirect {
namespace {

// By which its mappings and descriptors are found.
constexpr char kMemoryName[] = "device memory of the fake";
// By which a dma-buf is told from what was exported to a peer; nobody writes to either.
constexpr int kDmaBufMark = O_APPEND;

void* host_address(DevicePointer at) { return reinterpret_cast<void*>(static_cast<uintptr_t>(at)); }
std::string range(DevicePointer at, size_t bytes) {
  return absl::StrFormat("[%#x, +%u)", at, bytes);
}

// Puts what no processor may touch at that address: a descriptor's bytes, or nothing.
void put_at(DevicePointer at, size_t bytes, int flags, int fd) {
  void* const put = mmap(host_address(at), bytes, PROT_NONE, flags | MAP_FIXED, fd, 0);
  if (put == MAP_FAILED) std::abort();
}

// Never zeros: who reads before anything was written shall see it. But new pages are what the
// fake's memory costs, and most are never used: behind the beginning, in which small things lie,
// one page in sixteen.
void fill(std::byte* memory, size_t bytes) {
  constexpr size_t kPage = 4096;
  constexpr size_t kEach = 16 * kPage;
  for (size_t at = 0; at < bytes; at += kEach) {
    std::memset(memory + at, 0xa5, std::min(at == 0 ? kEach : kPage, bytes - at));
  }
}

}  // namespace

// `imported`: the descriptor of another allocation, whose bytes are shared.
int FakeDriver::descriptor_for_adapters(const void* address, size_t bytes, uint64_t* offset) {
  const std::lock_guard lock(mutex_);
  const DevicePointer at = reinterpret_cast<uintptr_t>(address);
  const auto found = mapping_at(at);
  if (found == mappings_.end() || bytes > found->first + found->second.size - at) return -1;
  if (!found->second.synchronous) {
    violate(Rule::kLifetime, "an adapter", "memory that may not be written yet when it reads");
  }
  *offset = at - found->first;
  Allocation& allocation = allocations_[found->second.allocation];
  allocation.exported = true;
  return fcntl(allocation.fd, F_DUPFD_CLOEXEC, 0);
}

AllocationHandle FakeDriver::make_allocation(size_t bytes, int device, int imported) {
  Allocation made{.size = bytes, .device = device, .imported = imported >= 0};
  made.fd =
      made.imported ? fcntl(imported, F_DUPFD_CLOEXEC, 0) : memfd_create(kMemoryName, MFD_CLOEXEC);
  if (made.fd < 0) std::abort();
  if (!made.imported && ftruncate(made.fd, static_cast<off_t>(bytes)) != 0) std::abort();
  made.view =
      static_cast<std::byte*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, made.fd, 0));
  if (!made.imported) fill(made.view, bytes);
  struct stat info {};
  fstat(made.fd, &info);
  made.file = info.st_ino;
  allocations_[next_handle_] = made;
  return next_handle_++;
}

// Whether a copy is queued that reaches these bytes by another mapping of them.
bool FakeDriver::copied_by_peers(const Mapping& mapping) const {
  const uint64_t file = allocations_.at(mapping.allocation).file;
  return std::any_of(mappings_.begin(), mappings_.end(), [&](const auto& other) {
    return other.second.allocation != mapping.allocation &&
           allocations_.at(other.second.allocation).file == file &&
           pending_on(other.first, other.second.size);
  });
}

void FakeDriver::drop_if_unused(AllocationHandle handle) {
  const Allocation& allocation = allocations_[handle];
  if (allocation.handles > 0 || allocation.mappings > 0) return;
  munmap(allocation.view, allocation.size);
  close(allocation.fd);
  allocations_.erase(handle);
}

void FakeDriver::map(DevicePointer at, AllocationHandle handle) {
  Allocation& allocation = allocations_[handle];
  put_at(at, allocation.size, MAP_SHARED, allocation.fd);
  ++allocation.mappings;
  mappings_[at] = {.size = allocation.size, .allocation = handle, .buffer = next_buffer_++};
}

void FakeDriver::unmap(Mappings::iterator mapping) {
  const auto [at, row] = *mapping;
  put_at(at, row.size, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  mappings_.erase(mapping);
  --allocations_[row.allocation].mappings;
  drop_if_unused(row.allocation);
}

FakeDriver::~FakeDriver() {
  while (!mappings_.empty()) unmap(mappings_.begin());
  for (auto& [at, bytes] : reserved_) munmap(host_address(at), bytes);
  for (auto& [handle, allocation] : allocations_) {
    munmap(allocation.view, allocation.size);
    close(allocation.fd);
  }
  forget();
}

FakeDriver::Mappings::iterator FakeDriver::mapping_at(DevicePointer at) {
  auto found = mappings_.upper_bound(at);
  if (found == mappings_.begin()) return mappings_.end();
  --found;
  return at < found->first + found->second.size ? found : mappings_.end();
}

std::byte* FakeDriver::view_of(DevicePointer at, size_t bytes) {
  const auto mapping = mapping_at(at);
  if (mapping == mappings_.end() || !mapping->second.accessible) return nullptr;
  const size_t offset = at - mapping->first;
  if (bytes > mapping->second.size - offset) return nullptr;
  return allocations_[mapping->second.allocation].view + offset;
}

bool FakeDriver::pinned(DevicePointer at, size_t bytes) const {
  auto found = pinned_.upper_bound(at);
  if (found == pinned_.begin()) return false;
  --found;
  return at + bytes <= found->first + found->second;
}

bool FakeDriver::is_device_memory(int fd) {
  std::error_code none;
  const auto link = std::filesystem::read_symlink(absl::StrFormat("/proc/self/fd/%d", fd), none);
  return link.string().find(kMemoryName) != std::string::npos;
}

size_t FakeDriver::foreign_mappings(uint64_t file) const {
  size_t found = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find(kMemoryName) == std::string::npos) continue;
    std::istringstream words(line);
    std::string skipped;
    uint64_t inode = 0;
    words >> skipped >> skipped >> skipped >> skipped >> inode;
    if (file == 0 || inode == file) ++found;
  }
  for (const auto& [handle, allocation] : allocations_) {
    if (file == 0 || allocation.file == file) found -= std::min(found, 1 + allocation.mappings);
  }
  return found;
}

bool FakeDriver::has_dma_buf(uint64_t file) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::atoi(entry.path().filename().c_str());
    struct stat info {};
    if (is_device_memory(fd) && (fcntl(fd, F_GETFL) & kDmaBufMark) != 0 && fstat(fd, &info) == 0 &&
        info.st_ino == file) {
      return true;
    }
  }
  return false;
}

size_t FakeDriver::foreign_descriptors() const {
  size_t found = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::atoi(entry.path().filename().c_str());
    if (!is_device_memory(fd)) continue;
    ++found;
  }
  return found - std::min(found, allocations_.size());
}

// An allocation goes: nobody else may have it, for whom these addresses would mean nothing any
// more. Who could, of what was never exported? To look costs more than all else of a free().
void FakeDriver::check_exports(std::string_view call, const Allocation& allocation) {
  if (allocation.imported || !allocation.exported) return;
  if (foreign_mappings(allocation.file) > 0) {
    violate(Rule::kLifetime, call, "an adapter still has it registered");
  }
  // A peer may keep the descriptor that it was given.
  if (has_dma_buf(allocation.file)) violate(Rule::kLifetime, call, "a dma-buf of it is still open");
}

std::byte* FakeDriver::reach(DevicePointer at, size_t bytes) {
  if (pinned(at, bytes)) return reinterpret_cast<std::byte*>(static_cast<uintptr_t>(at));
  return view_of(at, bytes);
}

bool FakeDriver::pending_on(DevicePointer at, size_t bytes) const {
  if (lost_) return false;  // nothing runs any more
  const auto touches = [&](DevicePointer other, size_t size) {
    return other < at + bytes && at < other + size;
  };
  for (const auto& [stream, queue] : streams_) {
    for (const Operation& operation : queue) {
      if (touches(operation.to, operation.bytes) || touches(operation.from, operation.bytes)) {
        return true;
      }
      for (const Copy& copy : operation.copies) {
        if (touches(copy.to, copy.bytes) || touches(copy.from, copy.bytes)) return true;
      }
      if (operation.order.has_value() && touches(operation.order->address, 8)) return true;
    }
  }
  return false;
}

size_t FakeDriver::used(int device) const {
  size_t bytes = 0;
  for (const auto& [handle, allocation] : allocations_) {
    if (allocation.device == device && !allocation.imported) bytes += allocation.size;
  }
  return bytes;
}

DevicePointer FakeDriver::allocate(size_t bytes, int device, bool managed) {
  const DevicePointer at = allocate_segments(1, bytes);
  const std::lock_guard lock(mutex_);
  Mapping& mapping = mappings_[at];
  mapping.managed = managed;
  mapping.home = primary(device);
  allocations_[mapping.allocation].device = device;
  return at;
}

DevicePointer FakeDriver::allocate_segments(size_t segments, size_t bytes_each) {
  const std::lock_guard lock(mutex_);
  void* const base = mmap(nullptr, segments * bytes_each, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  const DevicePointer at = reinterpret_cast<uintptr_t>(base);
  reserved_[at] = segments * bytes_each;
  for (size_t i = 0; i < segments; ++i) {
    const AllocationHandle handle = make_allocation(bytes_each, 0);
    map(at + i * bytes_each, handle);
    mappings_[at + i * bytes_each].accessible = true;
    allocations_[handle].handles = 0;
    allocations_[handle].by_handle = segments > 1;
  }
  return at;
}

void FakeDriver::free(DevicePointer pointer) {
  const std::lock_guard lock(mutex_);
  const size_t bytes = reserved_.at(pointer);
  if (pending_on(pointer, bytes))
    violate(Rule::kLifetime, "free", range(pointer, bytes) + " is still in use");
  for (DevicePointer at = pointer; at < pointer + bytes;) {
    const auto mapping = mappings_.find(at);
    if (mapping == mappings_.end()) break;
    check_exports("free", allocations_[mapping->second.allocation]);
    if (open_elsewhere(allocations_[mapping->second.allocation])) {
      violate(Rule::kSharing, "free", "a peer has it open by its handle");
    }
    at += mapping->second.size;
    unmap(mapping);
  }
  munmap(host_address(pointer), bytes);
  reserved_.erase(pointer);
}

void FakeDriver::write(DevicePointer at, std::string_view bytes) {
  const std::lock_guard lock(mutex_);
  std::memcpy(view_of(at, bytes.size()), bytes.data(), bytes.size());
}

std::byte* FakeDriver::view(DevicePointer at, size_t bytes) {
  const std::lock_guard lock(mutex_);
  return view_of(at, bytes);
}

std::string FakeDriver::read(DevicePointer at, size_t bytes) {
  const std::lock_guard lock(mutex_);
  return {reinterpret_cast<const char*>(view_of(at, bytes)), bytes};
}

struct FakeMemoryCalls {
  // Fills in what the driver says of an address; of one that it does not know, zeros.
  static Result pointer(const FakeCall& call, unsigned count, PointerAttribute* attributes,
                        void** values, DevicePointer at) {
    if (!call.fake.initialised_) return kNotInitialized;
    const auto found = call.fake.mapping_at(at);
    const bool known = found != call.fake.mappings_.end();
    const FakeDriver::Mapping mapping = known ? found->second : FakeDriver::Mapping{};
    const int device = known ? call.fake.allocations_[mapping.allocation].device : -2;
    const bool host = call.fake.pinned(at, 1);
    for (unsigned i = 0; i < count; ++i) {
      switch (attributes[i]) {
        case kPointerMemoryType:
          *static_cast<unsigned*>(values[i]) = known  ? kMemoryTypeDevice
                                               : host ? kMemoryTypeHost
                                                      : 0;
          break;
        case kPointerIsManaged:
          *static_cast<unsigned char*>(values[i]) = mapping.managed ? 1 : 0;
          break;
        case kPointerHasIpcHandle:
          *static_cast<int*>(values[i]) = known && !mapping.managed &&
                                          !call.fake.allocations_[mapping.allocation].by_handle &&
                                          !call.fake.allocations_[mapping.allocation].imported;
          break;
        case kPointerDeviceOrdinal:
          *static_cast<int*>(values[i]) = device;
          break;
        case kPointerBufferId:
          *static_cast<unsigned long long*>(values[i]) = mapping.buffer;
          break;
        case kPointerMappingBase:
          *static_cast<DevicePointer*>(values[i]) = known ? found->first : 0;
          break;
        case kPointerMappingSize:
          *static_cast<size_t*>(values[i]) = mapping.size;
          break;
        case kPointerContext:
          *static_cast<Context*>(values[i]) = mapping.home;
          break;
        case kPointerOfKernels:
          if (FakeDriver::current_context() == nullptr) return kInvalidContext;
          *static_cast<DevicePointer*>(values[i]) =
              known && call.fake.reached_from(FakeDriver::current_context(), at) ? at : 0;
          break;
        default:
          call.violate(Rule::kRange,
                       absl::StrFormat("attribute %d is unknown", static_cast<int>(attributes[i])));
          return kInvalidValue;
      }
    }
    return kSuccess;
  }

  static Result set_attribute(const FakeCall& call, const void* value, PointerAttribute attribute,
                              DevicePointer at) {
    const auto found = call.fake.mapping_at(at);
    if (attribute != kPointerSyncMemops || found == call.fake.mappings_.end()) {
      call.violate(Rule::kRange, "no device memory, or an attribute that cannot be set");
      return kInvalidValue;
    }
    found->second.synchronous = *static_cast<const unsigned*>(value) != 0;
    return kSuccess;
  }

  static Result granularity(const FakeCall&, size_t* bytes, const AllocationProperties* properties,
                            int option) {
    if (properties->type != kAllocationPinned || option != kGranularityMinimum) {
      return kInvalidValue;
    }
    *bytes = FakeDriver::kGranularity;
    return kSuccess;
  }

  static Result create(const FakeCall& call, AllocationHandle* handle, size_t bytes,
                       const AllocationProperties* properties, unsigned long long flags) {
    const auto has = [&](DeviceAttribute attribute) { return call.fake.has(attribute); };
    const int device = properties->location.id;
    const char* wrong = !has(kVirtualMemoryManagement) ? "the device has no such memory"
                        : bytes == 0 || bytes % FakeDriver::kGranularity != 0
                            ? "no multiple of the granularity"
                        : flags != 0                                         ? "unknown flags"
                        : properties->location.type != kLocationDevice       ? "not on a device"
                        : device < 0 || device >= call.fake.options_.devices ? "no such device"
                        : properties->win32_handle_meta_data != nullptr      ? "that is for Windows"
                        : properties->requested_handle_types != 0 && !has(kHandleTypePosixFd)
                            ? "the device exports no descriptors"
                        : properties->flags.rdma_capable != 0 && !has(kRdmaWithVirtualMemory)
                            ? "the device has no such memory for adapters"
                            : nullptr;
    if (wrong != nullptr) {
      call.violate(Rule::kMapping, wrong);
      return kInvalidValue;
    }
    if (call.fake.used(device) + bytes > call.fake.options_.memory_bytes) return kOutOfMemory;
    *handle = call.fake.make_allocation(bytes, device);
    call.fake.allocations_[*handle].shareable = properties->requested_handle_types == kPosixFd;
    call.fake.allocations_[*handle].by_handle = true;
    call.fake.allocations_[*handle].rdma = properties->flags.rdma_capable != 0;
    return kSuccess;
  }

  static Result retain(const FakeCall& call, AllocationHandle* handle, void* address) {
    const auto mapping = call.fake.mapping_at(reinterpret_cast<uintptr_t>(address));
    if (mapping == call.fake.mappings_.end()) return kInvalidValue;
    if (!call.fake.allocations_[mapping->second.allocation].by_handle) return kInvalidValue;
    *handle = mapping->second.allocation;
    ++call.fake.allocations_[*handle].handles;
    return kSuccess;
  }

  static Result export_handle(const FakeCall& call, void* shared, AllocationHandle handle, int type,
                              unsigned long long flags) {
    const auto found = call.fake.allocations_.find(handle);
    if (found == call.fake.allocations_.end() || found->second.handles == 0 || type != kPosixFd ||
        flags != 0) {
      call.violate(Rule::kSharing, "no such handle, or an unknown type or flags");
      return kInvalidValue;
    }
    if (found->second.imported) call.violate(Rule::kSharing, "it is a peer's, not ours to share");
    if (!found->second.shareable) return kInvalidValue;
    found->second.exported = true;
    *static_cast<int*>(shared) = fcntl(found->second.fd, F_DUPFD_CLOEXEC, 0);
    return kSuccess;
  }

  static Result import_handle(const FakeCall& call, AllocationHandle* handle, void* shared,
                              int type) {
    const int fd = static_cast<int>(reinterpret_cast<uintptr_t>(shared));
    struct stat info {};
    if (type != kPosixFd || !FakeDriver::is_device_memory(fd) || fstat(fd, &info) != 0) {
      call.violate(Rule::kSharing, "it is no descriptor of an allocation, or the type is unknown");
      return kInvalidValue;
    }
    // A fake device for all: which one it is on, only the exporter knows.
    *handle = call.fake.make_allocation(static_cast<size_t>(info.st_size), -1, fd);
    call.fake.allocations_[*handle].by_handle = true;
    return kSuccess;
  }

  static Result peer_access(const FakeCall& call, int* can, int device, int peer) {
    if (device == peer) call.violate(Rule::kSharing, "a device is no peer of itself");
    *can = call.fake.options_.peer_access ? 1 : 0;
    return kSuccess;
  }

  static Result release(const FakeCall& call, AllocationHandle handle) {
    const auto found = call.fake.allocations_.find(handle);
    if (found == call.fake.allocations_.end() || found->second.handles == 0) {
      call.violate(Rule::kMapping, "no such handle, or released before");
      return kInvalidValue;
    }
    --found->second.handles;
    call.fake.drop_if_unused(handle);
    return kSuccess;
  }

  static Result reserve(const FakeCall& call, DevicePointer* at, size_t bytes, size_t,
                        DevicePointer, unsigned long long flags) {
    if (bytes == 0 || bytes % FakeDriver::kGranularity != 0 || flags != 0) {
      call.violate(Rule::kMapping, "no multiple of the granularity, or unknown flags");
      return kInvalidValue;
    }
    void* const base =
        mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return kOutOfMemory;
    *at = reinterpret_cast<uintptr_t>(base);
    call.fake.reserved_[*at] = bytes;
    return kSuccess;
  }

  static Result free_address(const FakeCall& call, DevicePointer at, size_t bytes) {
    const auto found = call.fake.reserved_.find(at);
    if (found == call.fake.reserved_.end() || found->second != bytes) {
      call.violate(Rule::kMapping, range(at, bytes) + " was not reserved");
      return kInvalidValue;
    }
    const auto mapped = call.fake.mappings_.lower_bound(at);
    if (mapped != call.fake.mappings_.end() && mapped->first < at + bytes) {
      call.violate(Rule::kMapping, range(at, bytes) + " is still mapped");
      return kInvalidValue;
    }
    munmap(host_address(at), bytes);
    call.fake.reserved_.erase(found);
    return kSuccess;
  }

  static Result map(const FakeCall& call, DevicePointer at, size_t bytes, size_t offset,
                    AllocationHandle handle, unsigned long long flags) {
    const auto allocation = call.fake.allocations_.find(handle);
    auto reservation = call.fake.reserved_.upper_bound(at);
    const bool reserved =
        reservation != call.fake.reserved_.begin() &&
        at + bytes <= std::prev(reservation)->first + std::prev(reservation)->second;
    const auto over = call.fake.mappings_.lower_bound(at);
    const bool overlaps = call.fake.mapping_at(at) != call.fake.mappings_.end() ||
                          (over != call.fake.mappings_.end() && over->first < at + bytes);
    const char* wrong = allocation == call.fake.allocations_.end() ? "no such handle"
                        : offset != 0                              ? "the offset must be 0"
                        : flags != 0                               ? "unknown flags"
                        : bytes != allocation->second.size         ? "not the allocation's size"
                        : !reserved                                ? "the range is not reserved"
                        : overlaps                                 ? "something is mapped there"
                                                                   : nullptr;
    if (wrong != nullptr) {
      call.violate(Rule::kMapping, wrong);
      return kInvalidValue;
    }
    call.fake.map(at, handle);
    return kSuccess;
  }

  static Result unmap(const FakeCall& call, DevicePointer at, size_t bytes) {
    const auto found = call.fake.mappings_.find(at);
    if (found == call.fake.mappings_.end() || found->second.size != bytes) {
      call.violate(Rule::kMapping, range(at, bytes) + " is no mapping");
      return kInvalidValue;
    }
    if (call.fake.opened_.contains(at)) {
      call.violate(Rule::kMapping, range(at, bytes) + " was opened by a handle");
      return kInvalidValue;
    }
    if (call.fake.pending_on(at, bytes))
      call.violate(Rule::kLifetime, range(at, bytes) + " is still in use");
    if (!call.fake.allocations_[found->second.allocation].imported &&
        call.fake.copied_by_peers(found->second)) {
      call.violate(Rule::kSharing, range(at, bytes) + " is being copied by a peer");
    }
    call.fake.check_exports("cuMemUnmap", call.fake.allocations_[found->second.allocation]);
    call.fake.unmap(found);
    return kSuccess;
  }

  static Result set_access(const FakeCall& call, DevicePointer at, size_t bytes,
                           const AccessDescription* access, size_t count) {
    const auto found = call.fake.mappings_.find(at);
    if (found == call.fake.mappings_.end() || found->second.size != bytes || count == 0 ||
        std::any_of(access, access + count, [&](const AccessDescription& one) {
          return one.flags != kReadWrite || one.location.type != kLocationDevice ||
                 one.location.id < 0 || one.location.id >= call.fake.options_.devices;
        })) {
      call.violate(Rule::kMapping,
                   range(at, bytes) + " is no mapping, or the access none that we use");
      return kInvalidValue;
    }
    if (call.fake.allocations_[found->second.allocation].rdma && !call.fake.options_.rdma_access) {
      return kNotSupported;
    }
    const int home = call.fake.allocations_[found->second.allocation].device;
    for (size_t i = 0; i < count; ++i) {
      if (home >= 0 && access[i].location.id != home && !call.fake.options_.peer_access) {
        call.violate(Rule::kSharing, "a device that has no access to its peer's memory");
        return kInvalidValue;
      }
    }
    found->second.accessible = true;
    return kSuccess;
  }

  static Result register_host(const FakeCall& call, void* data, size_t bytes, unsigned flags) {
    const DevicePointer at = reinterpret_cast<uintptr_t>(data);
    if (bytes == 0 || (flags & ~(kHostPortable | kHostDeviceMap)) != 0) {
      call.violate(Rule::kRange, "no bytes, or unknown flags");
      return kInvalidValue;
    }
    const auto next = call.fake.pinned_.lower_bound(at);
    if (call.fake.pinned(at, 1) || (next != call.fake.pinned_.end() && next->first < at + bytes)) {
      call.violate(Rule::kLifetime, "registered before");
      return kHostMemoryAlreadyRegistered;
    }
    call.fake.pinned_[at] = bytes;
    return kSuccess;
  }

  static Result unregister_host(const FakeCall& call, void* data) {
    const auto found = call.fake.pinned_.find(reinterpret_cast<uintptr_t>(data));
    if (found == call.fake.pinned_.end()) {
      call.violate(Rule::kLifetime, "not registered");
      return kHostMemoryNotRegistered;
    }
    if (call.fake.pending_on(found->first, found->second))
      call.violate(Rule::kLifetime, "it is still in use");
    call.fake.pinned_.erase(found);
    return kSuccess;
  }

  static Result export_range(const FakeCall& call, void* handle, DevicePointer at, size_t bytes,
                             int type, unsigned long long flags) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    if (type != kDmaBufFd || flags != 0 || at % page != 0 || bytes % page != 0 || bytes == 0) {
      call.violate(Rule::kRange,
                   range(at, bytes) + " is not of whole pages, or the flags are unknown");
      return kInvalidValue;
    }
    const auto found = call.fake.options_.attributes.find(kDmaBufSupported);
    if (found == call.fake.options_.attributes.end() || found->second == 0) return kNotSupported;
    const auto mapping = call.fake.mapping_at(at);
    if (mapping == call.fake.mappings_.end() ||
        at + bytes > mapping->first + mapping->second.size) {
      call.violate(Rule::kRange, range(at, bytes) + " is not in one allocation");
      return kInvalidValue;
    }
    if (bytes > call.fake.options_.window_bytes) return kOutOfMemory;
    // A part of a memfd has no file of its own, so the position says where this one begins. The
    // fake of the verbs calls knows.
    auto& allocation = call.fake.allocations_[mapping->second.allocation];
    allocation.exported = true;
    const std::string path = absl::StrFormat("/proc/self/fd/%d", allocation.fd);
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC | kDmaBufMark);
    lseek(fd, static_cast<off_t>(at - mapping->first), SEEK_SET);
    *static_cast<int*>(handle) = fd;
    return kSuccess;
  }
};

void add_fake_memory_calls(FakeEntries& out) {
  add_call<FakeMemoryCalls::pointer, "cuPointerGetAttributes", kNothing>(out, 7000);
  add_call<FakeMemoryCalls::set_attribute, "cuPointerSetAttribute", kContext>(out, 6000);
  add_call<FakeMemoryCalls::granularity, "cuMemGetAllocationGranularity", kDriver>(out, 10020);
  add_call<FakeMemoryCalls::create, "cuMemCreate", kDriver | kBlocks>(out, 10020);
  add_call<FakeMemoryCalls::release, "cuMemRelease", kDriver | kBlocks | kTakes>(out, 10020);
  add_call<FakeMemoryCalls::reserve, "cuMemAddressReserve", kDriver>(out, 10020);
  add_call<FakeMemoryCalls::free_address, "cuMemAddressFree", kDriver | kTakes>(out, 10020);
  add_call<FakeMemoryCalls::map, "cuMemMap", kDriver | kBlocks>(out, 10020);
  add_call<FakeMemoryCalls::unmap, "cuMemUnmap", kDriver | kBlocks | kTakes>(out, 10020);
  add_call<FakeMemoryCalls::set_access, "cuMemSetAccess", kDriver>(out, 10020);
  add_call<FakeMemoryCalls::retain, "cuMemRetainAllocationHandle", kDriver>(out, 11000);
  add_call<FakeMemoryCalls::export_handle, "cuMemExportToShareableHandle", kDriver>(out, 10020);
  add_call<FakeMemoryCalls::import_handle, "cuMemImportFromShareableHandle", kDriver>(out, 10020);
  add_call<FakeMemoryCalls::peer_access, "cuDeviceCanAccessPeer", kDriver>(out, 4000);
  add_call<FakeMemoryCalls::register_host, "cuMemHostRegister", kContext | kBlocks>(out, 6050);
  add_call<FakeMemoryCalls::unregister_host, "cuMemHostUnregister", kContext | kBlocks | kTakes>(
      out, 4000);
  add_call<FakeMemoryCalls::export_range, "cuMemGetHandleForAddressRange", kContext | kBlocks>(
      out, 11070);
}

}  // namespace baton::gpudirect
