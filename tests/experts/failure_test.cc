// A rank that is killed or stopped in the midst of rounds is masked, and all else stays exact.
#include "collectives/experts.h"
#include "tests/communicator/processes.h"
#include "tests/experts/mixture.h"

namespace baton {
namespace {

// When rank 1 dies, in round kLast.
enum class Dies { kBeforeDispatch, kInDispatch, kBeforeCombine, kInCombine, kAfterIt };
constexpr int kDies = 5, kLast = 3, kRounds = 8;

// What is wrong, or nothing. Rank 1 is stopped instead where there is a `rank_timeout`.
std::string go_on(Communicator& comm, const Mixture& mixture, Dies dies, uint64_t seed) {
  const Time rank_timeout = mixture.options().rank_timeout;
  const bool stops = rank_timeout != Time::zero();
  auto made = Experts::create(comm, mixture.options());
  if (!made.ok()) return made.status().ToString();
  Experts& experts = **made;
  std::mt19937_64 random(seed * 10 + static_cast<uint64_t>(comm.rank()));
  const auto at = [&](int round, Dies when) {
    if (comm.rank() == 1 && round == kLast && when == dies) raise(stops ? SIGSTOP : SIGKILL);
  };
  const std::vector<int> none, gone = {1};
  for (int round = 0; round < kRounds; ++round) {
    at(round, Dies::kBeforeDispatch);
    Tokens tokens = mixture.tokens(random);
    const auto dispatch = experts.dispatch_async(tokens.rows.data(), tokens.count, tokens.chosen);
    if (!dispatch.ok()) return dispatch.status().ToString();
    at(round, Dies::kInDispatch);
    const Time began = Clock::steady().now();
    if (absl::Status status = experts.wait(*dispatch); !status.ok()) return status.ToString();
    at(round, Dies::kBeforeCombine);
    std::vector<std::byte> out;
    const auto combine = mixture.combine(experts, *dispatch, tokens, out);
    if (!combine.ok()) return combine.status().ToString();
    at(round, Dies::kInCombine);
    if (absl::Status status = experts.wait(*combine); !status.ok()) return status.ToString();
    at(round, Dies::kAfterIt);
    if (stops && Clock::steady().now() - began > 10 * rank_timeout) return "that took too long";
    const std::vector<int> missing = experts.missing(*combine);
    const std::vector<int> masked = experts.masked();
    if (masked == gone && missing == gone && round <= kLast + 1) {
      std::printf("rank %d: round %d took %.1f ms\n", comm.rank(), round,
                  seconds_of(Clock::steady().now() - began) * 1e3);
    }
    if (missing != none && missing != gone) return "missing() has more than rank 1";
    if (round < kLast && missing == gone) return "rank 1 is missing before it has died";
    if (round > kLast + 1 && missing != gone) return "rank 1 is not masked";
    if (missing == gone) mixture.expect(tokens, gone);
    if (out != tokens.wanted) return absl::StrCat("round ", round, " is not exact");
    // Its rows, if they came, are whole: answer() has read them all.
  }
  if (stops) return "";
  // A collective of the communicator fails, as ever.
  return comm.barrier().ok() ? "the communicator does not notice" : "";
}

class ExpertsFailure : public testing::TestWithParam<std::string> {
 public:
  void run_and_lose(int ranks, const ExpertsOptions& options, Dies dies) {
    const Mixture mixture(options, ranks);
    run_processes(ranks, test_options(GetParam()), {1},
                  [&](Communicator& comm) { return go_on(comm, mixture, dies, 7); });
  }
};

// Promise(collectives): A rank that is killed in a round of Experts is masked and named by the
//   others, whose tokens are exact without its experts then and in the rounds that follow | killed
//   before, between and in dispatch and combine
TEST_P(ExpertsFailure, AKilledRankIsMaskedAndTheRestStaysExact) {
  for (int dies = 0; dies < kDies && !HasFailure(); ++dies) {
    for (const int hidden : {9, 3000}) {
      SCOPED_TRACE(testing::Message() << "moment " << dies << ", hidden " << hidden);
      const int ranks = 2 + (dies + hidden) % 3;
      ExpertsOptions options{.experts = 12, .top_k = 3, .hidden = hidden, .max_tokens = 20};
      options.mode = hidden > 9 ? ExpertsMode::kThroughput : ExpertsMode::kAuto;
      run_and_lose(ranks, options, static_cast<Dies>(dies));
    }
  }
}

// Promise(collectives): A rank that is stopped in a round of Experts is masked after rank_timeout,
//   whatever was on its way to it, and the others go on as if it were dead | stopped before and in
//   dispatch and combine
TEST_P(ExpertsFailure, AStoppedRankIsMaskedAfterItsTimeout) {
  // Two ranks: what a rank has sent when it stops is there for one of two others perhaps, who goes
  // on and waits for the other, and masks that too (Limits, docs/experts.md). SimExperts has more.
  for (const Dies when :
       {Dies::kBeforeDispatch, Dies::kInDispatch, Dies::kBeforeCombine, Dies::kInCombine}) {
    ExpertsOptions options{.experts = 12, .top_k = 3, .hidden = 3000, .max_tokens = 20};
    options.rank_timeout = patient(std::chrono::milliseconds(250));
    run_and_lose(2, options, when);
  }
}

INSTANTIATE_TEST_SUITE_P(Providers, ExpertsFailure, testing::Values("shm", "tcp"),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace baton
