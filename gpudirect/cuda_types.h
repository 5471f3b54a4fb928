// The few types and numbers of the CUDA driver's interface that Baton uses, declared here: the
// build is the same with and without a toolkit. tests/gpudirect/toolkit_test.cc compares them with
// cuda.h where there is one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

// The driver's own names, so that its handles and ours are one type.
struct CUctx_st;
struct CUstream_st;
struct CUevent_st;
struct CUmod_st;
struct CUfunc_st;
struct CUgraph_st;
struct CUgraphExec_st;

namespace baton::gpudirect {

using DevicePointer = unsigned long long;
using AllocationHandle = unsigned long long;
using Context = CUctx_st*;
using Stream = CUstream_st*;
using Event = CUevent_st*;
using Module = CUmod_st*;
using Function = CUfunc_st*;
using Graph = CUgraph_st*;
using GraphExecutable = CUgraphExec_st*;

// For a kernel, or where host and device share addresses.
template <typename T>
T* pointer_of(DevicePointer at) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(at));
}

// CUresult
enum Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kDeinitialized = 4,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kMapFailed = 205,
  kUncorrectableEcc = 214,
  kUncorrectableNvlink = 220,
  kContained = 226,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchTimeout = 702,
  kContextIsDestroyed = 709,
  kAssert = 710,
  kHostMemoryAlreadyRegistered = 712,
  kHostMemoryNotRegistered = 713,
  kHardwareStackError = 714,
  kIllegalInstruction = 715,
  kMisalignedAddress = 716,
  kInvalidAddressSpace = 717,
  kInvalidPc = 718,
  kLaunchFailed = 719,
  kTensorMemoryLeak = 721,
  kNotPermitted = 800,
  kNotSupported = 801,
  kSystemDriverMismatch = 803,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureImplicit = 906,
  kCapturedEvent = 907,
  kUnknown = 999,
};

// CUGPUDirectRDMAWritesOrdering, and the scopes of a flush.
inline constexpr int kOrderedForNobody = 0;
inline constexpr int kOrderedForOwner = 100;
// CUflushGPUDirectRDMAWritesOptions, and the one target of a flush.
inline constexpr int kFlushByHost = 1;
inline constexpr int kFlushCurrentContext = 0;

// CUdevice_attribute
enum DeviceAttribute : int {
  kMultiprocessorCount = 16,
  kComputeMode = 20,
  kAsyncEngineCount = 40,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kCanUseHostPointerForRegisteredMemory = 91,
  kCanFlushRemoteWrites = 98,
  kHostRegisterSupported = 99,
  kVirtualMemoryManagement = 102,
  kHandleTypePosixFd = 103,
  kRdmaWithVirtualMemory = 110,
  kMemoryPools = 115,
  kRdmaSupported = 116,
  kRdmaFlushWritesOptions = 117,
  kRdmaWritesOrdering = 118,
  kStreamMemOps64 = 122,
  kStreamWaitValueNor = 123,
  kDmaBufSupported = 124,
  kIpcEvents = 125,
  kMemSyncDomains = 126,
  kHandleTypeFabric = 128,
  kMpsEnabled = 133,
  kHostNumaId = 134,
  kHostAllocDmaBuf = 146,
};

// CUpointer_attribute
enum PointerAttribute : int {
  kPointerContext = 1,
  kPointerOfKernels = 3,  // where those of the current context reach it; 0: nowhere
  kPointerMemoryType = 2,
  kPointerSyncMemops = 6,
  kPointerBufferId = 7,
  kPointerIsManaged = 8,
  kPointerDeviceOrdinal = 9,
  kPointerHasIpcHandle = 10,
  kPointerMappingSize = 18,
  kPointerMappingBase = 19,
};

// CUmemorytype
inline constexpr unsigned kMemoryTypeHost = 1;
inline constexpr unsigned kMemoryTypeDevice = 2;
inline constexpr int kMemoryTypeUnified = 4;  // the address says whose it is
// CUmemAllocationType, CUmemAllocationHandleType, CUmemLocationType, CUmemAccess_flags,
// CUmemAllocationGranularity_flags, CUmemRangeHandleType
inline constexpr int kAllocationPinned = 1;
inline constexpr int kPosixFd = 1;
inline constexpr int kLocationDevice = 1;
inline constexpr int kReadWrite = 3;
inline constexpr int kGranularityMinimum = 0;
inline constexpr int kDmaBufFd = 1;
// Flags of streams, events and registered host memory.
inline constexpr unsigned kStreamNonBlocking = 1;
// Handles of streams that no caller makes: of the device (a null handle is the same), of each
// thread.
inline const auto kLegacyStream = reinterpret_cast<Stream>(uintptr_t{1});
inline const auto kThreadsStream = reinterpret_cast<Stream>(uintptr_t{2});
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr int kMostDynamicShared = 8;  // CUfunction_attribute
inline constexpr unsigned kHostPortable = 1;
inline constexpr unsigned kHostDeviceMap = 2;
// CUstreamCaptureMode, of a recording and of a thread: what is no work of streams fails, and spoils
// recordings, while any thread records; while this one does; never.
inline constexpr int kCaptureGlobal = 0;
inline constexpr int kCaptureThreadLocal = 1;
inline constexpr int kCaptureRelaxed = 2;
inline constexpr int kCaptureNone = 0;  // CUstreamCaptureStatus: the stream is not recorded
// CUmemcpySrcAccessOrder, CUmemcpyFlags
inline constexpr int kSourceInStreamOrder = 1;
inline constexpr unsigned kPreferOverlapWithCompute = 1;
// CUstreamWaitValue_flags
inline constexpr unsigned kWaitUntilNotBehind = 0;  // cyclically: (int64_t)(*address - value) >= 0
// CUipcMem_flags: the only one, without which nothing is opened.
inline constexpr unsigned kIpcLazyPeerAccess = 1;
// The second result of cuGetProcAddress: why a name was not found.
inline constexpr int kSymbolVersionNotSufficient = 2;

// CUmemLocation
struct MemoryLocation {
  int type = kLocationDevice;
  int id = 0;
};
// CUmemAllocationProp
struct AllocationProperties {
  int type = kAllocationPinned;
  int requested_handle_types = 0;
  MemoryLocation location;
  void* win32_handle_meta_data = nullptr;
  struct {
    unsigned char compression_type = 0;
    unsigned char rdma_capable = 0;
    unsigned short usage = 0;
    unsigned char reserved[4] = {};
  } flags;
};
// CUuuid
struct DeviceUuid {
  std::array<uint8_t, 16> bytes{};
};
// CUipcMemHandle: an allocation of cudaMalloc, for other processes of this machine.
struct IpcHandle {
  std::array<uint8_t, 64> bytes{};
};
// CUmemAccessDesc
struct AccessDescription {
  MemoryLocation location;
  int flags = kReadWrite;
};

// CUmemcpyAttributes
struct BatchAttributes {
  int source_order = kSourceInStreamOrder;
  MemoryLocation from_hint;
  MemoryLocation to_hint;
  unsigned flags = 0;
};
// CUDA_MEMCPY2D: one side of it twice, and the size.
struct PlaneSide {
  size_t x = 0;
  size_t y = 0;
  int memory_type = kMemoryTypeUnified;
  void* host = nullptr;
  DevicePointer device = 0;
  void* array = nullptr;
  size_t pitch = 0;
};
struct PlaneCopy {
  PlaneSide from;
  PlaneSide to;
  size_t width = 0;
  size_t height = 0;
};

}  // namespace baton::gpudirect
