// Double binary tree (Sanders, Speck, Träff 2009): two trees, for even and odd pieces, so that a
// rank inside one is a leaf of the other. A piece goes up and down one of them.
//
// Virtual rank 0 is the root and has one child. The others form an in-order binary tree: a number
// with its lowest set bit b has the children v - b/2 and v + b/2 and v - b + 1 ... v + b - 1 below.
#include "collectives/schedules/writers.h"

namespace baton::collectives::schedules {
namespace {

// The numbers 1..n-1 of the second tree are those of the first, backwards if that makes even odd
// and else shifted by one. Each is its own kind of permutation that leaves the root alone.
uint32_t to_second(uint32_t v, uint32_t n) {
  if (v == 0) return 0;
  if (n % 2 == 1) return n - v;
  return v == n - 1 ? 1 : v + 1;
}
uint32_t from_second(uint32_t v, uint32_t n) {
  if (v == 0) return 0;
  if (n % 2 == 1) return n - v;
  return v == 1 ? n - 1 : v - 1;
}

}  // namespace

Branch binary_branch(uint32_t ranks, uint32_t root, uint32_t rank, uint32_t channel) {
  const bool second = channel % 2 == 1;
  const auto rank_of = [ranks, root, second](uint32_t v) {
    return (root + (second ? from_second(v, ranks) : v)) % ranks;
  };
  const uint32_t plain = (rank + ranks - root) % ranks;
  const uint32_t v = second ? to_second(plain, ranks) : plain;
  const uint32_t low = v == 0 ? power_of_two_from(ranks) : (v & (~v + 1));
  const uint32_t last = std::min(v + low - 1, ranks - 1);
  Branch branch{.root = v == 0, .parent = 0, .ranks = {}, .children = {}};
  if (!branch.root) {
    const uint32_t up = (v ^ low) | (low << 1);
    branch.parent = rank_of(up < ranks ? up : v ^ low);
    if (low > 1) branch.children.push_back({rank_of(v - low / 2), {rank_of(v - low + 1), low - 1}});
  }
  // The right child's place may lie beyond the end; then it is the top of what there is.
  for (uint32_t half = low / 2; half > 0; half /= 2) {
    if (v + half >= ranks) continue;
    branch.children.push_back({rank_of(v + half), {rank_of(v + 1), last - v}});
    break;
  }
  const uint32_t begin = branch.root ? 0 : v - low + 1;
  branch.ranks = {rank_of(begin), last - begin + 1};
  return branch;
}

void write_tree(const ScheduleSpec& spec, uint32_t rank, uint32_t channel, Writer& w) {
  const uint32_t root = spec.collective == Collective::kAllReduce ? 0 : spec.root;
  const Branch branch = binary_branch(spec.ranks, root, rank, channel);
  if (spec.collective != Collective::kAllReduce) return write_along(w, spec, rank, branch);
  reduce_up(w, branch, true);
  broadcast_down(w, branch, output(0));
}

// Sending down and reducing up any tree, for all algorithms with trees.

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

void write_along(Writer& w, const ScheduleSpec& spec, uint32_t rank, const Branch& branch) {
  if (spec.collective == Collective::kBroadcast) broadcast_down(w, branch, input(0));
  if (spec.collective == Collective::kReduce) reduce_up(w, branch, false);
  if (spec.collective == Collective::kGather) gather_up(w, spec.ranks, rank, branch);
  if (spec.collective == Collective::kScatter) scatter_down(w, spec.ranks, rank, branch);
}

}  // namespace baton::collectives::schedules
