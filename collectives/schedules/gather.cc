// gather and scatter: up and down a tree, each rank with the blocks of all below it.
//
// The tree is the star of `direct`, or for small blocks the binomial tree of `recursive_doubling`:
// log2 n rounds. A rank below the root keeps the blocks of its branch in scratch, its own first and
// those of the ranks behind it in their order.
#include "collectives/schedules/writers.h"

namespace baton::collectives::schedules {

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
