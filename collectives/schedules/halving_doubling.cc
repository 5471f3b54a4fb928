// Recursive halving and doubling (Rabenseifner 2004): log2 n rounds each way, bandwidth-optimal.
//
// With n not a power of two, the others hand in everything first and get everything back last.
#include "collectives/schedules/writers.h"

namespace baton::collectives::schedules {

Core::Core(const Group& of) : group(of), size(power_of_two_up_to(of.size)), others(of.size - size) {
  if (group.me < 2 * others) {
    v = group.me / 2;
    inside = group.me % 2 == 0;
    has_partner = true;
    partner = group.rank(group.me ^ 1);
  } else {
    v = group.me - others;
  }
}

void fold_in(Writer& w, const Core& core, Range parts, Area own, Area partial) {
  if (!core.has_partner) return;
  if (core.inside) {
    w.receive_reduce(core.partner, partial(parts.first), own(parts.first), parts.size(), false);
  } else {
    w.send(core.partner, own(parts.first), parts.size());
  }
}

void halve(Writer& w, const Core& core, FirstPart first, Area own, Area partial,
           const std::optional<Place>& result, bool final) {
  Area source = core.has_partner ? partial : own;
  uint32_t low = 0;
  for (uint32_t half = core.size / 2; half > 0; half /= 2) {
    const uint32_t peer = core.rank(core.v ^ half);
    const uint32_t begin = first(low), middle = first(low + half), end = first(low + 2 * half);
    const bool upper = (core.v & half) != 0;
    const Range mine = upper ? Range{middle, end} : Range{begin, middle};
    const Range theirs = upper ? Range{begin, middle} : Range{middle, end};
    w.send(peer, source(theirs.first), theirs.size());
    w.receive_reduce(peer, half == 1 && result ? *result : partial(mine.first), source(mine.first),
                     mine.size(), final && half == 1);
    source = partial;
    if (upper) low += half;
  }
}

void double_up(Writer& w, const Core& core, FirstPart first, Area area) {
  for (uint32_t have = 1; have < core.size; have *= 2) {
    const uint32_t mine = core.v & ~(have - 1), theirs = mine ^ have;
    const uint32_t peer = core.rank(core.v ^ have);
    w.send(peer, area(first(mine)), first(mine + have) - first(mine));
    w.receive(peer, area(first(theirs)), first(theirs + have) - first(theirs));
  }
}

void halving_doubling_all_reduce(Writer& w, const Group& group, uint32_t base, Area own) {
  const Core core(group);
  const Range all{base, base + core.size};
  const auto first = [base](uint32_t v) { return base + v; };
  fold_in(w, core, all, own, kOutputArea);
  if (!core.inside) {
    w.receive(core.partner, output(base), core.size);
    return;
  }
  halve(w, core, first, own, kOutputArea, std::nullopt, true);
  double_up(w, core, first, kOutputArea);
  if (core.has_partner) w.send(core.partner, output(base), core.size);
}

void halving_reduce_scatter(Writer& w, const Group& group, uint32_t count, Area own, Area partial,
                            Place result) {
  const Core core(group);
  const auto first = [&core, count](uint32_t v) {
    return std::min(count, v == core.size ? core.group.size : core.member(v));
  };
  fold_in(w, core, {0, count}, own, partial);
  if (!core.inside) {
    if (group.me < count) w.receive(core.partner, result);
    return;
  }
  if (!core.has_partner) {
    halve(w, core, first, own, partial, result, true);
    return;
  }
  halve(w, core, first, own, partial, std::nullopt, true);
  if (group.me + 1 < count) w.send(core.partner, partial(group.me + 1));
  if (group.me < count) w.copy(result, partial(group.me));
}

void doubling_all_gather(Writer& w, const Group& group, uint32_t count, Area area) {
  const Core core(group);
  const uint32_t me = group.me;
  const auto first = [&core, count](uint32_t v) {
    return std::min(count, v == core.size ? core.group.size : core.member(v));
  };
  // Ranks outside of the core hand in one part and get the parts before and after it.
  const auto size_after = [count](uint32_t i) { return i + 1 < count ? count - i - 1 : 0; };
  if (!core.inside) {
    if (me < count) w.send(core.partner, area(me));
    w.receive(core.partner, area(0), std::min(me, count));
    w.receive(core.partner, area(me + 1), size_after(me));
    return;
  }
  if (core.has_partner && me + 1 < count) w.receive(core.partner, area(me + 1));
  double_up(w, core, first, area);
  if (core.has_partner) {
    w.send(core.partner, area(0), std::min(me + 1, count));
    w.send(core.partner, area(me + 2), size_after(me + 1));
  }
}

namespace {

uint32_t largest_half(const Core& core) {
  const uint32_t lower = core.member(core.size / 2);
  return std::max(lower, core.group.size - lower);
}

}  // namespace

uint32_t halving_message(uint32_t ranks) {
  const Core core(everybody(ranks, 0));
  return core.others > 0 ? ranks : largest_half(core);
}

uint32_t doubling_message(uint32_t ranks) {
  const Core core(everybody(ranks, 0));
  return core.others > 0 ? std::max(largest_half(core), ranks - 2) : largest_half(core);
}

namespace {

// Scatter down a binomial tree, then gather; the root, which has everything, receives nothing.
void broadcast(uint32_t n, uint32_t root, uint32_t rank, Writer& w) {
  const Core core(everybody(n, (rank + n - root) % n));
  const auto rank_of = [&core, n, root](uint32_t v) { return (core.member(v) + root) % n; };
  const uint32_t partner = (core.partner + root) % n;
  const uint32_t v = core.v, size = core.size;
  if (!core.inside) {
    w.receive(partner, output(0), size);
    return;
  }
  const Area area = v == 0 ? kInputArea : kOutputArea;
  for (uint32_t half = size / 2; half > 0; half /= 2) {
    if (v % (2 * half) == half) w.receive(rank_of(v - half), output(v), half);
    if (v % (2 * half) == 0) w.send(rank_of(v + half), area(v + half), half);
  }
  for (uint32_t have = 1; have < size; have *= 2) {
    const uint32_t mine = v & ~(have - 1), theirs = mine ^ have, peer = v ^ have;
    if (peer != 0) w.send(rank_of(peer), area(mine), have);
    if (v != 0) w.receive(rank_of(peer), output(theirs), have);
  }
  if (core.has_partner) w.send(partner, area(0), size);
  if (v == 0) w.copy(output(0), input(0), size);
}

}  // namespace

void write_halving_doubling(const ScheduleSpec& spec, uint32_t rank, uint32_t, Writer& w) {
  switch (spec.collective) {
    case Collective::kAllReduce:
      halving_doubling_all_reduce(w, everybody(spec.ranks, rank), 0, kInputArea);
      break;
    case Collective::kReduceScatter:
      w.need_scratch(spec.ranks);
      halving_reduce_scatter(w, everybody(spec.ranks, rank), spec.ranks, kInputArea, kScratchArea,
                             output(rank));
      break;
    case Collective::kAllGather:
      w.copy(output(rank), input(rank));
      doubling_all_gather(w, everybody(spec.ranks, rank), spec.ranks, kOutputArea);
      break;
    case Collective::kBroadcast:
      broadcast(spec.ranks, spec.root, rank, w);
      break;
    default:
      break;
  }
}

// Recursive doubling: log2 n rounds with whole vectors, for small messages.
//
// all_reduce: hypercube exchange; ranks beyond a power of two hand in first and get the result
// last. all_gather: Bruck et al. 1997, in place of the rotation straight to where each part
// belongs. broadcast and reduce: binomial tree. barrier: dissemination (Hensgen et al. 1988).

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
    case Collective::kBarrier:
      for (uint32_t distance = 1; distance < n; distance *= 2) {
        w.signal((rank + distance) % n);
        w.await_signal((rank + n - distance) % n);
      }
      break;
    default:
      write_along(w, spec, rank, binomial_branch(n, spec.root, rank));
      break;
  }
}

}  // namespace baton::collectives::schedules
