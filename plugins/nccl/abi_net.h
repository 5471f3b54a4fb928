// NCCL's net interface, versions 8 to 12: structs of function pointers that NCCL finds by name.
//
// What changed: v9 has sizes in size_t and virtual devices; v10 a profiler's callback and a
// configuration at connect; v11 a context for each communicator; v12 rail and plane numbers, and
// room for eight devices in a virtual one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plugins/nccl/abi.h"

namespace baton::nccl {

// ncclNetDeviceHandle: for NICs with code on the GPU. Baton's never have.
struct NetDeviceHandle;

struct NetConfig {
  int traffic_class;  // -1: not set
};

template <int kDevices>
struct VirtualDevice {
  int count;
  int devices[kDevices];
};

struct PropertiesV8 {
  const char* name;
  const char* pci_path;  // in /sys; null: none
  uint64_t guid;
  int pointers;
  int registered_globally;
  int speed;  // Mb/s
  int port;
  float latency;
  int max_comms;
  int max_receives;
  int device_type;
  int device_version;
};
static_assert(sizeof(PropertiesV8) == 64);
static_assert(offsetof(PropertiesV8, speed) == 32 && offsetof(PropertiesV8, device_version) == 56);

// v9 and v10; v11 is longer by what is behind it.
struct PropertiesV9 {
  const char* name;
  const char* pci_path;
  uint64_t guid;
  int pointers;
  int registered_globally;
  int force_flush;
  int speed;
  int port;
  float latency;
  int max_comms;
  int max_receives;
  int device_type;
  int device_version;
  VirtualDevice<4> virtual_device;
  size_t max_p2p_bytes;
  size_t max_collective_bytes;
};
static_assert(sizeof(PropertiesV9) == 104);
static_assert(offsetof(PropertiesV9, virtual_device) == 64 &&
              offsetof(PropertiesV9, max_p2p_bytes) == 88);

struct PropertiesV11 {
  PropertiesV9 common;
  int max_multi_request;
};
static_assert(sizeof(PropertiesV11) == 112);

struct PropertiesV12 {
  const char* name;
  const char* pci_path;
  uint64_t guid;
  int pointers;
  int registered_globally;
  int force_flush;
  int speed;
  int port;
  float latency;
  int max_comms;
  int max_receives;
  int device_type;
  int device_version;
  VirtualDevice<8> virtual_device;
  size_t max_p2p_bytes;
  size_t max_collective_bytes;
  int max_multi_request;
  int16_t rail;
  int16_t plane;
};
static_assert(sizeof(PropertiesV12) == 128);
static_assert(offsetof(PropertiesV12, max_p2p_bytes) == 104 &&
              offsetof(PropertiesV12, rail) == 124);

// ncclNetAttr: hints about what will be sent. Taken and not used.
struct NetAttributes;

// Functions that no version changed.
using ListenV8 = Result (*)(int device, void* handle, void** comm);
using ListenV11 = Result (*)(void* context, int device, void* handle, void** comm);
using Accept = Result (*)(void* listener, void** comm, NetDeviceHandle** device);
using Register = Result (*)(void* comm, void* data, size_t size, int type, void** memory);
using RegisterDmaBuf = Result (*)(void* comm, void* data, size_t size, int type, uint64_t offset,
                                  int fd, void** memory);
using Deregister = Result (*)(void* comm, void* memory);
using Flush = Result (*)(void* comm, int count, void** data, int* sizes, void** memory,
                         void** request);
using Test = Result (*)(void* request, int* done, int* sizes);
using Close = Result (*)(void* comm);
using DeviceMemory = Result (*)(void* comm, void* memory, void** out);
using Consumed = Result (*)(void* comm, int count, void* request);
using Devices = Result (*)(int* count);

struct NetV8 {
  const char* name;
  Result (*init)(Logger log);
  Devices devices;
  Result (*properties)(int device, PropertiesV8* out);
  ListenV8 listen;
  Result (*connect)(int device, void* handle, void** comm, NetDeviceHandle** out);
  Accept accept;
  Register register_memory;
  RegisterDmaBuf register_dma_buf;
  Deregister deregister;
  Result (*send)(void* comm, void* data, int size, int tag, void* memory, void** request);
  Result (*receive)(void* comm, int count, void** data, int* sizes, int* tags, void** memory,
                    void** request);
  Flush flush;
  Test test;
  Close close_send, close_receive, close_listen;
  DeviceMemory device_memory;
  Consumed consumed;
};
static_assert(sizeof(NetV8) == 152 && offsetof(NetV8, send) == 80 && offsetof(NetV8, test) == 104);

using SendV10 = Result (*)(void* comm, void* data, size_t size, int tag, void* memory,
                           void* profiled, void** request);
using ReceiveV10 = Result (*)(void* comm, int count, void** data, size_t* sizes, int* tags,
                              void** memory, void** profiled, void** request);

// v9 and v10 differ in what a profiler and a configuration are given to.
template <typename Init, typename Connect, typename Send, typename Receive>
struct NetSinceV9 {
  const char* name;
  Init init;
  Devices devices;
  Result (*properties)(int device, PropertiesV9* out);
  ListenV8 listen;
  Connect connect;
  Accept accept;
  Register register_memory;
  RegisterDmaBuf register_dma_buf;
  Deregister deregister;
  Send send;
  Receive receive;
  Flush flush;
  Test test;
  Close close_send, close_receive, close_listen;
  DeviceMemory device_memory;
  Consumed consumed;
  Result (*make_virtual)(int* device, VirtualDevice<4>* of);
};
using NetV9 = NetSinceV9<Result (*)(Logger log),
                         Result (*)(int device, void* handle, void** comm, NetDeviceHandle** out),
                         Result (*)(void* comm, void* data, size_t size, int tag, void* memory,
                                    void** request),
                         Result (*)(void* comm, int count, void** data, size_t* sizes, int* tags,
                                    void** memory, void** request)>;
using NetV10 = NetSinceV9<Result (*)(Logger log, ProfilerCallback profiler),
                          Result (*)(int device, NetConfig* config, void* handle, void** comm,
                                     NetDeviceHandle** out),
                          SendV10, ReceiveV10>;
static_assert(sizeof(NetV9) == 160 && sizeof(NetV10) == 160);
static_assert(offsetof(NetV9, make_virtual) == 152 && offsetof(NetV10, test) == 104);

// v11 and v12 differ in the properties and in virtual devices.
template <typename Properties, int kDevices>
struct NetSinceV11 {
  const char* name;
  Result (*init)(void** context, uint64_t communicator, NetConfig* config, Logger log,
                 ProfilerCallback profiler);
  Devices devices;
  Result (*properties)(int device, Properties* out);
  ListenV11 listen;
  Result (*connect)(void* context, int device, void* handle, void** comm, NetDeviceHandle** out);
  Accept accept;
  Register register_memory;
  RegisterDmaBuf register_dma_buf;
  Deregister deregister;
  SendV10 send;
  ReceiveV10 receive;
  Flush flush;
  Test test;
  Close close_send, close_receive, close_listen;
  DeviceMemory device_memory;
  Consumed consumed;
  Result (*make_virtual)(int* device, VirtualDevice<kDevices>* of);
  Result (*finalize)(void* context);
  Result (*set_attributes)(void* context, NetAttributes* attributes);
};
using NetV11 = NetSinceV11<PropertiesV11, 4>;
using NetV12 = NetSinceV11<PropertiesV12, 8>;
static_assert(sizeof(NetV11) == 176 && sizeof(NetV12) == 176);
static_assert(offsetof(NetV12, send) == 80 && offsetof(NetV12, test) == 104 &&
              offsetof(NetV12, make_virtual) == 152 && offsetof(NetV12, finalize) == 160);

// NCCL's CollNet interface, versions 8 to 12: reductions in the network.

// Functions that a plugin without devices may leave out, by their order: properties, listen,
// connect, reduceSupport, regMr, regMrDmaBuf, deregMr, iallreduce, iallgather, ireducescatter,
// iflush, test, closeColl, closeListen.
inline constexpr int kCollNetCalls = 14;
using LeftOut = void (*)();

struct CollNetV8 {
  const char* name;
  Result (*init)(Logger log);
  Devices devices;
  LeftOut calls[kCollNetCalls];
};
static_assert(sizeof(CollNetV8) == 136);

// v9 and v10 have virtual devices.
struct CollNetV9 {
  const char* name;
  Result (*init)(Logger log);
  Devices devices;
  LeftOut calls[kCollNetCalls];
  LeftOut make_virtual;
};
static_assert(sizeof(CollNetV9) == 144);

// v11 and v12 are opened for each communicator.
struct CollNetV11 {
  const char* name;
  Result (*init)(void** context, uint64_t communicator, Logger log);
  Devices devices;
  LeftOut calls[kCollNetCalls];
  LeftOut make_virtual;
  Result (*finalize)(void* context);
};
static_assert(sizeof(CollNetV11) == 152 && offsetof(CollNetV11, finalize) == 144);

}  // namespace baton::nccl
