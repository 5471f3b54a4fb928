// Ring: each rank talks to the next and listens to the previous; bandwidth-optimal.
#include "collectives/schedules/writers.h"

namespace baton::collectives::schedules {

void ring_reduce_scatter(Writer& w, const Group& group, uint32_t blocks, BlockRange range,
                         PartialPlace partial, bool final) {
  const uint32_t n = group.size;
  for (uint32_t step = 0; step + 1 < n; ++step) {
    const uint32_t out = (group.me + 2 * n - step - 1) % n;
    const uint32_t in = (group.me + 2 * n - step - 2) % n;
    for (uint32_t k = 0; k < blocks; ++k) {
      const Range sent = range(out, k), got = range(in, k);
      w.send(group.next(), step == 0 ? input(sent.first) : partial(step - 1, sent.first),
             sent.size());
      w.receive_reduce(group.previous(), partial(step, got.first), input(got.first), got.size(),
                       final && step + 2 == n);
    }
  }
}

void ring_all_gather(Writer& w, const Group& group, uint32_t blocks, BlockRange range,
                     PartPlace own) {
  const uint32_t n = group.size;
  for (uint32_t step = 0; step + 1 < n; ++step) {
    const uint32_t out = (group.me + n - step) % n;
    const uint32_t in = (group.me + 2 * n - step - 1) % n;
    for (uint32_t k = 0; k < blocks; ++k) {
      const Range sent = range(out, k), got = range(in, k);
      w.send(group.next(), step == 0 ? own(sent.first) : output(sent.first), sent.size());
      w.receive(group.previous(), output(got.first), got.size());
    }
  }
}

namespace {

// The chain along a ring, from `root` to the rank before it.
Branch ring_branch(const Group& group, uint32_t root) {
  uint32_t at_root = 0;
  while (group.rank(at_root) != root) ++at_root;
  Branch branch{
      .root = group.me == at_root, .parent = group.previous(), .ranks = {}, .children = {}};
  if ((group.me + 1) % group.size != at_root) branch.children.push_back({group.next(), {}});
  return branch;
}

}  // namespace

void write_ring(const ScheduleSpec& spec, uint32_t rank, uint32_t channel, Writer& w) {
  const Group group = ring_group(spec.ranks, rank, channel);
  const auto range = [&group](uint32_t i, uint32_t) {
    return Range{group.rank(i), group.rank(i) + 1};
  };
  switch (spec.collective) {
    case Collective::kAllReduce: {
      ring_reduce_scatter(
          w, group, 1, range, [](uint32_t, uint32_t part) { return output(part); }, true);
      ring_all_gather(w, group, 1, range, output);
      break;
    }
    case Collective::kReduceScatter: {
      // Two places in turn: the next rank takes one while the other is written.
      w.need_scratch(std::min<uint32_t>(spec.ranks - 2, 2));
      const auto partial = [&spec](uint32_t step, uint32_t part) {
        return step + 2 == spec.ranks ? output(part) : scratch(step % 2);
      };
      ring_reduce_scatter(w, group, 1, range, partial, true);
      break;
    }
    case Collective::kAllGather:
      ring_all_gather(w, group, 1, range, input);
      w.copy(output(rank), input(rank));
      break;
    default:
      write_along(w, spec, rank, ring_branch(group, spec.root));
      break;
  }
}

}  // namespace baton::collectives::schedules
