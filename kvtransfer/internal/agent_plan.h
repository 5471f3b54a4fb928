// A transfer between two prepared lists, as layouts: one pair of layouts for all descriptors that
// share a local range, a remote range and a size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "kvtransfer/internal/agent_list.h"
#include "transport/layout.h"

namespace baton::kvtransfer {

// One pair of layouts: one transfer of the worker. The page lists lie in its AgentPlan.
struct AgentPart {
  MemoryRegion local;
  RemoteRegion remote;
  Layout local_layout;
  Layout remote_layout;
};

struct AgentPlan {
  AgentPlan() = default;
  AgentPlan(AgentPlan&&) = default;  // the lists stay where they are
  AgentPlan& operator=(AgentPlan&&) = default;
  AgentPlan(const AgentPlan&) = delete;
  AgentPlan& operator=(const AgentPlan&) = delete;

  std::vector<AgentPart> parts;
  std::vector<std::vector<uint32_t>> pages;
  uint64_t bytes = 0;
  uint64_t descriptors = 0;  // after neighbours on both sides were merged
};

// Pairs local[local_indices[i]] with remote[remote_indices[i]]. Costs a few ns a pair. Where pairs
// have more than kMaxAgentSizes different sizes, each is cut into pieces of powers of two, so that
// the number of parts stays below 64 for each pair of ranges. InvalidArgument: unequal or no
// indices, an index out of range, a pair of unequal sizes.
inline constexpr size_t kMaxAgentSizes = 16;
absl::StatusOr<AgentPlan> plan_agent_transfer(const AgentList& local,
                                              absl::Span<const int64_t> local_indices,
                                              const AgentList& remote,
                                              absl::Span<const int64_t> remote_indices);
// All descriptors of both, in order.
absl::StatusOr<AgentPlan> plan_agent_transfer(const AgentList& local, const AgentList& remote);

// Which descriptors of two prepared lists belong together: all of both in their order, or those
// that indices name.

// Calls visit(local place, remote place) for every pair that has bytes.
template <typename Index, typename Visit>
absl::Status for_each_pair(const AgentList& local, const AgentList& remote, size_t pairs,
                           Index&& index, Visit&& visit) {
  for (size_t i = 0; i < pairs; ++i) {
    const auto [l, r] = index(i);
    if (l >= local.size() || r >= remote.size()) {
      const bool here = l >= local.size();
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s index %u is %d, but that list has %u descriptors", here ? "local" : "remote", i,
          static_cast<int64_t>(here ? l : r), here ? local.size() : remote.size()));
    }
    const AgentList::Place a = local.at(l);
    const AgentList::Place b = remote.at(r);
    if (a.segment->bytes != b.segment->bytes) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "pair %u differs in size: local descriptor %u has %u bytes, remote descriptor %u has %u",
          i, l, a.segment->bytes, r, b.segment->bytes));
    }
    if (a.segment->bytes != 0) visit(a, b);
  }
  return absl::OkStatus();
}

// plan(pairs, index) for `pairs` > 0, where index(i) says which two descriptors pair i is of.
// ResourceExhausted where it finds no memory.
template <typename Plan, typename Make, typename Index>
absl::StatusOr<Plan> plan_pairs(size_t pairs, Index&& index, Make&& plan) {
  if (pairs == 0) return absl::InvalidArgumentError("no descriptors to pair");
  try {
    return plan(pairs, index);
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("no memory for a transfer of %u descriptors", pairs));
  }
}

// The same for pairs that indices name.
template <typename Plan, typename Make>
absl::StatusOr<Plan> plan_pairs(absl::Span<const int64_t> local, absl::Span<const int64_t> remote,
                                Make&& plan) {
  if (local.size() != remote.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%u local indices, but %u remote ones: they are paired one to one",
                        local.size(), remote.size()));
  }
  return plan_pairs<Plan>(
      local.size(),
      [&](size_t i) {
        return std::pair{static_cast<uint64_t>(local[i]), static_cast<uint64_t>(remote[i])};
      },
      plan);
}

// The same for all descriptors of both lists, in order.
template <typename Plan, typename Make>
absl::StatusOr<Plan> plan_pairs(const AgentList& local, const AgentList& remote, Make&& plan) {
  if (local.size() != remote.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%u local descriptors, but %u remote ones: they are paired one to one",
                        local.size(), remote.size()));
  }
  return plan_pairs<Plan>(
      local.size(),
      [](size_t i) {
        return std::pair{i, i};
      },
      plan);
}

}  // namespace baton::kvtransfer
