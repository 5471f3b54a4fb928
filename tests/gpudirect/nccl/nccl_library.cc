// libnccl.so.2 over the fake driver's library: what a baseline asks of NCCL, done by the host when
// a group of calls ends. Vectors of float are summed; anything is moved.
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "bench/baselines/nccl_api.h"

using baton::baselines::NcclOp;
using baton::baselines::NcclResult;
using baton::baselines::NcclType;
using Communicator = baton::baselines::NcclCommunicator;

struct baton::baselines::NcclCommunicator {
  int rank = 0;
  int ranks = 0;
};

namespace {

enum class Kind { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kReduce, kSend, kReceive };
struct Operation {
  Kind kind;
  const void* in;
  void* out;
  size_t count;
  size_t element;
  int other;  // the root, or the peer
  Communicator* of;
};
std::vector<Operation> queued;
int depth = 0;

std::byte* view(const void* at, size_t bytes) {
  using View = void* (*)(uint64_t, size_t);
  static const auto function = reinterpret_cast<View>(
      dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), "fake_cuda_view"));
  return static_cast<std::byte*>(function(reinterpret_cast<uintptr_t>(at), bytes));
}

// NCCL's numbers of its types.
size_t element_of(NcclType type) {
  constexpr size_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return kBytes[static_cast<int>(type)];
}

// The vector of a rank's, from an element on, added to `sum`.
void add(std::vector<float>& sum, const Operation& operation, size_t first) {
  const std::byte* const at =
      view(static_cast<const float*>(operation.in) + first, sum.size() * sizeof(float));
  for (size_t i = 0; i < sum.size(); ++i) {
    float value = 0;
    std::memcpy(&value, at + i * sizeof value, sizeof value);
    sum[i] += value;
  }
}

void execute(const Operation& mine) {
  const size_t bytes = mine.count * mine.element;
  auto* const out = static_cast<std::byte*>(mine.out);
  if (mine.kind == Kind::kSend) return;
  if (mine.kind == Kind::kReduce && mine.of->rank != mine.other) return;
  std::vector<float> sum(bytes /
                         sizeof(float));  // numbers of other types are wrong, as is told above
  int sends = 0;
  for (const Operation& theirs : queued) {
    const auto rank = static_cast<size_t>(theirs.of->rank);
    switch (mine.kind) {
      case Kind::kAllGather:
        std::memcpy(view(out + rank * bytes, bytes), view(theirs.in, bytes), bytes);
        break;
      case Kind::kBroadcast:
        if (theirs.of->rank == mine.other)
          std::memcpy(view(out, bytes), view(theirs.in, bytes), bytes);
        break;
      case Kind::kReceive:
        if (theirs.kind == Kind::kSend && theirs.of->rank == mine.other &&
            theirs.other == mine.of->rank && sends++ == 0) {
          std::memcpy(view(out, bytes), view(theirs.in, bytes), bytes);
        }
        break;
      case Kind::kReduceScatter:
        add(sum, theirs, static_cast<size_t>(mine.of->rank) * mine.count);
        break;
      default:
        add(sum, theirs, 0);
    }
  }
  const bool sums = mine.kind == Kind::kAllReduce || mine.kind == Kind::kReduce ||
                    mine.kind == Kind::kReduceScatter;
  if (sums) std::memcpy(view(out, bytes), sum.data(), bytes);
}

NcclResult queue(Kind kind, const void* in, void* out, size_t count, NcclType type, int other,
                 Communicator* of) {
  queued.push_back({kind, in, out, count, element_of(type), other, of});
  return NcclResult::kSuccess;
}

}  // namespace

#define BATON_EXPORT __attribute__((visibility("default")))
// NOLINTBEGIN(readability-identifier-naming): NCCL's names.
extern "C" {

BATON_EXPORT NcclResult ncclGetVersion(int* version) {
  *version = 22800;
  return NcclResult::kSuccess;
}
BATON_EXPORT const char* ncclGetErrorString(NcclResult) { return "an error of the stand-in"; }
BATON_EXPORT NcclResult ncclCommInitAll(Communicator** comms, int count, const int* devices) {
  for (int r = 0; r < count; ++r) {
    if (devices[r] != r) return NcclResult{4};
    comms[r] = new Communicator{r, count};
  }
  return NcclResult::kSuccess;
}
BATON_EXPORT NcclResult ncclCommDestroy(Communicator* comm) {
  delete comm;
  return NcclResult::kSuccess;
}
BATON_EXPORT NcclResult ncclGroupStart() {
  ++depth;
  return NcclResult::kSuccess;
}
BATON_EXPORT NcclResult ncclGroupEnd() {
  if (--depth > 0) return NcclResult::kSuccess;
  for (const Operation& operation : queued) execute(operation);
  queued.clear();
  return NcclResult::kSuccess;
}
BATON_EXPORT NcclResult ncclAllReduce(const void* in, void* out, size_t count, NcclType type,
                                      NcclOp /*op*/, Communicator* comm, void* /*stream*/) {
  return queue(Kind::kAllReduce, in, out, count, type, 0, comm);
}
BATON_EXPORT NcclResult ncclReduceScatter(const void* in, void* out, size_t count, NcclType type,
                                          NcclOp /*op*/, Communicator* comm, void* /*stream*/) {
  return queue(Kind::kReduceScatter, in, out, count, type, 0, comm);
}
BATON_EXPORT NcclResult ncclAllGather(const void* in, void* out, size_t count, NcclType type,
                                      Communicator* comm, void* /*stream*/) {
  return queue(Kind::kAllGather, in, out, count, type, 0, comm);
}
BATON_EXPORT NcclResult ncclBroadcast(const void* in, void* out, size_t count, NcclType type,
                                      int root, Communicator* comm, void* /*stream*/) {
  return queue(Kind::kBroadcast, in, out, count, type, root, comm);
}
BATON_EXPORT NcclResult ncclReduce(const void* in, void* out, size_t count, NcclType type,
                                   NcclOp /*op*/, int root, Communicator* comm, void* /*stream*/) {
  return queue(Kind::kReduce, in, out, count, type, root, comm);
}
BATON_EXPORT NcclResult ncclSend(const void* in, size_t count, NcclType type, int peer,
                                 Communicator* comm, void* /*stream*/) {
  return queue(Kind::kSend, in, nullptr, count, type, peer, comm);
}
BATON_EXPORT NcclResult ncclRecv(void* out, size_t count, NcclType type, int peer,
                                 Communicator* comm, void* /*stream*/) {
  return queue(Kind::kReceive, nullptr, out, count, type, peer, comm);
}

}  // extern "C"
// NOLINTEND(readability-identifier-naming)
