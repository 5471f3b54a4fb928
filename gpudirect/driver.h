// The CUDA driver's calls as a table of function pointers, loaded at run time: one binary serves
// machines with and without a GPU, and tests put a fake in its place. Nothing of CUDA is linked.
//
// Each entry names the version whose signature it has: cuGetProcAddress gives a newer driver's
// function of the same shape, or says that the driver is too old.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpudirect/cuda_types.h"

namespace baton::gpudirect {

// F(name, version, parameters), all returning a Result.
#define BATON_DRIVER_ENTRIES(F)                                                                   \
  F(cuInit, 2000, (unsigned flags))                                                               \
  F(cuDriverGetVersion, 2020, (int* version))                                                     \
  F(cuGetErrorName, 6000, (Result result, const char** name))                                     \
  F(cuGetErrorString, 6000, (Result result, const char** text))                                   \
  F(cuDeviceGetCount, 2000, (int* count))                                                         \
  F(cuDeviceGet, 2000, (int* device, int ordinal))                                                \
  F(cuDeviceGetName, 2000, (char* name, int size, int device))                                    \
  F(cuDeviceGetAttribute, 2000, (int* value, DeviceAttribute attribute, int device))              \
  F(cuDeviceTotalMem, 3020, (size_t * bytes, int device))                                         \
  F(cuDeviceGetPCIBusId, 4010, (char* id, int size, int device))                                  \
  F(cuDevicePrimaryCtxRetain, 7000, (Context * context, int device))                              \
  F(cuDevicePrimaryCtxRelease, 11000, (int device))                                               \
  F(cuCtxPushCurrent, 4000, (Context context))                                                    \
  F(cuCtxPopCurrent, 4000, (Context * context))                                                   \
  F(cuPointerGetAttributes, 7000,                                                                 \
    (unsigned count, PointerAttribute* attributes, void** values, DevicePointer pointer))         \
  F(cuMemGetAllocationGranularity, 10020,                                                         \
    (size_t * bytes, const AllocationProperties* properties, int option))                         \
  F(cuMemCreate, 10020,                                                                           \
    (AllocationHandle * handle, size_t bytes, const AllocationProperties* properties,             \
     unsigned long long flags))                                                                   \
  F(cuMemRelease, 10020, (AllocationHandle handle))                                               \
  F(cuMemAddressReserve, 10020,                                                                   \
    (DevicePointer * at, size_t bytes, size_t alignment, DevicePointer wish,                      \
     unsigned long long flags))                                                                   \
  F(cuMemAddressFree, 10020, (DevicePointer at, size_t bytes))                                    \
  F(cuMemMap, 10020,                                                                              \
    (DevicePointer at, size_t bytes, size_t offset, AllocationHandle handle,                      \
     unsigned long long flags))                                                                   \
  F(cuMemUnmap, 10020, (DevicePointer at, size_t bytes))                                          \
  F(cuMemSetAccess, 10020,                                                                        \
    (DevicePointer at, size_t bytes, const AccessDescription* access, size_t count))              \
  F(cuMemRetainAllocationHandle, 11000, (AllocationHandle * handle, void* address))               \
  F(cuMemExportToShareableHandle, 10020,                                                          \
    (void* shared, AllocationHandle handle, int type, unsigned long long flags))                  \
  F(cuMemImportFromShareableHandle, 10020, (AllocationHandle * handle, void* shared, int type))   \
  F(cuDeviceCanAccessPeer, 4000, (int* can, int device, int peer))                                \
  F(cuMemHostRegister, 6050, (void* data, size_t bytes, unsigned flags))                          \
  F(cuMemHostUnregister, 4000, (void* data))                                                      \
  F(cuMemcpyAsync, 4000, (DevicePointer to, DevicePointer from, size_t bytes, Stream stream))     \
  F(cuMemcpy2DAsync, 3020, (const PlaneCopy* copy, Stream stream))                                \
  F(cuStreamCreateWithPriority, 5050, (Stream * stream, unsigned flags, int priority))            \
  F(cuStreamDestroy, 4000, (Stream stream))                                                       \
  F(cuStreamQuery, 2000, (Stream stream))                                                         \
  F(cuEventCreate, 2000, (Event * event, unsigned flags))                                         \
  F(cuEventDestroy, 4000, (Event event))                                                          \
  F(cuEventRecord, 2000, (Event event, Stream stream))                                            \
  F(cuEventQuery, 2000, (Event event))                                                            \
  F(cuModuleLoadData, 2000, (Module * module, const void* image))                                 \
  F(cuModuleUnload, 2000, (Module module))                                                        \
  F(cuModuleGetFunction, 2000, (Function * function, Module module, const char* name))            \
  F(cuFuncSetAttribute, 9000, (Function function, int attribute, int value))                      \
  F(cuLaunchKernel, 4000,                                                                         \
    (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,      \
     unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream stream, void** parameters, \
     void** extra))

// Null where the driver is older than they are.
#define BATON_DRIVER_OPTIONAL(F)                                                          \
  F(cuDeviceGetUuid, 11040, (DeviceUuid * uuid, int device))                              \
  F(cuFuncLoad, 12040, (Function function))                                               \
  F(cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050,                                    \
    (int* blocks, Function function, int threads, size_t shared_bytes))                   \
  F(cuPointerSetAttribute, 6000,                                                          \
    (const void* value, PointerAttribute attribute, DevicePointer pointer))               \
  F(cuMemGetAddressRange, 3020, (DevicePointer * base, size_t * bytes, DevicePointer at)) \
  F(cuIpcGetMemHandle, 4010, (IpcHandle * handle, DevicePointer at))                      \
  F(cuIpcOpenMemHandle, 11000, (DevicePointer * at, IpcHandle handle, unsigned flags))    \
  F(cuIpcCloseMemHandle, 4010, (DevicePointer at))                                        \
  F(cuMemcpyBatchAsync, 13000,                                                            \
    (DevicePointer * to, DevicePointer * from, size_t * bytes, size_t count,              \
     BatchAttributes * attributes, size_t * first_of_attributes, size_t attribute_count,  \
     Stream stream))                                                                      \
  F(cuStreamWaitValue64, 11070,                                                           \
    (Stream stream, DevicePointer address, uint64_t value, unsigned flags))               \
  F(cuFlushGPUDirectRDMAWrites, 11030, (int target, int scope))                           \
  F(cuStreamBeginCapture, 10010, (Stream stream, int mode))                               \
  F(cuStreamEndCapture, 10000, (Stream stream, Graph * graph))                            \
  F(cuStreamIsCapturing, 10000, (Stream stream, int* status))                             \
  F(cuThreadExchangeStreamCaptureMode, 10010, (int* mode))                                \
  F(cuGraphInstantiateWithFlags, 11040,                                                   \
    (GraphExecutable * executable, Graph graph, unsigned long long flags))                \
  F(cuGraphLaunch, 10000, (GraphExecutable executable, Stream stream))                    \
  F(cuGraphExecDestroy, 10000, (GraphExecutable executable))                              \
  F(cuGraphDestroy, 10000, (Graph graph))                                                 \
  F(cuMemGetHandleForAddressRange, 11070,                                                 \
    (void* handle, DevicePointer at, size_t bytes, int type, unsigned long long flags))

// NOLINTNEXTLINE(bugprone-macro-parentheses): a name that is declared takes none.
#define BATON_DECLARE(name, version, parameters) Result(*name) parameters = nullptr;
struct Driver {
  BATON_DRIVER_ENTRIES(BATON_DECLARE)
  BATON_DRIVER_OPTIONAL(BATON_DECLARE)
  int version = 0;  // 13000: CUDA 13.0
};
#undef BATON_DECLARE

// cuGetProcAddress as of CUDA 12, and of 11.3 (which has no `found`).
using GetProcAddress = Result (*)(const char* name, void** entry, int version,
                                  unsigned long long flags, int* found);
using OldGetProcAddress = Result (*)(const char* name, void** entry, int version,
                                     unsigned long long flags);

// Fills a table and initialises the driver. Unavailable, in one line with the remedy: no driver, an
// old one, entries it lacks, no device. `library`: "libcuda.so.1", or a test's.
absl::StatusOr<Driver> load_driver(const char* library = "libcuda.so.1");
// The same from a cuGetProcAddress at hand.
absl::StatusOr<Driver> load_driver(GetProcAddress get);

// This machine's, loaded once. Thread-safe; the table lives as long as the process.
absl::StatusOr<const Driver*> machine_driver();
// True if the driver's library is loaded in this process; if not, no code here has device memory.
bool driver_in_process();

// True for errors after which the context is unusable. A process forked from one that uses CUDA has
// no context: each call there returns kNotInitialized.
bool is_loss(Result result);
inline constexpr const char* kForked =
    "; a process forked from one that uses CUDA cannot use CUDA: fork before CUDA is initialised, "
    "or exec";

// "cuMemCreate of 2 MiB: out of memory (CUDA_ERROR_OUT_OF_MEMORY)". OK for success. `device`: the
// device that was lost, if known.
absl::Status driver_status(const Driver& driver, Result result, std::string_view what,
                           int device = -1);
// "CUDA device 0 is lost to this process: restart the process".
std::string words_of_loss(int device);

}  // namespace baton::gpudirect
