// The calls of NCCL that a baseline makes, out of a library that is looked for when it runs:
// nothing is linked, and no header of NCCL is needed. Where there is one, a test compares.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace baton::baselines {

// NCCL's, by its numbers.
enum class NcclResult : int { kSuccess = 0, kInProgress = 7 };
enum class NcclType : int {
  kI8 = 0,
  kU8 = 1,
  kI32 = 2,
  kU32 = 3,
  kI64 = 4,
  kU64 = 5,
  kF16 = 6,
  kF32 = 7,
  kF64 = 8,
  kBF16 = 9
};
enum class NcclOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };
using NcclComm = struct NcclCommunicator*;
using NcclStream = void*;  // CUDA's streams

// F(name, arguments)
#define BATON_NCCL_CALLS(F)                                                                     \
  F(ncclGetVersion, (int* version))                                                             \
  F(ncclCommInitAll, (NcclComm * comms, int count, const int* devices))                         \
  F(ncclCommDestroy, (NcclComm comm))                                                           \
  F(ncclGroupStart, ())                                                                         \
  F(ncclGroupEnd, ())                                                                           \
  F(ncclAllReduce, (const void* in, void* out, size_t count, NcclType type, NcclOp op,          \
                    NcclComm comm, NcclStream stream))                                          \
  F(ncclReduceScatter, (const void* in, void* out, size_t count, NcclType type, NcclOp op,      \
                        NcclComm comm, NcclStream stream))                                      \
  F(ncclAllGather,                                                                              \
    (const void* in, void* out, size_t count, NcclType type, NcclComm comm, NcclStream stream)) \
  F(ncclBroadcast, (const void* in, void* out, size_t count, NcclType type, int root,           \
                    NcclComm comm, NcclStream stream))                                          \
  F(ncclReduce, (const void* in, void* out, size_t count, NcclType type, NcclOp op, int root,   \
                 NcclComm comm, NcclStream stream))                                             \
  F(ncclSend,                                                                                   \
    (const void* in, size_t count, NcclType type, int peer, NcclComm comm, NcclStream stream))  \
  F(ncclRecv, (void* out, size_t count, NcclType type, int peer, NcclComm comm, NcclStream stream))

struct NcclApi {
// NOLINTNEXTLINE(bugprone-macro-parentheses): a declarator and its parameters
#define BATON_NCCL_MEMBER(name, arguments) NcclResult(*name) arguments = nullptr;
  BATON_NCCL_CALLS(BATON_NCCL_MEMBER)
#undef BATON_NCCL_MEMBER
  // NOLINTNEXTLINE(readability-identifier-naming): as in NCCL
  const char* (*ncclGetErrorString)(NcclResult result) = nullptr;

  // NotFound: there is no such library, with what to do about it; or it lacks a call. It stays
  // loaded.
  static absl::StatusOr<NcclApi> load() {
    void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      return absl::NotFoundError(
          "no NCCL: libnccl.so.2 is not installed; CUDA's packages and Python's nvidia-nccl have "
          "it, and LD_LIBRARY_PATH names its folder");
    }
    NcclApi api;
    std::string missing;
    const auto find = [&](auto& entry, const char* name) {
      entry = reinterpret_cast<std::decay_t<decltype(entry)>>(dlsym(library, name));
      if (entry == nullptr) missing = name;
    };
#define BATON_NCCL_FIND(name, arguments) find(api.name, #name);
    BATON_NCCL_CALLS(BATON_NCCL_FIND)
#undef BATON_NCCL_FIND
    find(api.ncclGetErrorString, "ncclGetErrorString");
    if (missing.empty()) return api;
    return absl::NotFoundError("no NCCL: its library has no " + missing + "; a newer one has");
  }
};

}  // namespace baton::baselines
