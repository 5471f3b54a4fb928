// A round of mixture-of-experts traffic, of which every rank can work out every rank's part: for
// `baton moe_perf` and for the programs that it is compared with. Nothing of Baton is included.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

namespace baton::bench {

struct MoeJob {
  int tokens = 1024;  // of each rank
  int hidden = 7168;
  int top_k = 8;
  int experts = 256;
  int ranks = 2;
};

// [tokens][top_k]: different experts for each token, of equal odds, as DeepEP's tests have it.
inline std::vector<int32_t> choices_of(const MoeJob& job, int rank) {
  std::mt19937_64 random(static_cast<uint64_t>(rank) + 1);
  std::vector<int32_t> all(static_cast<size_t>(job.experts)), chosen;
  std::iota(all.begin(), all.end(), 0);
  for (int token = 0; token < job.tokens; ++token) {
    for (int i = 0; i < job.top_k; ++i) {
      const auto left = static_cast<uint64_t>(job.experts - i);
      std::swap(all[static_cast<size_t>(i)],
                all[static_cast<size_t>(i) + static_cast<size_t>(random() % left)]);
      chosen.push_back(all[static_cast<size_t>(i)]);
    }
  }
  return chosen;
}

// Rows that go from a rank to each other one, and pairs of a token and an expert.
struct MoeCounts {
  std::vector<int64_t> rows, pairs;  // by target
};
inline MoeCounts counts_of(const MoeJob& job, int rank) {
  MoeCounts counts{std::vector<int64_t>(static_cast<size_t>(job.ranks)),
                   std::vector<int64_t>(static_cast<size_t>(job.ranks))};
  const std::vector<int32_t> chosen = choices_of(job, rank);
  const auto local = static_cast<int32_t>(job.experts / job.ranks);
  std::vector<int> last(static_cast<size_t>(job.ranks), -1);
  for (size_t i = 0; i < chosen.size(); ++i) {
    const auto target = static_cast<size_t>(chosen[i] / local);
    const int token = static_cast<int>(i / static_cast<size_t>(job.top_k));
    ++counts.pairs[target];
    if (last[target] != token) ++counts.rows[target];
    last[target] = token;
  }
  return counts;
}

}  // namespace baton::bench
