// NCCL's CollNet interface, versions 8 to 12: reductions in the network.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plugins/nccl/abi_net.h"

namespace baton::nccl {

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
