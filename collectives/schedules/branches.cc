// Sending down and reducing up any tree, for all algorithms with trees.
#include "collectives/schedules/writers.h"

namespace baton::collectives::schedules {

Branch star_branch(uint32_t ranks, uint32_t root, uint32_t rank) {
  Branch branch{.root = rank == root, .parent = root, .ranks = {rank, 1}, .children = {}};
  if (!branch.root) return branch;
  branch.ranks.count = ranks;
  for (uint32_t i = 1; i < ranks; ++i) {
    const uint32_t child = (root + i) % ranks;
    branch.children.push_back({child, {child, 1}});
  }
  return branch;
}

void broadcast_down(Writer& w, const Branch& branch, Place source) {
  if (!branch.root) {
    source = output(0);
    w.receive(branch.parent, source);
  }
  // The children are in the order in which their data comes up: the one that needs longest last.
  for (auto child = branch.children.rbegin(); child != branch.children.rend(); ++child) {
    w.send(child->rank, source);
  }
  w.copy(output(0), source);
}

void reduce_up(Writer& w, const Branch& branch, bool use_output) {
  const Place sum = branch.root || use_output ? output(0) : scratch(0);
  Place own = input(0);
  for (const Branch::Child& child : branch.children) {
    w.receive_reduce(child.rank, sum, own, 1, branch.root && &child == &branch.children.back());
    own = sum;
  }
  if (branch.root) return;
  if (own.buffer == BufferName::kScratch) w.need_scratch(1);
  w.send(branch.parent, own);
}

}  // namespace baton::collectives::schedules
