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
      write_along(w, spec, rank, star_branch(n, spec.root, rank));
      break;
  }
}

// gather and scatter: up and down a tree, each rank with the blocks of all below it.
//
// The tree is the star of `direct`, or for small blocks the binomial tree of `recursive_doubling`:
// log2 n rounds. A rank below the root keeps the blocks of its branch in scratch, its own first and
// those of the ranks behind it in their order.

uint32_t binomial_message(uint32_t ranks) {
  const uint32_t below = power_of_two_from(ranks) / 2;  // the last of the root's branches
  return std::max({1u, below / 2, ranks - below});
}

void gather_up(Writer& w, uint32_t n, uint32_t rank, const Branch& branch) {
  if (!branch.root && branch.children.empty()) return w.send(branch.parent, input(rank));
  const auto at = [&](uint32_t r) { return branch.root ? output(r) : scratch((r + n - rank) % n); };
  if (!branch.root) w.need_scratch(branch.ranks.count);
  for (const Branch::Child& child : branch.children) {
    for_runs(n, child.ranks,
             [&](uint32_t r, uint32_t count) { w.receive(child.rank, at(r), count); });
  }
  w.copy(at(rank), input(rank));
  if (branch.root) return;
  for_runs(n, branch.ranks,
           [&](uint32_t r, uint32_t count) { w.send(branch.parent, at(r), count); });
}

void scatter_down(Writer& w, uint32_t n, uint32_t rank, const Branch& branch) {
  if (!branch.root && branch.children.empty()) return w.receive(branch.parent, output(rank));
  const auto at = [&](uint32_t r) { return branch.root ? input(r) : scratch((r + n - rank) % n); };
  if (!branch.root) {
    w.need_scratch(branch.ranks.count);
    for_runs(n, branch.ranks,
             [&](uint32_t r, uint32_t count) { w.receive(branch.parent, at(r), count); });
  }
  // The largest branch first: its data has the longest way.
  for (auto child = branch.children.rbegin(); child != branch.children.rend(); ++child) {
    for_runs(n, child->ranks,
             [&](uint32_t r, uint32_t count) { w.send(child->rank, at(r), count); });
  }
  w.copy(output(rank), at(rank));
}

}  // namespace baton::collectives::schedules
