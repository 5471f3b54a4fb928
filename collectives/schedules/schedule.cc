// Lists the schedules that exist, with their shapes, and calls the algorithm that writes one.
#include "collectives/schedules/schedule.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "collectives/schedules/writers.h"

namespace baton::collectives::schedules {
namespace {

constexpr uint32_t kMostRanks = 1u << 20;
constexpr uint32_t kMostChannels = 64;

bool folds(const ScheduleSpec& spec) { return spec.ordered && reduces(spec.collective); }

Shape shape_of(const ScheduleSpec& spec) {
  const uint32_t n = spec.ranks;
  if (n == 1 || spec.collective == Collective::kBarrier) return {1, 1};
  if (folds(spec)) return ordered_shape(spec);
  if (spec.algorithm == Algorithm::kHierarchical) return hierarchical_shape(spec);
  const bool halving = spec.algorithm == Algorithm::kHalvingDoubling;
  const uint32_t core = power_of_two_up_to(n);
  switch (spec.collective) {
    case Collective::kAllReduce:
      if (halving) return {core, core == n ? n / 2 : core};
      return {spec.algorithm == Algorithm::kRing || spec.algorithm == Algorithm::kDirect ? n : 1,
              1};
    case Collective::kReduceScatter:
      return {n, halving ? halving_message(n) : 1};
    case Collective::kAllGather:
      if (spec.algorithm == Algorithm::kRecursiveDoubling) return {n, bruck_message(n)};
      return {n, halving ? doubling_message(n) : 1};
    case Collective::kBroadcast:
      if (halving) return {core, core == n ? n / 2 : core};
      return {1, 1};
    case Collective::kAllToAll:
      return {n, 1};
    case Collective::kGather:
    case Collective::kScatter:
      return {n, spec.algorithm == Algorithm::kRecursiveDoubling ? binomial_message(n) : 1};
    default:
      return {1, 1};
  }
}

}  // namespace

std::string ScheduleSpec::to_string() const {
  std::string text = absl::StrFormat("%s %s n=%d", std::string(name_of(collective)),
                                     std::string(name_of(algorithm)), ranks);
  if (rooted(collective)) absl::StrAppend(&text, " root=", root);
  if (algorithm == Algorithm::kHierarchical) absl::StrAppend(&text, " node_size=", node_size);
  absl::StrAppend(&text, " channels=", channels, ordered ? " ordered" : "");
  return text;
}

std::vector<Algorithm> algorithms_for(Collective collective, bool ordered) {
  using A = Algorithm;
  if (ordered && collective == Collective::kReduceScatter) return {A::kDirect};
  if (ordered && reduces(collective)) return {A::kDirect, A::kRecursiveDoubling};
  switch (collective) {
    case Collective::kAllReduce:
      return {A::kRing,   A::kRecursiveDoubling, A::kHalvingDoubling, A::kTree,
              A::kDirect, A::kHierarchical};
    case Collective::kReduceScatter:
      return {A::kRing, A::kHalvingDoubling, A::kDirect, A::kHierarchical};
    case Collective::kAllGather:
      return {A::kRing, A::kRecursiveDoubling, A::kHalvingDoubling, A::kDirect, A::kHierarchical};
    case Collective::kBroadcast:
      return {A::kRing,   A::kRecursiveDoubling, A::kHalvingDoubling, A::kTree,
              A::kDirect, A::kHierarchical};
    case Collective::kReduce:
      return {A::kRing, A::kRecursiveDoubling, A::kTree, A::kDirect, A::kHierarchical};
    case Collective::kBarrier:
      return {A::kRecursiveDoubling, A::kDirect};
    case Collective::kGather:
    case Collective::kScatter:
      return {A::kDirect, A::kRecursiveDoubling};
    case Collective::kAllToAll:
      return {A::kDirect};
    case Collective::kSendReceive:
      break;
  }
  return {};
}

absl::Status validate(const ScheduleSpec& spec) {
  if (static_cast<int>(spec.collective) >= kCollectives ||
      static_cast<int>(spec.algorithm) >= kAlgorithms) {
    return absl::InvalidArgumentError(
        absl::StrFormat("there is no collective %d or no algorithm %d",
                        static_cast<int>(spec.collective), static_cast<int>(spec.algorithm)));
  }
  const auto refuse = [&spec](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrFormat("no schedule %s: %s", spec.to_string(), why));
  };
  if (spec.ranks == 0 || spec.ranks > kMostRanks) {
    return refuse(absl::StrFormat("use 1 to %d ranks", kMostRanks));
  }
  if (spec.channels == 0 || spec.channels > kMostChannels) {
    return refuse(absl::StrFormat("use 1 to %d channels", kMostChannels));
  }
  if (spec.root >= spec.ranks) return refuse(absl::StrFormat("there is no rank %d", spec.root));
  if (spec.node_size == 0) return refuse("a node has at least one rank");
  const std::vector<Algorithm> known = algorithms_for(spec.collective, spec.ordered);
  if (std::find(known.begin(), known.end(), spec.algorithm) == known.end()) {
    return refuse("use " + absl::StrJoin(known, " or ", [](std::string* out, Algorithm a) {
                    absl::StrAppend(out, std::string(name_of(a)));
                  }));
  }
  return absl::OkStatus();
}

bool takes_uneven_blocks(const ScheduleSpec& spec) {
  const bool direct = spec.algorithm == Algorithm::kDirect;
  if (spec.collective == Collective::kReduceScatter) return direct;
  return spec.collective == Collective::kAllGather &&
         (direct || spec.algorithm == Algorithm::kRing);
}

uint32_t parts_of(const ScheduleSpec& spec) { return shape_of(spec).parts; }

uint32_t max_message_parts(const ScheduleSpec& spec) { return shape_of(spec).max_message_parts; }

absl::StatusOr<Program> write_program(const ScheduleSpec& spec, uint32_t rank, uint32_t channel) {
  if (absl::Status valid = validate(spec); !valid.ok()) return valid;
  if (rank >= spec.ranks || channel >= spec.channels) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s has no rank %d or no channel %d", spec.to_string(), rank, channel));
  }
  Writer w;
  if (spec.ranks == 1) {
    if (spec.collective != Collective::kBarrier) w.copy(output(0), input(0));
  } else if (folds(spec)) {
    write_ordered(spec, rank, channel, w);
  } else {
    switch (spec.algorithm) {
      case Algorithm::kRing:
        write_ring(spec, rank, channel, w);
        break;
      case Algorithm::kRecursiveDoubling:
        write_recursive_doubling(spec, rank, channel, w);
        break;
      case Algorithm::kHalvingDoubling:
        write_halving_doubling(spec, rank, channel, w);
        break;
      case Algorithm::kTree:
        write_tree(spec, rank, channel, w);
        break;
      case Algorithm::kDirect:
        write_direct(spec, rank, channel, w);
        break;
      case Algorithm::kHierarchical:
        write_hierarchical(spec, rank, channel, w);
        break;
    }
  }
  Program program = w.take();
  program.max_message_parts = max_message_parts(spec);
  return program;
}

}  // namespace baton::collectives::schedules
