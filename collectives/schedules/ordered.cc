// Ordered reductions: every schedule here brings the contributions of all ranks for a part to where
// the part belongs and folds them there, in rank order.
//
// A part's contributions stand side by side in scratch, by rank; our own stays in the input, where
// the fold reads it, and is copied to scratch only if it travels on with others. The fold writes
// output that may be the input it reads: it is the last reader of it.
//
//   direct              each rank sends each part to its rank: not a byte more than unordered
//   recursive doubling  all_reduce: the all_gather, with contributions for parts; then a fold
//                       reduce: up the binomial tree; fold at the root
#include "collectives/schedules/writers.h"

namespace baton::collectives::schedules {
namespace {

// All contributions go up to the root, and are folded there.
void reduce_to_root(Writer& w, uint32_t n, uint32_t rank, const Branch& branch) {
  if (branch.children.empty()) {
    w.send(branch.parent, input(0));
    return;
  }
  w.need_scratch(n);
  for (const Branch::Child& child : branch.children) {
    for_runs(n, child.ranks,
             [&](uint32_t r, uint32_t count) { w.receive(child.rank, scratch(r), count); });
  }
  if (branch.root) {
    w.fold(output(0), 0);
    return;
  }
  w.copy(scratch(rank), input(0));
  for_runs(n, branch.ranks,
           [&](uint32_t r, uint32_t count) { w.send(branch.parent, scratch(r), count); });
}

void direct_reduce_scatter(uint32_t n, uint32_t rank, Writer& w) {
  w.need_scratch(n);
  for (uint32_t i = 1; i < n; ++i) w.send((rank + i) % n, input((rank + i) % n));
  for (uint32_t i = 1; i < n; ++i) w.receive((rank + n - i) % n, scratch((rank + n - i) % n));
  w.fold(output(rank), 0);
}

// An all_gather whose parts are the contributions to one part.
void gather_and_fold(const ScheduleSpec& spec, uint32_t rank, uint32_t channel, Writer& w) {
  ScheduleSpec gather = spec;
  gather.collective = Collective::kAllGather;
  Writer inner;
  write_recursive_doubling(gather, rank, channel, inner);
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
    std::erase_if(w.steps(), [rank](const Step& step) {
      return step.kind == Step::Kind::kCopy && step.target == scratch(rank);
    });
  }
  w.fold(output(0), 0);
}

}  // namespace

Shape ordered_shape(const ScheduleSpec& spec) {
  const uint32_t n = spec.ranks;
  const bool whole = spec.collective != Collective::kReduce;
  if (spec.algorithm == Algorithm::kDirect) return {whole ? n : 1, 1};
  return {1, whole ? bruck_message(n) : power_of_two_from(n) / 2};
}

void write_ordered(const ScheduleSpec& spec, uint32_t rank, uint32_t channel, Writer& w) {
  const uint32_t n = spec.ranks;
  const bool direct = spec.algorithm == Algorithm::kDirect;
  if (spec.collective == Collective::kReduce) {
    reduce_to_root(w, n, rank,
                   direct ? star_branch(n, spec.root, rank) : binomial_branch(n, spec.root, rank));
  } else if (!direct) {
    gather_and_fold(spec, rank, channel, w);
  } else {
    direct_reduce_scatter(n, rank, w);
    if (spec.collective == Collective::kAllReduce) direct_all_gather(n, rank, output(rank), w);
  }
}

}  // namespace baton::collectives::schedules
