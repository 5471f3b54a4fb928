// Our declarations of the CUDA driver's interface against those of its own headers.
#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
#endif
#include <cuda.h>
#include <cudaTypedefs.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <type_traits>

#include "gpudirect/blas/cublaslt.h"
#include "gpudirect/driver.h"

namespace baton::gpudirect {
namespace {

// Two types that are passed in the same way: pointers, or numbers of one size.
template <typename Ours, typename Theirs>
constexpr bool alike() {
  if constexpr (std::is_pointer_v<Ours> || std::is_pointer_v<Theirs>) {
    return std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>;
  } else if constexpr (std::is_same_v<Ours, IpcHandle>) {
    return sizeof(Ours) == sizeof(Theirs) && std::is_same_v<Theirs, CUipcMemHandle>;
  } else {
    return sizeof(Ours) == sizeof(Theirs) && !std::is_class_v<Theirs> &&
           !std::is_floating_point_v<Theirs>;
  }
}
template <typename Ours, typename Theirs>
struct Same : std::false_type {};
template <typename... Ours, typename... Theirs>
struct Same<Result (*)(Ours...), CUresult(CUDAAPI*)(Theirs...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(Ours) != sizeof...(Theirs)) {
      return false;
    } else {
      return (alike<Ours, Theirs>() && ...);
    }
  }();
};

#define BATON_SAME(name, version, parameters)                                 \
  static_assert(Same<decltype(Driver::name), PFN_##name##_v##version>::value, \
                #name " as of " #version " has another signature");
BATON_DRIVER_ENTRIES(BATON_SAME)
BATON_DRIVER_OPTIONAL(BATON_SAME)
#undef BATON_SAME
static_assert(Same<GetProcAddress, PFN_cuGetProcAddress_v12000>::value);
static_assert(Same<OldGetProcAddress, PFN_cuGetProcAddress_v11030>::value);

static_assert(std::is_same_v<DevicePointer, CUdeviceptr>);
static_assert(std::is_same_v<AllocationHandle, CUmemGenericAllocationHandle>);
static_assert(std::is_same_v<Context, CUcontext> && std::is_same_v<Stream, CUstream> &&
              std::is_same_v<Event, CUevent> && std::is_same_v<Module, CUmodule> &&
              std::is_same_v<Function, CUfunction> && std::is_same_v<Graph, CUgraph> &&
              std::is_same_v<GraphExecutable, CUgraphExec>);

static_assert(sizeof(MemoryLocation) == sizeof(CUmemLocation));
static_assert(sizeof(AllocationProperties) == sizeof(CUmemAllocationProp) &&
              offsetof(AllocationProperties, requested_handle_types) ==
                  offsetof(CUmemAllocationProp, requestedHandleTypes) &&
              offsetof(AllocationProperties, location) == offsetof(CUmemAllocationProp, location) &&
              offsetof(AllocationProperties, flags) == offsetof(CUmemAllocationProp, allocFlags) &&
              offsetof(AllocationProperties, flags.rdma_capable) ==
                  offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable));
static_assert(sizeof(AccessDescription) == sizeof(CUmemAccessDesc) &&
              offsetof(AccessDescription, flags) == offsetof(CUmemAccessDesc, flags));

template <typename A, typename B>
constexpr bool equal(A ours, B theirs) {
  return static_cast<long long>(ours) == static_cast<long long>(theirs);
}
static_assert(
    equal(kInvalidValue, CUDA_ERROR_INVALID_VALUE) &&
    equal(kOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY) &&
    equal(kNotInitialized, CUDA_ERROR_NOT_INITIALIZED) &&
    equal(kDeinitialized, CUDA_ERROR_DEINITIALIZED) && equal(kNoDevice, CUDA_ERROR_NO_DEVICE) &&
    equal(kInvalidDevice, CUDA_ERROR_INVALID_DEVICE) &&
    equal(kInvalidContext, CUDA_ERROR_INVALID_CONTEXT) &&
    equal(kUncorrectableEcc, CUDA_ERROR_ECC_UNCORRECTABLE) &&
    equal(kUncorrectableNvlink, CUDA_ERROR_NVLINK_UNCORRECTABLE) &&
    equal(kInvalidHandle, CUDA_ERROR_INVALID_HANDLE) && equal(kNotFound, CUDA_ERROR_NOT_FOUND) &&
    equal(kNotReady, CUDA_ERROR_NOT_READY) && equal(kIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS) &&
    equal(kLaunchTimeout, CUDA_ERROR_LAUNCH_TIMEOUT) &&
    equal(kHostMemoryAlreadyRegistered, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) &&
    equal(kHostMemoryNotRegistered, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED) &&
    equal(kHardwareStackError, CUDA_ERROR_HARDWARE_STACK_ERROR) &&
    equal(kIllegalInstruction, CUDA_ERROR_ILLEGAL_INSTRUCTION) &&
    equal(kMisalignedAddress, CUDA_ERROR_MISALIGNED_ADDRESS) &&
    equal(kInvalidAddressSpace, CUDA_ERROR_INVALID_ADDRESS_SPACE) &&
    equal(kInvalidPc, CUDA_ERROR_INVALID_PC) && equal(kLaunchFailed, CUDA_ERROR_LAUNCH_FAILED) &&
    equal(kContained, CUDA_ERROR_CONTAINED) &&
    equal(kContextIsDestroyed, CUDA_ERROR_CONTEXT_IS_DESTROYED) &&
    equal(kAssert, CUDA_ERROR_ASSERT) && equal(kTensorMemoryLeak, CUDA_ERROR_TENSOR_MEMORY_LEAK) &&
    equal(kNotPermitted, CUDA_ERROR_NOT_PERMITTED) &&
    equal(kNotSupported, CUDA_ERROR_NOT_SUPPORTED) &&
    equal(kSystemDriverMismatch, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH) &&
    equal(kCaptureUnsupported, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) &&
    equal(kCaptureInvalidated, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED) &&
    equal(kCaptureGlobal, CU_STREAM_CAPTURE_MODE_GLOBAL) &&
    equal(kCaptureThreadLocal, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) &&
    equal(kCaptureRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED) &&
    equal(kCaptureNone, CU_STREAM_CAPTURE_STATUS_NONE) &&
    equal(kCaptureImplicit, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) &&
    equal(kCapturedEvent, CUDA_ERROR_CAPTURED_EVENT) && equal(kUnknown, CUDA_ERROR_UNKNOWN));
static_assert(
    equal(kMultiprocessorCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) &&
    equal(kComputeMode, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE) &&
    equal(kAsyncEngineCount, CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT) &&
    equal(kComputeCapabilityMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) &&
    equal(kComputeCapabilityMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) &&
    equal(kCanUseHostPointerForRegisteredMemory,
          CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) &&
    equal(kCanFlushRemoteWrites, CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES) &&
    equal(kHostRegisterSupported, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED) &&
    equal(kVirtualMemoryManagement, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) &&
    equal(kHandleTypePosixFd, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) &&
    equal(kRdmaWithVirtualMemory, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) &&
    equal(kMemoryPools, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED) &&
    equal(kRdmaSupported, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED) &&
    equal(kRdmaFlushWritesOptions, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS) &&
    equal(kRdmaWritesOrdering, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING) &&
    equal(kStreamMemOps64, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS) &&
    equal(kStreamWaitValueNor, CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR) &&
    equal(kDmaBufSupported, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) &&
    equal(kIpcEvents, CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED) &&
    equal(kMemSyncDomains, CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT) &&
    equal(kHandleTypeFabric, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED) &&
    equal(kMpsEnabled, CU_DEVICE_ATTRIBUTE_MPS_ENABLED) &&
    equal(kHostNumaId, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID));
static_assert(equal(kPointerContext, CU_POINTER_ATTRIBUTE_CONTEXT) &&
              equal(kPointerOfKernels, CU_POINTER_ATTRIBUTE_DEVICE_POINTER) &&
              equal(kPointerMemoryType, CU_POINTER_ATTRIBUTE_MEMORY_TYPE) &&
              equal(kPointerBufferId, CU_POINTER_ATTRIBUTE_BUFFER_ID) &&
              equal(kPointerIsManaged, CU_POINTER_ATTRIBUTE_IS_MANAGED) &&
              equal(kPointerDeviceOrdinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) &&
              equal(kPointerMappingSize, CU_POINTER_ATTRIBUTE_MAPPING_SIZE) &&
              equal(kPointerMappingBase, CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR));
static_assert(equal(kMemoryTypeHost, CU_MEMORYTYPE_HOST) &&
              equal(kMemoryTypeDevice, CU_MEMORYTYPE_DEVICE) &&
              equal(kAllocationPinned, CU_MEM_ALLOCATION_TYPE_PINNED) &&
              equal(kPosixFd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) &&
              equal(kLocationDevice, CU_MEM_LOCATION_TYPE_DEVICE) &&
              equal(kReadWrite, CU_MEM_ACCESS_FLAGS_PROT_READWRITE) &&
              equal(kGranularityMinimum, CU_MEM_ALLOC_GRANULARITY_MINIMUM) &&
              equal(kDmaBufFd, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD) &&
              equal(kStreamNonBlocking, CU_STREAM_NON_BLOCKING) &&
              equal(kEventDisableTiming, CU_EVENT_DISABLE_TIMING) &&
              equal(kMostDynamicShared, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) &&
              equal(kHostPortable, CU_MEMHOSTREGISTER_PORTABLE) &&
              equal(kHostDeviceMap, CU_MEMHOSTREGISTER_DEVICEMAP) &&
              equal(kSymbolVersionNotSufficient, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT));
static_assert(equal(kPointerHasIpcHandle, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE) &&
              equal(kPointerSyncMemops, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) &&
              equal(kIpcLazyPeerAccess, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) &&
              equal(kMapFailed, CUDA_ERROR_MAP_FAILED));
static_assert(equal(kMemoryTypeUnified, CU_MEMORYTYPE_UNIFIED) &&
              equal(kWaitUntilNotBehind, CU_STREAM_WAIT_VALUE_GEQ));
static_assert(equal(kOrderedForNobody, CU_GPU_DIRECT_RDMA_WRITES_ORDERING_NONE) &&
              equal(kOrderedForOwner, CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER) &&
              equal(kOrderedForOwner, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER) &&
              equal(kFlushByHost, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST) &&
              equal(kFlushCurrentContext, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX));
static_assert(sizeof(PlaneCopy) == sizeof(CUDA_MEMCPY2D) &&
              offsetof(PlaneCopy, from.device) == offsetof(CUDA_MEMCPY2D, srcDevice) &&
              offsetof(PlaneCopy, from.pitch) == offsetof(CUDA_MEMCPY2D, srcPitch) &&
              offsetof(PlaneCopy, to.memory_type) == offsetof(CUDA_MEMCPY2D, dstMemoryType) &&
              offsetof(PlaneCopy, to.device) == offsetof(CUDA_MEMCPY2D, dstDevice) &&
              offsetof(PlaneCopy, to.pitch) == offsetof(CUDA_MEMCPY2D, dstPitch) &&
              offsetof(PlaneCopy, height) == offsetof(CUDA_MEMCPY2D, Height));
#if CUDA_VERSION >= 13000
static_assert(sizeof(BatchAttributes) == sizeof(CUmemcpyAttributes) &&
              offsetof(BatchAttributes, to_hint) == offsetof(CUmemcpyAttributes, dstLocHint) &&
              offsetof(BatchAttributes, flags) == offsetof(CUmemcpyAttributes, flags) &&
              equal(kSourceInStreamOrder, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM) &&
              equal(kPreferOverlapWithCompute, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE));
static_assert(equal(kHostAllocDmaBuf, CU_DEVICE_ATTRIBUTE_HOST_ALLOC_DMA_BUF_SUPPORTED));
#endif

TEST(Toolkit, OurDeclarationsAreThoseOfCuda) { SUCCEED() << "compiled, and that is the test"; }

#if __has_include(<cublasLt.h>)
template <typename Ours, typename Theirs>
struct SameBlas : std::false_type {};
template <typename Left, typename... Ours, typename Right, typename... Theirs>
struct SameBlas<Left (*)(Ours...), Right (*)(Theirs...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(Ours) != sizeof...(Theirs)) {
      return false;
    } else {
      return sizeof(Left) == sizeof(Right) && (alike<Ours, Theirs>() && ...);
    }
  }();
};
#define BATON_SAME(name, result, parameters)                                  \
  static_assert(SameBlas<decltype(CublasLt::name), decltype(&::name)>::value, \
                #name " has another signature");
BATON_BLAS_ENTRIES(BATON_SAME)
#undef BATON_SAME
static_assert(sizeof(BlasAlgorithm) == sizeof(cublasLtMatmulAlgo_t));
static_assert(sizeof(BlasChoice) == sizeof(cublasLtMatmulHeuristicResult_t) &&
              offsetof(BlasChoice, workspace) ==
                  offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize) &&
              offsetof(BlasChoice, state) == offsetof(cublasLtMatmulHeuristicResult_t, state));
static_assert(kRealFloat == int{CUDA_R_32F} && kRealBf16 == int{CUDA_R_16BF} &&
              kComputeFloat == int{CUBLAS_COMPUTE_32F} && kTransposed == int{CUBLAS_OP_T} &&
              kTransposeA == int{CUBLASLT_MATMUL_DESC_TRANSA} &&
              kMostWorkspace == int{CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES} &&
              kReductionSchemes == int{CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK} &&
              kSplitCount == int{CUBLASLT_ALGO_CONFIG_SPLITK_NUM});
#endif

}  // namespace
}  // namespace baton::gpudirect
