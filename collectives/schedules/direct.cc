// Direct: each rank with each other rank, in one round. Rank r starts with r + 1, so that no rank
// is the first goal of all.
#include "collectives/schedules/writers.h"

namespace baton::collectives::schedules {
namespace {

void reduce_scatter(uint32_t n, uint32_t rank, Writer& w) {
  for (uint32_t i = 1; i < n; ++i) w.send((rank + i) % n, input((rank + i) % n));
  for (uint32_t i = 1; i < n; ++i) {
    w.receive_reduce((rank + n - i) % n, output(rank), i == 1 ? input(rank) : output(rank), 1,
                     i + 1 == n);
  }
}

}  // namespace

void direct_all_gather(uint32_t n, uint32_t rank, Place own, Writer& w) {
  for (uint32_t i = 1; i < n; ++i) w.send((rank + i) % n, own);
  w.copy(output(rank), own);
  for (uint32_t i = 1; i < n; ++i) w.receive((rank + n - i) % n, output((rank + n - i) % n));
}

void write_direct(const ScheduleSpec& spec, uint32_t rank, uint32_t, Writer& w) {
  const uint32_t n = spec.ranks;
  switch (spec.collective) {
    case Collective::kAllReduce:
      reduce_scatter(n, rank, w);
      direct_all_gather(n, rank, output(rank), w);
      break;
    case Collective::kReduceScatter:
      reduce_scatter(n, rank, w);
      break;
    case Collective::kAllGather:
      direct_all_gather(n, rank, input(rank), w);
      break;
    case Collective::kBroadcast:
      broadcast_down(w, star_branch(n, spec.root, rank), input(0));
      break;
    case Collective::kReduce:
      reduce_up(w, star_branch(n, spec.root, rank), false);
      break;
    case Collective::kGather:
      gather_up(w, n, rank, star_branch(n, spec.root, rank));
      break;
    case Collective::kScatter:
      scatter_down(w, n, rank, star_branch(n, spec.root, rank));
      break;
    case Collective::kAllToAll:
      for (uint32_t i = 1; i < n; ++i) w.send((rank + i) % n, input((rank + i) % n));
      w.copy(output(rank), input(rank));
      for (uint32_t i = 1; i < n; ++i) {
        w.receive((rank + n - i) % n, output((rank + n - i) % n));
      }
      break;
    case Collective::kBarrier:
      for (uint32_t i = 1; i < n; ++i) w.signal((rank + i) % n);
      for (uint32_t i = 1; i < n; ++i) w.await_signal((rank + n - i) % n);
      break;
    default:
      break;
  }
}

}  // namespace baton::collectives::schedules
