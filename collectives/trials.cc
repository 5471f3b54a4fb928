// Trials: the first calls of a size try the candidates of the cost model, and then all
// ranks agree on the one that was the fastest.
//
// Predictions rank candidates well and are never quite right: caches, other ranks on the same cores
// and kernels have their say. Which call tries what, and when the ranks agree, depends on the
// number of the call alone, so all ranks always run the same schedule.
#include <algorithm>

#include "collectives/communicator_impl.h"

namespace baton {

using collectives::CallShape;
using collectives::Choice;
using collectives::Override;

namespace {

constexpr size_t kMostWays = 5;
// Candidates that are predicted to take longer than the best by this factor are not tried.
constexpr double kWorthTrying = 5;
// Rounds of trials: small calls are cheap to try, and are disturbed more easily.
constexpr uint32_t kRounds = 4;
constexpr uint32_t kRoundsOfSmall = 21;
constexpr double kSmallCall = 1e-3;  // seconds, as predicted
// Calls between the start of the agreement and its use: it travels while they run.
constexpr uint32_t kAgreeing = 4;
// A way must be so much faster than a better predicted one to be taken instead: trials are few.
constexpr double kClearly = 0.88;
constexpr double kNotThis = 1e9;  // seconds

}  // namespace

std::vector<Communicator::Impl::Way> Communicator::Impl::ways_for(const CallShape& shape,
                                                                  const Override& fixed,
                                                                  absl::Status& status) {
  std::vector<Way> ways;
  const bool tries = options.tune && ranks > 1 && !fixed.has_algorithm && fixed.channels == 0 &&
                     fixed.chunk_bytes == 0 && shape.collective != Collective::kBarrier;
  if (!tries) {
    absl::StatusOr<Choice> choice = model->choose(shape, fixed);
    status = choice.status();
    if (choice.ok()) ways.push_back({.choice = *choice});
    return ways;
  }
  absl::StatusOr<std::vector<Choice>> all = model->candidates(shape, fixed);
  status = all.status();
  if (!all.ok()) return ways;
  for (const Choice& choice : *all) {
    if (choice.seconds > kWorthTrying * all->front().seconds || ways.size() == kMostWays) break;
    const bool known = std::any_of(ways.begin(), ways.end(), [&](const Way& way) {
      return way.choice.spec.algorithm == choice.spec.algorithm;
    });
    if (known) continue;
    ways.push_back({.choice = choice});
    ways.back().trials.reserve(kRoundsOfSmall);
  }
  return ways;
}

// Which of the ways this call takes.
absl::StatusOr<uint32_t> Communicator::Impl::way_for(CachedChoice& cached) {
  if (cached.settled) return cached.best;
  const auto ways = static_cast<uint32_t>(cached.ways.size());
  const bool small = cached.ways.front().choice.seconds < kSmallCall;
  const uint32_t rounds = small ? kRoundsOfSmall : kRounds;
  const uint32_t trials = ways * rounds;
  const uint32_t call = cached.calls++;
  // One after the other: each is to find the caches as it would leave them itself.
  if (call < trials) return call / rounds;
  if (call == trials) {
    cached.verdict.clear();
    for (Way& way : cached.ways) {
      std::sort(way.trials.begin(), way.trials.end());
      cached.verdict.push_back(way.trials.empty() ? kNotThis : way.trials[way.trials.size() / 2]);
    }
    // With more ranks than cores, a short call in shared memory is over when the kernel lets it be:
    // what it took says nothing, and this rank votes for the prediction.
    if (small && crowded && !any_transfer) {
      std::fill(cached.verdict.begin() + 1, cached.verdict.end(), kNotThis);
    }
    CallOptions plain;
    plain.algorithm = Algorithm::kRecursiveDoubling;
    plain.ordered = false;
    cached.combining = Work{UINT64_MAX};  // the call below may not take this one's place
    absl::StatusOr<Work> work =
        begin_locked({Collective::kAllReduce, cached.verdict.data(), cached.verdict.data(),
                      cached.verdict.size(), DataType::kF64, ReduceOp::kMax, 0, plain});
    if (!work.ok()) return work.status();
    last_choice = &cached;
    cached.combining = *work;
  }
  if (call < trials + kAgreeing) return cached.best;
  while (true) {
    std::optional<absl::Status> ended = reap(cached.combining);
    if (ended.has_value()) {
      cached.combining = Work{};
      if (!ended->ok()) return *ended;
      break;
    }
    if (!broken.ok()) return broken;
    if (!advance()) tick();
  }
  for (uint32_t way = 0; way < ways; ++way) {
    if (cached.verdict[way] < kClearly * cached.verdict[cached.best]) cached.best = way;
  }
  cached.settled = true;
  return cached.best;
}

}  // namespace baton
