// A transfer between two prepared lists, as layouts: one pair of layouts for all descriptors that
// share a local range, a remote range and a size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
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

}  // namespace baton::kvtransfer
