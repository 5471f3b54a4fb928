// Which kinds of memory agents take, and whether an address is of the kind that it is said to be.
#pragma once

#include "absl/status/status.h"
#include "kvtransfer/agent.h"

namespace baton::kvtransfer {

inline constexpr MemoryKind kMemoryKinds[] = {MemoryKind::kDram, MemoryKind::kVram};

// "DRAM", as NIXL calls them; "?" for what is none.
const char* kind_name(MemoryKind kind);
// The kind of a region here or at another agent, as its owner registered it.
MemoryKind kind_of(const RemoteRegion& region);

// OK: memory, of the host or of a device. Unimplemented for files and all else, by name.
absl::Status check_kind(MemoryKind kind);

// What a descriptor to be registered says of itself, beside what the CUDA driver says of its
// address. InvalidArgument where they differ; Unimplemented for device memory where there is no
// driver or no device.
absl::Status check_place(const Descriptor& range, MemoryKind kind);

}  // namespace baton::kvtransfer
