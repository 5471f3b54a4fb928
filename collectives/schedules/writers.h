// The functions that write the schedule of each algorithm (ring, tree, ...), the building blocks
// they share, and the rules they keep. Internal to this folder.
//
// Every writer keeps three promises, which the verifier checks:
//
//   In place. Input part p and output part p may be the same memory. So an input part is read for
//   the last time before the output part of the same number is written, or by the very step that
//   writes it (target = source (+) message).
//
//   What is being sent stays. A step may overwrite the source of an earlier send of the same rank;
//   the executor then waits until the receiver has taken it. That wait must end, so the receiver
//   must get there without our step: either the message that we receive was caused by it (rings,
//   trees, halving: what comes back has passed through whoever took what we sent), or the step
//   writes elsewhere (recursive doubling alternates between two places).
//
//   Two messages. No rank sends more than kMessagesAhead messages to one peer before it receives
//   what that peer sends meanwhile.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "collectives/schedules/schedule.h"

namespace baton::collectives::schedules {

inline constexpr Place input(uint32_t part) { return {BufferName::kInput, part}; }
inline constexpr Place output(uint32_t part) { return {BufferName::kOutput, part}; }
inline constexpr Place scratch(uint32_t part) { return {BufferName::kScratch, part}; }

// Appends steps to a program. Steps of no parts are left out: ranges may be empty.
class Writer {
 public:
  void send(uint32_t peer, Place source, uint32_t parts = 1);
  void receive(uint32_t peer, Place target, uint32_t parts = 1);
  void receive_reduce(uint32_t peer, Place target, Place source, uint32_t parts, bool final);
  void copy(Place target, Place source, uint32_t parts = 1);
  // Our own contribution is in the input part of target's number.
  void fold(Place target, uint32_t scratch_part);
  // A message of no parts.
  void signal(uint32_t to);
  void await_signal(uint32_t from);

  void need_scratch(uint32_t parts) {
    program_.scratch_parts = std::max(program_.scratch_parts, parts);
  }

  std::vector<Step>& steps() { return program_.steps; }
  Program take() { return std::move(program_); }

 private:
  Program program_;
};

// Parts [first, end).
struct Range {
  uint32_t first = 0, end = 0;
  uint32_t size() const { return end > first ? end - first : 0; }
};

// Parts that stand behind each other somewhere: part p is at `first + p` of `buffer`.
struct Area {
  BufferName buffer = BufferName::kInput;
  uint32_t first = 0;
  Place operator()(uint32_t part) const { return {buffer, first + part}; }
};
inline constexpr Area kInputArea{BufferName::kInput, 0};
inline constexpr Area kOutputArea{BufferName::kOutput, 0};
inline constexpr Area kScratchArea{BufferName::kScratch, 0};

// Ranks that do something together, by their numbers in it: a node, the same place in every node,
// all ranks (on a ring with another stride).
struct Group {
  uint32_t me = 0;    // our number in it
  uint32_t size = 1;  // how many
  uint32_t first = 0, stride = 1, modulo = 1;
  std::optional<uint32_t> last = std::nullopt;  // the last one's rank, if it breaks the rule
  uint32_t rank(uint32_t i) const {
    if (last && i + 1 == size) return *last;
    return first + static_cast<uint32_t>(static_cast<uint64_t>(i) * stride % modulo);
  }
  uint32_t next() const { return rank((me + 1) % size); }
  uint32_t previous() const { return rank((me + size - 1) % size); }
};
inline Group everybody(uint32_t ranks, uint32_t rank) { return {rank, ranks, 0, 1, ranks, {}}; }

// The ranks as they follow each other on the ring of a channel: odd channels run backwards, every
// two channels have another stride that has no divisor in common with the number of ranks.
Group ring_group(uint32_t ranks, uint32_t rank, uint32_t channel);

uint32_t power_of_two_up_to(uint32_t n);  // the largest <= n
uint32_t power_of_two_from(uint32_t n);   // the smallest >= n

// --- building blocks, used by the algorithm of their name and by hierarchical -----------------

// Member i's parts in block `k`; blocks run side by side (hierarchical schedules have one per
// node).
using BlockRange = absl::FunctionRef<Range(uint32_t i, uint32_t k)>;
// Where the partial sum of `part` is kept that is received in `step`.
using PartialPlace = absl::FunctionRef<Place(uint32_t step, uint32_t part)>;
// Where `part` is.
using PartPlace = absl::FunctionRef<Place(uint32_t part)>;

// Member i ends with the sum of its ranges, where partial(size - 2, part) says.
void ring_reduce_scatter(Writer& w, const Group& group, uint32_t blocks, BlockRange range,
                         PartialPlace partial, bool final);
// Member i has its ranges where own(part) says; all end with each rank's in the output.
void ring_all_gather(Writer& w, const Group& group, uint32_t blocks, BlockRange range,
                     PartPlace own);

// The largest power of two of members: these halve and double. Each other member hands its input to
// a partner among them and gets the result from it. Core member v is group member member(v).
struct Core {
  explicit Core(const Group& of);
  uint32_t member(uint32_t i) const { return i < others ? 2 * i : i + others; }
  uint32_t rank(uint32_t i) const { return group.rank(member(i)); }

  Group group;
  uint32_t size = 1, others = 0;
  uint32_t v = 0;  // our number in the core, or our partner's
  bool inside = true, has_partner = false;
  uint32_t partner = 0;  // its rank
};
// Where the parts of core member v begin; of core.size: where the last ones end.
using FirstPart = absl::FunctionRef<uint32_t(uint32_t v)>;

// Ranks outside of the core send everything to a partner, which combines it into `partial`.
void fold_in(Writer& w, const Core& core, Range parts, Area own, Area partial);
// Core members end with the sum of their parts, in `result` if given, else in `partial`.
void halve(Writer& w, const Core& core, FirstPart first, Area own, Area partial,
           const std::optional<Place>& result, bool final);
// Core members have their parts in `area` and end with all of them there.
void double_up(Writer& w, const Core& core, FirstPart first, Area area);
// An all_reduce of power_of_two_up_to(group.size) parts from `base` on, from `own` to the output.
void halving_doubling_all_reduce(Writer& w, const Group& group, uint32_t base, Area own);

// Member i < count has part i. Each such member ends with its sum in `result`.
void halving_reduce_scatter(Writer& w, const Group& group, uint32_t count, Area own, Area partial,
                            Place result);
// Member i < count has part i of `area`; all end with all of them there.
void doubling_all_gather(Writer& w, const Group& group, uint32_t count, Area area);
// The most parts in one message of these two, over `ranks` members.
uint32_t halving_message(uint32_t ranks);
uint32_t doubling_message(uint32_t ranks);

// Each rank sends its part, which is at `own`, to all ranks.
void direct_all_gather(uint32_t n, uint32_t rank, Place own, Writer& w);
uint32_t bruck_message(uint32_t ranks);

// A tree over all ranks, as one rank sees it. Ranges of ranks may wrap around.
struct Ranks {
  uint32_t first = 0, count = 0;
};
// As up to two messages of ranks that do not: f(first, count).
template <typename F>
void for_runs(uint32_t n, const Ranks& ranks, F f) {
  const uint32_t before_end = std::min(ranks.count, n - ranks.first);
  f(ranks.first, before_end);
  if (ranks.count > before_end) f(0, ranks.count - before_end);
}
struct Branch {
  bool root = true;
  uint32_t parent = 0;
  Ranks ranks;  // ours and each rank's below
  struct Child {
    uint32_t rank;
    Ranks ranks;  // of the child and below
  };
  std::vector<Child> children;  // in the order in which their data should come
};
Branch binomial_branch(uint32_t ranks, uint32_t root, uint32_t rank);
Branch binary_branch(uint32_t ranks, uint32_t root, uint32_t rank, uint32_t channel);
Branch star_branch(uint32_t ranks, uint32_t root, uint32_t rank);

// Down the tree, one part from the root's `source` to each rank's output.
void broadcast_down(Writer& w, const Branch& branch, Place source);
// Up the tree, one part to the root's output. With `use_output` the others combine there too (all
// of them have an output), else in scratch.
void reduce_up(Writer& w, const Branch& branch, bool use_output);

// Up the tree, a block from each rank's input to the root's output; down it, from the root's input
// to each rank's output.
void gather_up(Writer& w, uint32_t n, uint32_t rank, const Branch& branch);
void scatter_down(Writer& w, uint32_t n, uint32_t rank, const Branch& branch);
// The one of these four that spec.collective names, if any.
void write_along(Writer& w, const ScheduleSpec& spec, uint32_t rank, const Branch& branch);
// The most blocks in one message of these two along binomial_branch().
uint32_t binomial_message(uint32_t ranks);

// --- the algorithms: one file each ------------------------------------------------------------

// The parts of a schedule that are the same for every rank.
struct Shape {
  uint32_t parts = 1;
  uint32_t max_message_parts = 1;
};

// One algorithm of one collective, for more than one rank.
void write_ring(const ScheduleSpec& spec, uint32_t rank, uint32_t channel, Writer& w);
void write_recursive_doubling(const ScheduleSpec& spec, uint32_t rank, uint32_t channel, Writer& w);
void write_halving_doubling(const ScheduleSpec& spec, uint32_t rank, uint32_t channel, Writer& w);
void write_tree(const ScheduleSpec& spec, uint32_t rank, uint32_t channel, Writer& w);
void write_direct(const ScheduleSpec& spec, uint32_t rank, uint32_t channel, Writer& w);
void write_hierarchical(const ScheduleSpec& spec, uint32_t rank, uint32_t channel, Writer& w);

Shape hierarchical_shape(const ScheduleSpec& spec);

// Reductions that carry contributions instead of sums, and combine them once, in rank order
// (Step::kFold).
void write_ordered(const ScheduleSpec& spec, uint32_t rank, uint32_t channel, Writer& w);
Shape ordered_shape(const ScheduleSpec& spec);

}  // namespace baton::collectives::schedules
