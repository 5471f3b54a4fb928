// Prefill and decode servers of any tensor-parallel degrees say what one process says; and what
// goes wrong at any rank is computed again, without a block lost.
#include "tests/engine_shard/degrees.h"
#include "engine/shard/kv_address.h"
#include "tests/fails_with.h"
#include "tests/test.h"

namespace baton::engine::shard::degrees {
namespace {

using serve::Outcome;
using serve::Request;
using ::testing::HasSubstr;

constexpr size_t kRequests = 40;
// Too small for all: some are preempted, and prompts are computed in many chunks.
constexpr StepLimits kTight{.blocks = 20, .token_budget = 24, .max_sequences = 8};

KnownAnswers& answers() {
  static auto* known = new KnownAnswers(kRequests);
  return *known;
}
const std::vector<Request>& requests() { return answers().requests(); }

std::map<uint64_t, Outcome> run_all(Server& decode, const std::string& address) {
  return shard::run_all(decode, requests(), address);
}

struct Case {
  const char* name;
  int prefill;
  int decode;
  Arithmetic arithmetic;
  const char* provider;
  const Checkpoint& (*checkpoint)() = ranks_checkpoint;
  bool push = false;
};

class DegreePairs : public testing::TestWithParam<Case> {};

// Promise(kv): Prefill and decode of any two degrees, one dividing the other, give one process's
//   tokens | a plan says which heads go where
TEST_P(DegreePairs, SayWhatOneProcessSays) {
  const Case& given = GetParam();
  Server prefill({.role = "prefill",
                  .ranks = given.prefill,
                  .limits = kTight,
                  .arithmetic = given.arithmetic,
                  .provider = given.provider,
                  .checkpoint = &given.checkpoint()});
  Server decode({.role = "decode",
                 .ranks = given.decode,
                 .limits = kTight,
                 .arithmetic = given.arithmetic,
                 .provider = given.provider,
                 .push = given.push,
                 .checkpoint = &given.checkpoint()});
  prefill.start();
  expect_same(answers().of(given.arithmetic, given.checkpoint()),
              run_all(decode, prefill.address()));
  const serve::EngineStats stats = decode.engine().stats();
  EXPECT_EQ(stats.loads_failed, 0u);
  EXPECT_GT(stats.loaded_tokens, 1000u);
  EXPECT_GT(stats.cached_tokens, 0u);
  EXPECT_GT(stats.preemptions, 0u) << "the cache is too large for this test";
  // All ranks are counted: 512 bytes a token, of all heads and layers.
  EXPECT_EQ(stats.kv_bytes_loaded, stats.loaded_tokens * 512);
  expect_clean(decode, kTight.blocks);
  prefill.stop();
  EXPECT_GT(prefill.engine().stats().jobs_finished, 0u);
  EXPECT_GE(prefill.engine().stats().kv_bytes_sent, stats.kv_bytes_loaded);
  expect_clean(prefill, kTight.blocks);
}

INSTANTIATE_TEST_SUITE_P(
    Ranks, DegreePairs,
    testing::Values(
        Case{"TwoToOne", 2, 1, Arithmetic::kFp32, "shm"},
        Case{"OneToTwo", 1, 2, Arithmetic::kFp32, "shm"},
        Case{"TwoToTwo", 2, 2, Arithmetic::kFp32, "shm"},
        Case{"TwoToOneOverTcp", 2, 1, Arithmetic::kFp32, "tcp"},
        Case{"OneToTwoOverTcp", 1, 2, Arithmetic::kFp32, "tcp"},
        Case{"TwoToTwoInBf16", 2, 2, Arithmetic::kBf16, "shm"},
        Case{"OneToTwoInBf16", 1, 2, Arithmetic::kBf16, "shm"},
        Case{"FourToTwo", 4, 2, Arithmetic::kFp32, "shm"},
        Case{"TwoToFour", 2, 4, Arithmetic::kFp32, "shm"},
        Case{"OneToTwoWithExperts", 1, 2, Arithmetic::kFp32, "shm", ranks_expert_checkpoint},
        Case{"TwoToOnePushed", 2, 1, Arithmetic::kFp32, "shm", ranks_checkpoint, true},
        Case{"OneToTwoPushedOverTcp", 1, 2, Arithmetic::kFp32, "tcp", ranks_checkpoint, true},
        Case{"TwoToTwoPushed", 2, 2, Arithmetic::kFp32, "shm", ranks_checkpoint, true},
        Case{"TwoToOneWithExperts", 2, 1, Arithmetic::kFp32, "shm", ranks_expert_checkpoint}),
    [](const auto& test) { return test.param.name; });

// Below the caches of both, tiers: what they have is not asked for, and not computed for others.
TEST(Degrees, TiersBesideHandOffsChangeNothing) {
  for (const auto& [prefill_ranks, decode_ranks] : {std::pair{2, 1}, {1, 2}, {2, 2}}) {
    const serve::KvTierOptions tiers{.host_bytes = 64 << 20};
    Server prefill({.role = "prefill", .ranks = prefill_ranks, .limits = kTight, .tiers = tiers});
    Server decode({.role = "decode", .ranks = decode_ranks, .limits = kTight, .tiers = tiers});
    prefill.start();
    for (int round = 0; round < 2; ++round) {
      expect_same(answers().of(), run_all(decode, prefill.address()));
    }
    const serve::EngineStats stats = decode.engine().stats();
    EXPECT_EQ(stats.loads_failed, 0u);
    EXPECT_GT(stats.loaded_tokens, 500u);
    EXPECT_GT(stats.tier_tokens, 500u);
    expect_clean(decode, kTight.blocks);
    prefill.stop();
    EXPECT_GT(prefill.engine().stats().tiers.loaded, 0u);
    expect_clean(prefill, kTight.blocks);
  }
}

// --- bad days ------------------------------------------------------------------------------------

// Loads fail at one rank of decode, and are there at the other.
// Promise(kv): A failed load at any rank is recomputed; no block is lost or reused too early | a
//   load is complete when it is at every rank
TEST(Degrees, ALoadThatFailsAtAnyRankIsComputedAgain) {
  for (const auto& [prefill_ranks, stranger] : {std::pair{1, 1}, {2, 1}, {2, 0}}) {
    Server prefill({.role = "prefill", .ranks = prefill_ranks, .limits = kTight});
    Server decode({.role = "decode", .ranks = 2, .limits = kTight, .stranger = stranger});
    prefill.start();
    const std::map<uint64_t, Outcome> outcomes = run_all(decode, prefill.address());
    expect_same(answers().of(), outcomes);
    EXPECT_GT(decode.engine().stats().loads_failed, 2u);
    for (const auto& [id, outcome] : outcomes) {
      const std::string why(outcome.metrics.load_error.message());
      if (why.empty()) continue;
      EXPECT_THAT(why, HasSubstr("another model"));
      EXPECT_EQ(why.starts_with("rank 1: "), stranger == 1) << why;
    }
    expect_clean(decode, kTight.blocks);
    expect_clean(prefill, kTight.blocks);
  }
}

// Requests that clients give up, at any moment, leave nothing behind at any rank.
TEST(Degrees, AbortedRequestsLeaveNothingBehind) {
  Server prefill({.role = "prefill", .ranks = 2, .limits = kTight});
  Server decode({.role = "decode", .ranks = 2, .limits = kTight});
  prefill.start();
  run_and_abort(decode, answers(), prefill.address());
  expect_clean(decode, kTight.blocks);
  expect_clean(prefill, kTight.blocks);
}

// A rank of prefill goes, in the middle: its server is of no use any more, and decode computes.
TEST(Degrees, APrefillRankThatLeavesIsSurvived) {
  Server prefill(
      {.role = "prefill",
       .ranks = 2,
       .limits = kTight,
       .body = [](Group& group, const Model& model, handoff::HandOff& session) {
         absl::StatusOr<KvMemory> memory = KvMemory::make(model, kTight.blocks);
         absl::Status status = memory.status();
         if (status.ok()) status = session.use_cache(memory->cache());
         if (status.ok()) {
           status = group.agree(settings_of(model, kTight, "prefill"), session.agent()->address())
                        .status();
         }
         // Takes requests like any other, and leaves when the first step comes.
         for (bool stepped = false; status.ok() && !stepped;) {
           const auto message = group.receive();
           status = message.status();
           if (!status.ok()) break;
           const Command command = *base::read_fields<Command>(*message, "a command");
           stepped = command.kind == CommandKind::kStep;
           if (stepped) continue;
           status = group.exchange(std::string(Report::kBytes, '\0')).status();
         }
         session.close();
         return status;
       }});
  Server decode({.role = "decode", .ranks = 1, .limits = kTight});
  prefill.start();
  const std::map<uint64_t, Outcome> outcomes = run_all(decode, prefill.address());
  expect_same(answers().of(), outcomes);
  EXPECT_GT(decode.engine().stats().loads_failed, 0u);
  EXPECT_EQ(decode.engine().stats().loaded_tokens, 0u);
  expect_clean(decode, kTight.blocks);
  prefill.stop();
  EXPECT_FALSE(prefill.leader()->status().ok());
  EXPECT_EQ(prefill.engine().stats().free_blocks, kTight.blocks);
}

// --- what must not be loaded ---------------------------------------------------------------------

// A prompt whose KV cannot be had from there: it is computed, and the answer says why. Where both
// ends find a reason, either may be first.
void expect_not_loaded(Server& decode, const std::string& address, const std::string& what,
                       const std::string& prefills = "") {
  static int32_t number = 0;
  Request request = requests()[0];
  request.tokens.assign(40, ++number);  // that no cache knows
  request.sampling.temperature = 0;
  const Model model = *Model::create(ranks_checkpoint());
  const std::vector<int32_t> want = serve::oracle_tokens(request, model);
  request.prefill_address = address;
  Outcome outcome;
  ASSERT_TRUE(submit(decode.engine(), request, &outcome).ok());
  decode.finish();
  EXPECT_EQ(outcome.tokens, want);
  EXPECT_THAT(std::string(outcome.metrics.load_error.message()),
              testing::AnyOf(HasSubstr(what), HasSubstr(prefills.empty() ? what : prefills)));
  EXPECT_EQ(decode.engine().stats().loaded_tokens, 0u);
}

TEST(Degrees, WrongAddressesAreRefusedByName) {
  Server prefill({.role = "prefill", .ranks = 2, .limits = kTight});
  Server one({.role = "decode", .limits = kTight});
  Server two({.role = "decode", .ranks = 2, .limits = kTight});
  prefill.start();
  const std::vector<std::string> ranks = *split_kv_address(prefill.address());
  ASSERT_EQ(ranks.size(), 2u);
  expect_not_loaded(one, ranks[0], "prefill has 2 ranks, but was expected to have 1");
  expect_not_loaded(one, "baton-ranks1:" + ranks[0] + ",", "/v1/baton/address");
  expect_not_loaded(one, "baton-ranks2:" + ranks[0], "the same release");
  expect_not_loaded(two, ranks[0], "prefill has 2 ranks, but was expected to have 1",
                    "rank 0 of 2 has no KV heads of rank 1 of 2");
  expect_not_loaded(two, join_kv_addresses({ranks[0], ranks[1], ranks[1]}),
                    "3 tensor-parallel ranks and this one 2: one of the numbers must divide");
  expect_clean(one, kTight.blocks);
  expect_clean(two, kTight.blocks);
  expect_clean(prefill, kTight.blocks);
}

TEST(Degrees, ARankWithoutASessionIsRefused) {
  TwoRanks ranks({.limits = kTight, .role = "decode"});
  auto leader = *Leader::create(*ranks.group, ranks.model, kTight, "decode");
  const auto session = rank_session({.role = "decode"}, ranks.model);
  EXPECT_THAT(serve::Engine::create(
                  ranks.model, serve::test_tokenizer(),
                  {.blocks = kTight.blocks, .hand_off = session.get(), .leader = leader.get()})
                  .status(),
              fails_with(Code::kInvalidArgument, {"rank 1 has no KV session"}));
}

// --- addresses -----------------------------------------------------------------------------------

TEST(KvAddress, RanksKeepTheirOrder) {
  EXPECT_EQ(join_kv_addresses({"baton1:abc"}), "baton1:abc");
  for (const std::vector<std::string>& ranks : {std::vector<std::string>{"baton1:abc"},
                                                {"10.0.0.1:80"},
                                                {"baton1:b", "baton1:a", "baton1:c"}}) {
    EXPECT_EQ(*split_kv_address(join_kv_addresses(ranks)), ranks);
  }
}

TEST(KvAddress, NonsenseIsRefused) {
  for (const std::string& text :
       {std::string("baton-ranks1:"), std::string("baton-ranks1:a,,b"), std::string("baton-ranks"),
        std::string("baton-ranks2:a,b"), "baton-ranks1:a" + std::string(256, ',') + "b"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(split_kv_address(text).status())) << text;
  }
}

}  // namespace
}  // namespace baton::engine::shard::degrees
