// Every schedule, proved: all collectives, algorithms and rank counts up to 64.
#include <iostream>

#include "collectives/schedules/schedule.h"
#include "tests/sanitized.h"
#include "tests/schedules/verify.h"
#include "tests/test.h"

namespace baton::collectives::schedules {
namespace {

// First, second, last and one in the middle.
std::set<uint32_t> roots_of(Collective collective, uint32_t ranks) {
  if (!rooted(collective)) return {0};
  return {0, 1 % ranks, (ranks * 5 / 8) % ranks, ranks - 1};
}

std::set<uint32_t> node_sizes_of(Algorithm algorithm, uint32_t ranks) {
  if (algorithm != Algorithm::kHierarchical) return {1};
  return {1, 2, 3, 4, 7, 8, ranks / 2 + 1, ranks};
}

// A proof takes as long as the cube of the ranks. A sanitizer looks for slips of the writers and of
// the verifier: for those all small counts do, and a power of two with its neighbours.
std::vector<uint32_t> rank_counts() {
  std::vector<uint32_t> counts;
  for (uint32_t ranks = 1; ranks <= 64; ++ranks) {
    if (!kSanitized || ranks <= 17 || (ranks >= 31 && ranks <= 33)) counts.push_back(ranks);
  }
  return counts;
}

void prove_all(const ScheduleSpec& start) {
  ScheduleSpec spec = start;
  for (const uint32_t ranks : rank_counts()) {
    spec.ranks = ranks;
    for (const uint32_t root : roots_of(spec.collective, spec.ranks)) {
      spec.root = root;
      for (const uint32_t node_size : node_sizes_of(spec.algorithm, spec.ranks)) {
        spec.node_size = node_size;
        const auto report = proof::verify(spec);
        ASSERT_TRUE(report.ok()) << report.status();
      }
    }
  }
}

class Matrix : public testing::TestWithParam<Collective> {};

TEST_P(Matrix, EveryAlgorithmIsProved) {
  const std::vector<uint32_t> counts = rank_counts();
  std::cout << "proving " << counts.size() << " rank counts, up to " << counts.back() << "\n";
  // With two channels both are proved; the first is that of one channel.
  for (const bool ordered : {false, true}) {
    if (ordered && !reduces(GetParam())) continue;
    for (const Algorithm algorithm : algorithms_for(GetParam(), ordered)) {
      prove_all(
          {.collective = GetParam(), .algorithm = algorithm, .channels = 2, .ordered = ordered});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Collectives, Matrix,
                         testing::Values(Collective::kAllReduce, Collective::kReduceScatter,
                                         Collective::kAllGather, Collective::kBroadcast,
                                         Collective::kReduce, Collective::kAllToAll,
                                         Collective::kBarrier, Collective::kGather,
                                         Collective::kScatter),
                         [](const auto& name) { return std::string(name_of(name.param)); });

}  // namespace
}  // namespace baton::collectives::schedules
