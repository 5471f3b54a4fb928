// The fake's handles of memory of cudaMalloc: a handle says in which process and behind which
// descriptor the memory is, so that a fake in another process opens the same bytes. Whoever has it
// open holds a lock on the file, which goes with its process: by that the owner's fake sees it.
#include <sys/file.h>

#include "absl/strings/str_format.h"
#include "tests/gpudirect/fake/entries.h"
#include "tests/std.h"

namespace baton::gpudirect {
namespace {

constexpr char kMagic[8] = {'f', 'a', 'k', 'e', 'm', 'e', 'm', '\0'};
struct Named {
  char magic[8];
  pid_t process;
  int fd;
  uint64_t file;
};
static_assert(sizeof(Named) <= sizeof(IpcHandle));

}  // namespace

bool FakeDriver::open_elsewhere(const Allocation& allocation) {
  if (flock(allocation.fd, LOCK_EX | LOCK_NB) != 0) return true;
  flock(allocation.fd, LOCK_UN);
  return false;
}

struct FakeIpcCalls {
  static Result range(const FakeCall& call, DevicePointer* base, size_t* bytes, DevicePointer at) {
    const auto found = call.fake.mapping_at(at);
    if (found == call.fake.mappings_.end()) return kInvalidValue;
    *base = found->first;
    *bytes = found->second.size;
    return kSuccess;
  }

  static Result get(const FakeCall& call, IpcHandle* handle, DevicePointer at) {
    if (!call.fake.options_.ipc_handles) return kNotSupported;
    const auto found = call.fake.mapping_at(at);
    const char* wrong = nullptr;
    if (found == call.fake.mappings_.end()) {
      wrong = "no device memory";
    } else if (found->first != at) {
      wrong = "not where an allocation begins";
    } else if (found->second.managed) {
      wrong = "managed memory has no handle";
    } else if (call.fake.opened_.contains(at)) {
      wrong = "it is a peer's, not ours to share";
    } else if (call.fake.allocations_[found->second.allocation].by_handle) {
      wrong = "memory of virtual memory management has no handle";
    }
    if (wrong != nullptr) {
      call.violate(Rule::kSharing, wrong);
      return kInvalidValue;
    }
    const FakeDriver::Allocation& allocation = call.fake.allocations_[found->second.allocation];
    Named named{{}, getpid(), allocation.fd, allocation.file};
    std::memcpy(named.magic, kMagic, sizeof kMagic);
    std::memcpy(handle->bytes.data(), &named, sizeof named);
    return kSuccess;
  }

  static Result open(const FakeCall& call, DevicePointer* at, IpcHandle handle, unsigned flags) {
    if (!call.fake.options_.ipc_handles) return kNotSupported;
    if (flags != kIpcLazyPeerAccess) {
      call.violate(Rule::kSharing, "the flags must ask for access between peers");
      return kInvalidValue;
    }
    Named named{};
    std::memcpy(&named, handle.bytes.data(), sizeof named);
    if (std::memcmp(named.magic, kMagic, sizeof kMagic) != 0) return kInvalidValue;
    if (named.process == getpid()) {
      call.violate(Rule::kSharing, "it is a handle of this process's own memory");
      return kInvalidContext;
    }
    for (auto& [opened, times] : call.fake.opened_) {
      const auto& mapping = call.fake.mappings_.at(opened);
      if (call.fake.allocations_[mapping.allocation].file != named.file) continue;
      call.violate(Rule::kSharing, "this context has it open already");
      ++times;
      *at = opened;
      return kSuccess;
    }
    const int fd = ::open(absl::StrFormat("/proc/%d/fd/%d", named.process, named.fd).c_str(),
                          O_RDWR | O_CLOEXEC);
    struct stat info {};
    // Of memory that was freed, or of a process that has ended.
    if (fd < 0 || fstat(fd, &info) != 0 || info.st_ino != named.file ||
        !FakeDriver::is_device_memory(fd)) {
      if (fd >= 0) close(fd);
      return kMapFailed;
    }
    flock(fd, LOCK_SH);
    const auto bytes = static_cast<size_t>(info.st_size);
    const AllocationHandle allocation = call.fake.make_allocation(bytes, -1, fd);
    close(fd);  // the copy that the allocation has keeps the lock
    void* const base =
        mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *at = reinterpret_cast<uintptr_t>(base);
    call.fake.reserved_[*at] = bytes;
    call.fake.map(*at, allocation);
    call.fake.mappings_[*at].accessible = true;
    call.fake.allocations_[allocation].handles = 0;
    call.fake.opened_[*at] = 1;
    return kSuccess;
  }

  static Result close_handle(const FakeCall& call, DevicePointer at) {
    const auto opened = call.fake.opened_.find(at);
    if (opened == call.fake.opened_.end()) {
      call.violate(Rule::kSharing, "nothing was opened there, or it was closed before");
      return kInvalidValue;
    }
    const auto mapping = call.fake.mappings_.find(at);
    const size_t bytes = mapping->second.size;
    if (call.fake.pending_on(at, bytes)) call.violate(Rule::kLifetime, "it is still in use");
    if (--opened->second > 0) return kSuccess;
    call.fake.opened_.erase(opened);
    call.fake.unmap(mapping);
    munmap(reinterpret_cast<void*>(static_cast<uintptr_t>(at)), bytes);
    call.fake.reserved_.erase(at);
    return kSuccess;
  }
};

void add_fake_ipc_calls(FakeEntries& out) {
  add_call<FakeIpcCalls::range, "cuMemGetAddressRange", kContext>(out, 3020);
  add_call<FakeIpcCalls::get, "cuIpcGetMemHandle", kContext>(out, 4010);
  add_call<FakeIpcCalls::open, "cuIpcOpenMemHandle", kContext | kBlocks>(out, 11000);
  add_call<FakeIpcCalls::close_handle, "cuIpcCloseMemHandle", kContext | kBlocks | kTakes>(out,
                                                                                           4010);
}

}  // namespace baton::gpudirect
