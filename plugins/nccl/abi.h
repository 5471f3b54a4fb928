// NCCL's types that all of its plugin interfaces use, rewritten from NVIDIA's published headers
// (nccl.h and the plugin examples, NCCL 2.19 to 2.32). Static asserts pin sizes and offsets,
// because NCCL and this plugin are compiled separately.
#pragma once

#include <cstddef>
#include <cstdint>

namespace baton::nccl {

// ncclResult_t. kTimeout is newer than 2.29: not returned.
enum class Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
};
static_assert(sizeof(Result) == 4);

// ncclDebugLogLevel and the subsystems (NCCL_DEBUG_SUBSYS) that this plugin speaks for.
enum class LogLevel : int { kWarn = 2, kInfo = 3 };
inline constexpr unsigned long kInitLog = 1, kNetLog = 16, kTuningLog = 64, kEnvLog = 128;

using Logger = void (*)(LogLevel level, unsigned long subsystems, const char* file, int line,
                        const char* format, ...);

// ncclProfilerCallback_t.
using ProfilerCallback = Result (*)(void** event, int type, void* parent, int64_t plugin,
                                    void* data);

inline constexpr const char* kPluginName = "Baton";  // of every door

inline constexpr size_t kHandleBytes = 128;  // NCCL_NET_HANDLE_MAXSIZE

// The kinds of memory: `type` of registrations, and what a device supports (ptrSupport).
inline constexpr int kHostPointer = 1, kCudaPointer = 2, kDmaBufPointer = 4;

// ncclDataType_t and ncclRedOp_t are passed on as numbers.
using DataType = int;
using RedOp = int;

}  // namespace baton::nccl
