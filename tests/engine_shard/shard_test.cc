// A model on several ranks serves what one process serves, token for token; and nobody hangs when a
// rank is different, late or gone.
#include "tests/engine_shard/degrees.h"
#include "tests/fails_with.h"
#include "tests/manual_clock.h"
#include "tests/test.h"

namespace baton::engine::shard {
namespace {

using serve::Engine;
using serve::EngineOptions;
using serve::Outcome;
using serve::Request;
using ::testing::HasSubstr;

constexpr size_t kRequests = 40;

const Model& whole_model() {
  static const auto* model = new Model(*Model::create(ranks_checkpoint(), Arithmetic::kFp32));
  return *model;
}

KnownAnswers& answers() {
  static auto* known = new KnownAnswers(kRequests);
  return *known;
}
const std::vector<Request>& requests() { return answers().requests(); }

// A cache that is too small for all, so that some are preempted, and prompts in many chunks.
constexpr StepLimits kTight{.blocks = 18, .token_budget = 24, .max_sequences = 8};

EngineOptions engine_options(const StepLimits& limits, Leader* leader) {
  return {.blocks = limits.blocks,
          .token_budget = limits.token_budget,
          .max_sequences = limits.max_sequences,
          .leader = leader};
}

struct Case {
  const char* name;
  int ranks;
  Arithmetic arithmetic;
  const char* provider;
  const Checkpoint& (*checkpoint)() = ranks_checkpoint;
};

class ShardEngine : public testing::TestWithParam<Case> {};

// Promise(engine): 2 to 4 tensor-parallel ranks give one process's bits | products are split by
//   columns, never along a sum
TEST_P(ShardEngine, SaysWhatOneProcessSays) {
  const Case& given = GetParam();
  const Checkpoint& checkpoint = given.checkpoint();
  Server server({.role = "all",
                 .ranks = given.ranks,
                 .limits = kTight,
                 .arithmetic = given.arithmetic,
                 .provider = given.provider,
                 .checkpoint = &checkpoint});
  expect_same(answers().of(given.arithmetic, checkpoint), run_all(server, requests()));
  EXPECT_GT(server.engine().stats().preemptions, 0u) << "the cache is too large for this test";
  EXPECT_GT(server.engine().stats().cached_tokens, 0u);
  expect_clean(server, kTight.blocks);
}

INSTANTIATE_TEST_SUITE_P(Ranks, ShardEngine,
                         testing::Values(Case{"TwoOverShm", 2, Arithmetic::kFp32, "shm"},
                                         Case{"TwoOverTcp", 2, Arithmetic::kFp32, "tcp"},
                                         Case{"TwoBf16", 2, Arithmetic::kBf16, "shm"},
                                         Case{"FourOverShm", 4, Arithmetic::kFp32, "shm"},
                                         Case{"TwoWithExperts", 2, Arithmetic::kFp32, "shm",
                                              ranks_expert_checkpoint},
                                         Case{"TwoWithExpertsBf16", 2, Arithmetic::kBf16, "shm",
                                              ranks_expert_checkpoint}),
                         [](const auto& test) { return test.param.name; });

// The log-probabilities of a prompt come out of every token's logits.
TEST(Shard, RatesPromptsAsOneProcessDoes) {
  Request request = requests()[1];
  request.sampling.prompt_logprobs = true;
  request.sampling.logprobs = 3;
  request.sampling.max_tokens = 2;
  std::vector<float> rated[2];
  const auto ask = [&](Engine& engine, std::vector<float>* out) {
    Request copy = request;
    copy.on_event = [&](const serve::OutputEvent& event) {
      EXPECT_TRUE(event.status.ok()) << event.status;
      if (event.prompt == nullptr) return;
      for (const auto& choice : *event.prompt) out->push_back(choice.logprob);
    };
    ASSERT_TRUE(engine.add_request(std::move(copy)).ok());
    finish_all(engine);
  };
  ask(**Engine::create(whole_model(), serve::test_tokenizer(), engine_options(kTight, nullptr)),
      &rated[0]);
  Server server({.role = "all", .ranks = 2, .limits = kTight});
  ask(server.engine(), &rated[1]);
  EXPECT_EQ(rated[0].size(), request.tokens.size());
  EXPECT_EQ(rated[0], rated[1]);
}

// A step of more words than fit into one broadcast.
TEST(Shard, LongStepsAreToldWhole) {
  const StepLimits limits{.blocks = 64, .token_budget = 500, .max_sequences = 4};
  Request request{.id = 1, .tokens = std::vector<int32_t>(490)};
  for (size_t i = 0; i < request.tokens.size(); ++i) request.tokens[i] = int32_t(i * 7 % 250);
  request.sampling.max_tokens = 10;
  request.sampling.ignore_eos = true;
  const auto alone = serve::run_one_at_a_time({request}, whole_model());
  Server server({.role = "all", .ranks = 2, .limits = limits});
  std::map<uint64_t, Outcome> outcomes;
  ASSERT_TRUE(submit(server.engine(), request, &outcomes[1]).ok());
  server.finish();
  expect_same(alone, outcomes);
}

// --- what must not be served ---------------------------------------------------------------------

// How rank 0 and rank 1 start where rank 1 has these instead of rank 0's.
void expect_disagreement(const Checkpoint& checkpoint, Arithmetic arithmetic,
                         const StepLimits& limits, std::string_view role, const std::string& what) {
  TwoRanks ranks({.limits = limits, .role = role}, nullptr, arithmetic, checkpoint);
  const auto leader = Leader::create(*ranks.group, ranks.model, kTight);
  EXPECT_THAT(leader.status(), fails_with(Code::kFailedPrecondition, {what}));
  EXPECT_EQ(ranks.followers.join()[1], leader.status());
}

// Promise(engine): Ranks with different models or limits do not start, and say what differs |
//   settings are compared before the first step
TEST(Shard, RanksThatDifferAreToldInWhat) {
  const Checkpoint& same = ranks_checkpoint();
  const Arithmetic fp32 = Arithmetic::kFp32;
  expect_disagreement(make_test_checkpoint(ranks_config(), 4), fp32, kTight, "all", "the model");
  expect_disagreement(same, Arithmetic::kBf16, kTight, "all", "+bf16\" at rank 1");
  StepLimits other = kTight;
  other.blocks = 19;
  expect_disagreement(same, fp32, other, "all",
                      "--blocks is \"18\" at rank 0 and \"19\" at rank 1");
  other = kTight;
  other.token_budget = 32;
  expect_disagreement(same, fp32, other, "all", "--token-budget");
  other = kTight;
  other.max_sequences = 4;
  expect_disagreement(same, fp32, other, "all", "--max-seqs");
  expect_disagreement(same, fp32, kTight, "decode", "--role is \"all\" at rank 0");
}

TEST(Shard, EnginesAndModelsMustFit) {
  const auto engine = Engine::create(*Model::create(ranks_checkpoint(), Arithmetic::kFp32, {0, 2}),
                                     serve::test_tokenizer(), engine_options(kTight, nullptr));
  EXPECT_TRUE(absl::IsInvalidArgument(engine.status())) << engine.status();

  TwoRanks ranks({.limits = kTight});
  const Model other = *Model::create(ranks_checkpoint(), Arithmetic::kFp32, {1, 2});
  EXPECT_TRUE(absl::IsInvalidArgument(Leader::create(*ranks.group, other, kTight).status()));
  auto leader = *Leader::create(*ranks.group, ranks.model, kTight);
  EXPECT_TRUE(absl::IsInvalidArgument(
      Engine::create(whole_model(), serve::test_tokenizer(), engine_options(kTight, leader.get()))
          .status()));
  EngineOptions tiers = engine_options(kTight, leader.get());
  tiers.tiers.host_bytes = 1 << 20;
  EXPECT_THAT(Engine::create(ranks.model, serve::test_tokenizer(), tiers).status(),
              fails_with(Code::kInvalidArgument, {"--kv-host-mib"}));
}

// --- bad days ------------------------------------------------------------------------------------

// Rank 1 does `body` instead of following. All of rank 0's requests end with an error that has
// `what` in it, and so does what comes later; the failure is told once.
void expect_requests_fail(const Followers::Body& body, const std::string& what,
                          Time timeout = kNever, const Clock* clock = nullptr) {
  const RendezvousPlace place(2);
  Followers followers(place, Arithmetic::kFp32, {.limits = kTight}, ranks_checkpoint(), body);
  CommunicatorOptions options = place.options(0);
  options.timeout = timeout;
  options.worker.clock = clock;
  auto group = *Group::meet(options);
  const Model model = *Model::create(ranks_checkpoint(), Arithmetic::kFp32, group->shard());
  auto leader = must(Leader::create(*group, model, kTight));
  std::vector<absl::Status> told;
  leader->on_failure([&](const absl::Status& status) { told.push_back(status); });
  auto engine =
      *Engine::create(model, serve::test_tokenizer(), engine_options(kTight, leader.get()));
  std::map<uint64_t, Outcome> outcomes;
  for (size_t i = 0; i < 10; ++i) {
    ASSERT_TRUE(submit(*engine, requests()[i], &outcomes[i]).ok());
  }
  finish_all(*engine);
  ASSERT_TRUE(submit(*engine, requests()[10], &outcomes[10]).ok());
  finish_all(*engine);
  for (const auto& [id, outcome] : outcomes) {
    EXPECT_EQ(outcome.reason, serve::FinishReason::kError) << id;
    EXPECT_NE(outcome.status.message().find(what), std::string::npos) << outcome.status;
  }
  EXPECT_FALSE(leader->status().ok());
  EXPECT_EQ(told.size(), 1u);
  EXPECT_TRUE(engine->check_integrity().ok()) << engine->check_integrity();
  EXPECT_EQ(engine->stats().free_blocks, kTight.blocks);
}

absl::Status get_ready(Group& group, const Model& model) {
  return group.agree(settings_of(model, kTight, "all")).status();
}

TEST(Shard, ARankThatLeavesFailsTheRequests) { expect_requests_fail(get_ready, "rank 1"); }

TEST(Shard, ARankThatLeavesWithinAStepFailsTheRequests) {
  expect_requests_fail(
      [](Group& group, const Model& model) {
        absl::Status status = get_ready(group, model);
        return status.ok() ? group.receive().status() : status;
      },
      "rank 1");
}

TEST(Shard, ARankThatFailsSaysWhy) {
  expect_requests_fail(
      [](Group& group, const Model& model) {
        absl::Status status = get_ready(group, model);
        if (status.ok()) status = group.receive().status();
        group.abort(absl::DataLossError("its disk is on fire"));
        return status;
      },
      "its disk is on fire");
}

// It is there and does not take part: after the group's timeout it is given up.
TEST(Shard, ARankThatIsLateFailsTheRequests) {
  ManualClock clock;  // rank 0's
  expect_requests_fail(
      [&](Group& group, const Model& model) {
        absl::Status status = get_ready(group, model);
        until([&] { return !group.look().ok(); },  // until rank 0 has given up
              [&, others = LetOthersRun()]() mutable {
                clock.advance(std::chrono::milliseconds(1));
                others();
              });
        return status;
      },
      "rank 1", std::chrono::milliseconds(300), &clock);
}

TEST(Shard, FollowersEndWithAnErrorWhenRank0IsGone) {
  ModelConfig config = ranks_config();
  config.num_heads = config.num_kv_heads = 3;
  const Checkpoint checkpoint = make_test_checkpoint(config, 1);
  const RendezvousPlace place(3);
  Followers followers(place, Arithmetic::kFp32, {.limits = kTight}, checkpoint);
  {
    auto group = *Group::meet(place.options(0));
    const Model model = *Model::create(checkpoint, Arithmetic::kFp32, group->shard());
    ASSERT_TRUE(group->agree(settings_of(model, kTight, "all")).ok());
  }
  const std::vector<absl::Status>& ended = followers.join();
  for (size_t rank = 1; rank < ended.size(); ++rank) {
    EXPECT_TRUE(absl::IsUnavailable(ended[rank])) << ended[rank];
    EXPECT_NE(ended[rank].message().find("rank 0"), std::string::npos) << ended[rank];
  }
}

// A step that fails at rank 0 alone would leave the others in it: they are told why.
TEST(Shard, AStepThatFailsAtRank0AloneEndsTheFollowers) {
  TwoRanks ranks({.limits = kTight});
  auto leader = *Leader::create(*ranks.group, ranks.model, kTight);
  leader->end_step(absl::DataLossError("its memory has lost a bit"));
  EXPECT_THAT(std::string(ranks.followers.join()[1].message()), HasSubstr("has lost a bit"));
}

// And one that a follower cannot do is told to rank 0.
TEST(Shard, ACommandThatAFollowerCannotDoFailsTheGroupAndSaysWhy) {
  TwoRanks ranks({.limits = kTight});
  ASSERT_TRUE(get_ready(*ranks.group, ranks.model).ok());
  ASSERT_TRUE(ranks.group->tell("nonsense").ok());
  absl::Status failed;
  until([&] { return !(failed = ranks.group->look()).ok(); });
  EXPECT_THAT(std::string(failed.message()), HasSubstr("a command of rank 0 (8 bytes) is wrong"));
  EXPECT_FALSE(ranks.followers.join()[1].ok());
}

// With nothing to do, rank 0 finds out too.
TEST(Shard, AnIdleLeaderNoticesThatARankHasFailed) {
  std::atomic<bool> idle = false;  // before, its failure would be that of getting ready
  TwoRanks ranks({.limits = kTight}, [&idle](Group& group, const Model& model) {
    absl::Status status = get_ready(group, model);
    until([&] { return idle || !group.look().ok(); });
    group.abort(absl::DataLossError("rank 1 has lost its memory"));
    return status;
  });
  auto leader = *Leader::create(*ranks.group, ranks.model, kTight);
  absl::Status told;
  leader->on_failure([&](const absl::Status& status) { told = status; });
  auto engine =
      *Engine::create(ranks.model, serve::test_tokenizer(), engine_options(kTight, leader.get()));
  idle = true;
  until([&] { return !told.ok(); }, [&] { engine->wait(std::chrono::milliseconds(1), -1); });
  EXPECT_THAT(std::string(told.message()), HasSubstr("has lost its memory"));
}

}  // namespace
}  // namespace baton::engine::shard
