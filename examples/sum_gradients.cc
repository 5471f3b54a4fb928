// Four ranks sum their gradients while they compute: all_reduce in the background, then the result.
#include <cstdio>

#include "collectives/communicator.h"
#include "collectives/launch.h"

using namespace baton;

int rank_main(const launch::Place& place, int /*generation*/) {
  CommunicatorOptions options;
  options.rank = place.rank;
  options.ranks = place.ranks;
  options.rendezvous = place.rendezvous;
  options.background = true;  // calls advance while this thread computes
  auto comm = Communicator::create(options).value();

  constexpr size_t kCount = 1 << 20;
  const CommBuffer buffer =
      comm->allocate(kCount * sizeof(float)).value();  // read in place by peers
  auto* gradients = reinterpret_cast<float*>(buffer.data);
  for (size_t i = 0; i < kCount; ++i) gradients[i] = static_cast<float>(place.rank + 1);

  const Work work =
      comm->all_reduce_async(gradients, gradients, kCount, DataType::kF32, ReduceOp::kAvg).value();
  double busy = 0;
  for (int i = 1; i < 1000000; ++i) busy += 1.0 / i;  // the rest of the backward pass
  const absl::Status done = comm->wait(work);
  if (!done.ok()) {  // names the rank, the call, the chunk and the link
    std::fprintf(stderr, "rank %d: %s\n", place.rank, done.ToString().c_str());
    return 1;
  }
  if (place.rank == 0) {
    std::printf("computed %.3f; the mean gradient is %g\n%s", busy, gradients[kCount - 1],
                comm->explain(Collective::kAllReduce, kCount * sizeof(float)).c_str());
  }
  return gradients[kCount - 1] == 2.5f ? 0 : 1;
}

int main() { return launch::fork_ranks({.ranks = 4}, rank_main).value(); }
