// Ordered reductions: every schedule here brings the contributions of all ranks for a part to where
// the part belongs and folds them there.
//
// A part's contributions stand side by side in scratch, by rank; our own stays in the input, where
// the fold reads it, and is copied to scratch only if it travels on with others. The fold writes
// output that may be the input it reads: it is the last reader of it.
//
//   direct              all_reduce, reduce_scatter: each rank sends each part to its rank
//   ring                the same, carried along the ring
//   others, all_reduce  the all_gather of that algorithm, with contributions for parts; then a fold
//   tree, all_reduce    up the tree, fold at the root, down the tree
//   reduce              up the algorithm's tree; fold at the root
//   halving             reduce_scatter: algorithms/ordered_halving.cc
//   hierarchical        reduce_scatter, reduce: algorithms/ordered_hierarchical.cc
#include "collectives/schedules/ordered.h"

namespace baton::collectives::schedules {
namespace {

// Contributions of ranks that may wrap around, within the n places from `base` on.
template <typename F>
void for_runs(uint32_t n, const Ranks& ranks, uint32_t base, F f) {
  const uint32_t before_end = std::min(ranks.count, n - ranks.first);
  if (before_end > 0) f(scratch(base + ranks.first), before_end);
  if (ranks.count > before_end) f(scratch(base), ranks.count - before_end);
}
void send_runs(Writer& w, uint32_t n, uint32_t to, const Ranks& ranks, uint32_t base = 0) {
  for_runs(n, ranks, base, [&w, to](Place place, uint32_t parts) { w.send(to, place, parts); });
}
void receive_runs(Writer& w, uint32_t n, uint32_t from, const Ranks& ranks, uint32_t base = 0) {
  for_runs(n, ranks, base,
           [&w, from](Place place, uint32_t parts) { w.receive(from, place, parts); });
}

// All contributions go up to the root, and are folded there.
void contributions_up(Writer& w, uint32_t n, uint32_t rank, const Branch& branch) {
  if (branch.children.empty()) {
    w.send(branch.parent, input(0));
    return;
  }
  w.need_scratch(n);
  for (const Branch::Child& child : branch.children) receive_runs(w, n, child.rank, child.ranks);
  if (branch.root) {
    w.fold(output(0), 0);
    return;
  }
  w.copy(scratch(rank), input(0));
  send_runs(w, n, branch.parent, branch.ranks);
}

Branch tree_of(const ScheduleSpec& spec, uint32_t rank) {
  const uint32_t root = spec.collective == Collective::kAllReduce ? 0 : spec.root;
  switch (spec.algorithm) {
    case Algorithm::kRing:
      return chain_branch(spec.ranks, root, rank);
    case Algorithm::kRecursiveDoubling:
      return binomial_branch(spec.ranks, root, rank);
    case Algorithm::kTree:
      return binary_branch(spec.ranks, root, rank, 0);
    default:
      return star_branch(spec.ranks, root, rank);
  }
}

void direct_reduce_scatter(uint32_t n, uint32_t rank, Writer& w) {
  w.need_scratch(n);
  for (uint32_t i = 1; i < n; ++i) w.send((rank + i) % n, input((rank + i) % n));
  for (uint32_t i = 1; i < n; ++i) w.receive((rank + n - i) % n, scratch((rank + n - i) % n));
  w.fold(output(rank), 0);
}

// In step s the part of the rank s + 1 behind us moves on, with the contributions of all since that
// rank. Two sets of places in turn: the next rank takes one while the other is filled.
void ring_reduce_scatter_ordered(uint32_t n, uint32_t rank, bool backwards, Writer& w) {
  w.need_scratch(std::min<uint32_t>(n - 1, 2) * n);
  const uint32_t forward = backwards ? n - 1 : 1;
  const uint32_t next = (rank + forward) % n, previous = (rank + n - forward) % n;
  // `count` ranks up to `end` along the ring, as they stand in memory.
  const auto up_to = [n, backwards](uint32_t end, uint32_t count) {
    return Ranks{backwards ? end : (end + n - count + 1) % n, count};
  };
  const auto behind = [n, rank, backwards](uint32_t distance) {
    return backwards ? (rank + distance) % n : (rank + n - distance) % n;
  };
  uint32_t base = 0;
  for (uint32_t step = 0; step + 1 < n; ++step) {
    if (step == 0) {
      w.send(next, input(behind(1)));
    } else {
      w.copy(scratch(base + rank), input(behind(step + 1)));
      send_runs(w, n, next, up_to(rank, step + 1), base);
    }
    base = step % 2 * n;
    receive_runs(w, n, previous, up_to(previous, step + 1), base);
  }
  w.fold(output(rank), base);
}

// An all_gather whose parts are the contributions to one part.
void gather_and_fold(const ScheduleSpec& spec, uint32_t rank, uint32_t channel, Writer& w) {
  ScheduleSpec gather = spec;
  gather.collective = Collective::kAllGather;
  Writer inner;
  if (spec.algorithm == Algorithm::kRecursiveDoubling) {
    write_recursive_doubling(gather, rank, channel, inner);
  } else if (spec.algorithm == Algorithm::kHalvingDoubling) {
    write_halving_doubling(gather, rank, channel, inner);
  } else {
    write_hierarchical(gather, rank, channel, inner);
  }
  const auto move = [n = spec.ranks](Place& place) {
    if (place.buffer == BufferName::kInput) {
      place.part = 0;
    } else if (place.buffer == BufferName::kOutput) {
      place.buffer = BufferName::kScratch;
    } else {
      place.part += n;
    }
  };
  Program gathered = inner.take();
  w.need_scratch(spec.ranks + gathered.scratch_parts);
  w.steps() = std::move(gathered.steps);
  for (Step& step : w.steps()) {
    move(step.source);
    move(step.target);
  }
  // Our own copy is needed only where it is sent on.
  const auto sends_own = [rank](const Step& step) {
    return step.kind == Step::Kind::kSend && step.source.buffer == BufferName::kScratch &&
           step.source.part <= rank && rank < step.source.part + step.parts;
  };
  if (std::none_of(w.steps().begin(), w.steps().end(), sends_own)) {
    const auto own_copy = [rank](const Step& step) {
      return step.kind == Step::Kind::kCopy && step.target == scratch(rank);
    };
    w.steps().erase(std::remove_if(w.steps().begin(), w.steps().end(), own_copy), w.steps().end());
  }
  w.fold(output(0), 0);
}

void all_reduce(const ScheduleSpec& spec, uint32_t rank, uint32_t channel, Writer& w) {
  const uint32_t n = spec.ranks;
  switch (spec.algorithm) {
    case Algorithm::kDirect:
      direct_reduce_scatter(n, rank, w);
      direct_all_gather(n, rank, output(rank), w);
      break;
    case Algorithm::kRing: {
      // The gather runs along the same ring.
      ring_reduce_scatter_ordered(n, rank, channel % 2 == 1, w);
      const Group group = ring_group(n, rank, channel % 2);
      const auto range = [&group](uint32_t i, uint32_t) {
        return Range{group.rank(i), group.rank(i) + 1};
      };
      ring_all_gather(w, group, 1, range, output);
      break;
    }
    case Algorithm::kTree: {
      const Branch branch = tree_of(spec, rank);
      contributions_up(w, n, rank, branch);
      broadcast_down(w, branch, output(0));
      break;
    }
    default:
      gather_and_fold(spec, rank, channel, w);
      break;
  }
}

}  // namespace

Shape ordered_shape(const ScheduleSpec& spec) {
  const uint32_t n = spec.ranks;
  const bool whole = spec.collective != Collective::kReduce;
  switch (spec.algorithm) {
    case Algorithm::kDirect:
      return {whole ? n : 1, 1};
    case Algorithm::kRing:
      return {whole ? n : 1, n - 1};
    case Algorithm::kRecursiveDoubling:
      return {1, whole ? bruck_message(n) : power_of_two_from(n) / 2};
    case Algorithm::kHalvingDoubling:
      if (spec.collective == Collective::kReduceScatter) return {n, ordered_halving_message(n)};
      return {1, doubling_message(n)};
    case Algorithm::kTree:
      return {1, n - 1};
    case Algorithm::kHierarchical: {
      if (spec.collective != Collective::kAllReduce) return ordered_hierarchical_shape(spec);
      ScheduleSpec gather = spec;
      gather.collective = Collective::kAllGather;
      return {1, hierarchical_shape(gather).max_message_parts};
    }
  }
  return {};
}

void write_ordered(const ScheduleSpec& spec, uint32_t rank, uint32_t channel, Writer& w) {
  switch (spec.collective) {
    case Collective::kAllReduce:
      all_reduce(spec, rank, channel, w);
      break;
    case Collective::kReduceScatter:
      if (spec.algorithm == Algorithm::kDirect) {
        direct_reduce_scatter(spec.ranks, rank, w);
      } else if (spec.algorithm == Algorithm::kHalvingDoubling) {
        write_ordered_halving(spec.ranks, rank, w);
      } else if (spec.algorithm == Algorithm::kHierarchical) {
        write_ordered_hierarchical(spec, rank, w);
      } else {
        ring_reduce_scatter_ordered(spec.ranks, rank, channel % 2 == 1, w);
      }
      break;
    default:
      if (spec.algorithm == Algorithm::kHierarchical) {
        write_ordered_hierarchical(spec, rank, w);
      } else {
        contributions_up(w, spec.ranks, rank, tree_of(spec, rank));
      }
      break;
  }
}

}  // namespace baton::collectives::schedules
