// NCCL's RMA interface, versions 13 to 16: structs of function pointers that NCCL finds by name.
//
// v13 is the host's half of what was GIN, and is looked for under GIN's name too. v14 has a flag
// for strong signals and lost what devices need; v15 has flags for each operation; v16 says what a
// signal stands for.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plugins/nccl/abi.h"
#include "plugins/nccl/abi_net.h"

namespace baton::nccl {

// ncclNetDeviceHandle, since v7.
struct NetDeviceHandle {
  int device_type;
  int device_version;
  void* handle;
  size_t size;
  int needs_progress;
};
static_assert(sizeof(NetDeviceHandle) == 32 && offsetof(NetDeviceHandle, needs_progress) == 24);
inline constexpr int kHostDevice = 0, kGinProxyDevice = 2;

// The operation of a signal on its word.
inline constexpr uint32_t kSignalInc = 1, kSignalAdd = 2;
// A flag of an operation, since v15: others follow at once.
inline constexpr uint32_t kAggregate = 1;

struct GinConfigV13 {
  int signals, counters, contexts, queue_depth, traffic_class;
};
static_assert(sizeof(GinConfigV13) == 20 && offsetof(GinConfigV13, contexts) == 8);
struct RmaConfigV14 {
  int contexts, traffic_class, rank_stride;
};
static_assert(sizeof(RmaConfigV14) == 12);
struct RmaPropertiesV16 {
  bool any_signal_flushes_all;
};

// Functions that no version changed.
using RmaInit = Result (*)(void** context, uint64_t communicator, Logger log);
using RmaProperties = Result (*)(int device, PropertiesV12* out);
using RmaConnect = Result (*)(void* context, void* handles[], int ranks, int rank, void* listener,
                              void** comm);
using RmaFlush = Result (*)(void* context, int number, void* memory, uint32_t rank, void** request);
using RmaTest = Result (*)(void* comm, void* request, int* done);
using RmaQuery = Result (*)(void* context, bool* failed);
using RmaPut = Result (*)(void* context, int number, uint64_t from_offset, void* from, size_t size,
                          uint64_t to_offset, void* to, uint32_t rank, void** request);

struct RmaV13 {
  const char* name;
  RmaInit init;
  Devices devices;
  RmaProperties properties;
  ListenV11 listen;
  RmaConnect connect;
  Result (*create_context)(void* comm, GinConfigV13* config, void** context,
                           NetDeviceHandle** device);
  Result (*register_memory)(void* comm, void* data, size_t size, int type, uint64_t flags,
                            void** memory, void** for_device);
  Result (*register_dma_buf)(void* comm, void* data, size_t size, int type, uint64_t offset, int fd,
                             uint64_t flags, void** memory, void** for_device);
  Deregister deregister;
  Close destroy_context, close_comm, close_listen;
  RmaPut put;
  Result (*put_signal)(void* context, int number, uint64_t from_offset, void* from, size_t size,
                       uint64_t to_offset, void* to, uint32_t rank, uint64_t word_offset,
                       void* words, uint64_t value, uint32_t operation, void** request);
  RmaPut get;
  RmaFlush flush;
  RmaTest test;
  Close progress;
  RmaQuery query_last_error;
  Close finalize;
};
static_assert(sizeof(RmaV13) == 168 && offsetof(RmaV13, put) == 104 &&
              offsetof(RmaV13, test) == 136);

using RmaRegister = Result (*)(void* comm, void* data, size_t size, int type, uint64_t flags,
                               void** memory);
using RmaRegisterDmaBuf = Result (*)(void* comm, void* data, size_t size, int type, uint64_t offset,
                                     int fd, uint64_t flags, void** memory);
using RmaCreateContext = Result (*)(void* comm, RmaConfigV14* config, void** context);

using RmaPutSignalV14 = Result (*)(void* context, int number, uint64_t from_offset, void* from,
                                   size_t size, uint64_t to_offset, void* to, uint32_t rank,
                                   uint64_t word_offset, void* words, uint64_t value,
                                   uint32_t operation, bool strong, void** request);
using RmaPutV15 = Result (*)(void* context, int number, uint64_t from_offset, void* from,
                             size_t size, uint64_t to_offset, void* to, uint32_t rank,
                             uint32_t flags, void** request);
using RmaPutSignalV15 = Result (*)(void* context, int number, uint64_t from_offset, void* from,
                                   size_t size, uint64_t to_offset, void* to, uint32_t rank,
                                   uint64_t word_offset, void* words, uint64_t value,
                                   uint32_t operation, bool strong, uint32_t flags, void** request);

template <typename Put, typename PutSignal>
struct RmaSinceV14 {
  const char* name;
  RmaInit init;
  Devices devices;
  RmaProperties properties;
  ListenV11 listen;
  RmaConnect connect;
  RmaCreateContext create_context;
  RmaRegister register_memory;
  RmaRegisterDmaBuf register_dma_buf;
  Deregister deregister;
  Close destroy_context, close_comm, close_listen;
  Put put;
  PutSignal put_signal;
  Put get;
  RmaFlush flush;
  RmaTest test;
  Close progress;
  RmaQuery query_last_error;
  Close finalize;
};
using RmaV14 = RmaSinceV14<RmaPut, RmaPutSignalV14>;
using RmaV15 = RmaSinceV14<RmaPutV15, RmaPutSignalV15>;
static_assert(sizeof(RmaV14) == 168 && offsetof(RmaV14, put_signal) == 112);
static_assert(sizeof(RmaV15) == 168 && offsetof(RmaV15, get) == 120);

struct RmaV16 {
  const char* name;
  RmaInit init;
  Devices devices;
  Result (*rma_properties)(void* comm, RmaPropertiesV16* out);
  RmaProperties properties;
  ListenV11 listen;
  RmaConnect connect;
  RmaCreateContext create_context;
  RmaRegister register_memory;
  RmaRegisterDmaBuf register_dma_buf;
  Deregister deregister;
  Close destroy_context, close_comm, close_listen;
  RmaPutV15 put;
  RmaPutSignalV15 put_signal;
  RmaPutV15 get;
  RmaFlush flush;
  RmaTest test;
  Close progress;
  RmaQuery query_last_error;
  Close finalize;
};
static_assert(sizeof(RmaV16) == 176 && offsetof(RmaV16, rma_properties) == 24 &&
              offsetof(RmaV16, put) == 112 && offsetof(RmaV16, test) == 144);

}  // namespace baton::nccl
