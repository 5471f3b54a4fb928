// NCCL's tuner (versions 5 and 6) and profiler (5 to 7): structs of function pointers that NCCL
// finds by name.
//
// v6 of the tuner can change the size of chunks. The profiler's versions differ in what they have
// behind the members that Baton reads: copy engines' collectives since v6, tags of users' since v7.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plugins/nccl/abi.h"

namespace baton::nccl {

// --- the tuner -----------------------------------------------------------------------------------

struct NvlDomains;      // not looked at
struct TunerConstants;  // likewise

struct TunerV5 {
  const char* name;
  Result (*init)(void** context, uint64_t communicator, size_t ranks, size_t nodes, Logger log,
                 NvlDomains* domains, TunerConstants* constants);
  // `costs`: microseconds, by algorithm and protocol; negative: cannot be used.
  Result (*choose)(void* context, int collective, size_t bytes, int operations, float** costs,
                   int algorithms, int protocols, int registered, int* channels);
  Result (*finalize)(void* context);
};
static_assert(sizeof(TunerV5) == 32);
struct TunerV6 {
  const char* name;
  decltype(TunerV5::init) init;
  decltype(TunerV5::choose) choose;
  decltype(TunerV5::finalize) finalize;
  Result (*chunk)(void* context, int collective, size_t bytes, int algorithm, int protocol,
                  int channels, size_t* bytes_of_chunk);
};
static_assert(sizeof(TunerV6) == 40 && offsetof(TunerV6, chunk) == 32);

// --- the profiler --------------------------------------------------------------------------------

// Kinds of events, as bits of a mask.
inline constexpr uint64_t kGroupEvent = 1, kCollectiveEvent = 2, kPointToPointEvent = 4,
                          kProxyOperationEvent = 8, kProxyStepEvent = 16,
                          kCopyEngineEvent = 1 << 12;
// States that tell how many bytes a step has.
inline constexpr int kSendWaits = 9, kReceiveWaits = 10;

// The fields of each descriptor that Baton reads.
struct ProfiledCollective {
  uint64_t sequence;
  const char* function;
  const void* from;
  void* to;
  size_t count;
  int root;
  const char* type;
  // Not of copy engines' collectives.
  uint8_t channels, warps;
  const char* algorithm;
  const char* protocol;
};
struct ProfiledPointToPoint {
  const char* function;
  void* data;
  const char* type;
  size_t count;
  int peer;
};
struct ProfiledOperation {
  int process;
  uint8_t channel;
  int peer, steps, chunk, sends;
};

struct ProfiledEvent {
  uint64_t kind;
  void* parent;
  int rank;
  union {  // by kind
    ProfiledCollective collective;
    ProfiledPointToPoint point_to_point;
    ProfiledOperation operation;
    int step;
  };
};
static_assert(offsetof(ProfiledEvent, rank) == 16 && offsetof(ProfiledEvent, collective) == 24);
static_assert(offsetof(ProfiledEvent, collective.count) == 56 &&
              offsetof(ProfiledEvent, collective.type) == 72 &&
              offsetof(ProfiledEvent, collective.protocol) == 96);
static_assert(offsetof(ProfiledEvent, point_to_point.count) == 48 &&
              offsetof(ProfiledEvent, point_to_point.peer) == 56);
static_assert(offsetof(ProfiledEvent, operation.channel) == 28 &&
              offsetof(ProfiledEvent, operation.sends) == 44);
union ProfiledState {
  size_t step_bytes;
};

struct Profiler {  // equal in v5, v6 and v7
  const char* name;
  Result (*init)(void** context, uint64_t communicator, int* wanted, const char* name, int nodes,
                 int ranks, int rank, Logger log);
  Result (*start)(void* context, void** event, ProfiledEvent* description);
  Result (*stop)(void* event);
  Result (*record)(void* event, int state, ProfiledState* arguments);
  Result (*finalize)(void* context);
};
static_assert(sizeof(Profiler) == 48);

}  // namespace baton::nccl
