// Recursive doubling: log2 n rounds with whole vectors, for small messages.
//
// all_reduce: hypercube exchange; ranks beyond a power of two hand in first and get the result
// last. all_gather: Bruck et al. 1997, in place of the rotation straight to where each part
// belongs. broadcast and reduce: binomial tree. barrier: dissemination (Hensgen et al. 1988).
#include "collectives/schedules/writers.h"

namespace baton::collectives::schedules {

Branch binomial_branch(uint32_t ranks, uint32_t root, uint32_t rank) {
  const uint32_t v = (rank + ranks - root) % ranks;
  const uint32_t low = v == 0 ? power_of_two_from(ranks) : (v & (~v + 1));
  Branch branch{.root = v == 0,
                .parent = (root + (v & (v - 1))) % ranks,
                .ranks = {rank, std::min(low, ranks - v)},
                .children = {}};
  for (uint32_t bit = 1; bit < low && v + bit < ranks; bit *= 2) {
    const uint32_t child = (rank + bit) % ranks;
    branch.children.push_back({child, {child, std::min(bit, ranks - v - bit)}});
  }
  return branch;
}

namespace {

// Values alternate between two places, so that what a partner may still be reading stays: the last
// one is the output, the one before it scratch, and so on; the first one is the input, which may be
// the same memory as the output, so the second one is in scratch too.
//
// Two ranks have a single round: each sends its input and writes its output. If these may be the
// same memory, both sum into scratch, side by side, and copy once the other has read; otherwise
// each would wait for the other.
void all_reduce(const ScheduleSpec& spec, uint32_t rank, Writer& w) {
  const Core core(everybody(spec.ranks, rank));
  if (!core.inside) {
    w.send(core.partner, input(0));
    w.receive(core.partner, output(0));
    return;
  }
  uint32_t rounds = 0;
  while ((1u << rounds) < core.size) ++rounds;
  const auto place = [rounds](uint32_t round) {  // of the value before this round
    return (rounds - round) % 2 == 0 ? output(0) : scratch(0);
  };
  Place value = input(0);
  if (core.has_partner) {
    value = place(0);
    w.receive_reduce(core.partner, value, input(0), 1, false);
  }
  for (uint32_t round = 0; round < rounds; ++round) {
    const uint32_t peer = core.rank(core.v ^ (1u << round));
    Place target = place(round + 1);
    if (value.buffer == BufferName::kInput && rounds > 1 && target.buffer == BufferName::kOutput) {
      target = scratch(1);
    }
    if (spec.ranks == 2 && !spec.separate) target = scratch(0);
    w.send(peer, value);
    w.receive_reduce(peer, target, value, 1, round + 1 == rounds);
    value = target;
  }
  if (core.has_partner) w.send(core.partner, value);
  w.copy(output(0), value);
  for (const Step& step : w.steps()) {
    if (step.target.buffer == BufferName::kScratch) w.need_scratch(step.target.part + 1);
  }
}

void all_gather(uint32_t n, uint32_t rank, Writer& w) {
  for (uint32_t have = 1; have < n; have *= 2) {
    const uint32_t count = std::min(have, n - have);
    const uint32_t to = (rank + n - have) % n, from = (rank + have) % n;
    // Ours are [rank, rank + have), theirs [from, from + have), around the end.
    if (have == 1) {
      w.send(to, input(rank));
      if (n > 2) w.copy(output(rank), input(rank));
    } else {
      const uint32_t before_end = std::min(count, n - rank);
      w.send(to, output(rank), before_end);
      w.send(to, output(0), count - before_end);
    }
    const uint32_t before_end = std::min(count, n - from);
    w.receive(from, output(from), before_end);
    w.receive(from, output(0), count - before_end);
  }
  if (n == 2) w.copy(output(rank), input(rank));
}

}  // namespace

uint32_t bruck_message(uint32_t ranks) {
  const uint32_t last = power_of_two_from(ranks) / 2;
  return std::max(last / 2, ranks - last);
}

void write_recursive_doubling(const ScheduleSpec& spec, uint32_t rank, uint32_t, Writer& w) {
  const uint32_t n = spec.ranks;
  switch (spec.collective) {
    case Collective::kAllReduce:
      all_reduce(spec, rank, w);
      break;
    case Collective::kAllGather:
      all_gather(n, rank, w);
      break;
    case Collective::kBroadcast:
      broadcast_down(w, binomial_branch(n, spec.root, rank), input(0));
      break;
    case Collective::kReduce:
      reduce_up(w, binomial_branch(n, spec.root, rank), false);
      break;
    case Collective::kGather:
      gather_up(w, n, rank, binomial_branch(n, spec.root, rank));
      break;
    case Collective::kScatter:
      scatter_down(w, n, rank, binomial_branch(n, spec.root, rank));
      break;
    case Collective::kBarrier:
      for (uint32_t distance = 1; distance < n; distance *= 2) {
        w.signal((rank + distance) % n);
        w.await_signal((rank + n - distance) % n);
      }
      break;
    default:
      break;
  }
}

}  // namespace baton::collectives::schedules
