// Two engines joined by a connector: the same tokens as one, whatever the link does.
#include <sys/eventfd.h>

#include "engine/serve/engine.h"
#include "tests/captured_log.h"
#include "tests/engine_serve/engine_fixture.h"
#include "tests/engine_serve/loopback_connector.h"
#include "tests/test.h"

namespace baton::engine::serve::loopback {
namespace {

constexpr size_t kRequests = 200;

const std::vector<Request>& requests() {
  static const auto* list = new std::vector<Request>(random_requests(12, kRequests));
  return *list;
}

const std::map<uint64_t, Outcome>& expected() {
  static const auto* outcomes = new std::map<uint64_t, Outcome>(run_one_at_a_time(requests()));
  return *outcomes;
}

struct Setup {
  uint64_t seed = 1;
  LoopbackFaults faults;
  EngineOptions prefill;
  EngineOptions decode;
  double aborts = 0;       // probability per round
  size_t in_flight = 200;  // requests at most
};

struct Pair {
  std::map<uint64_t, Outcome> outcomes;
  EngineStats prefill, decode;
  std::unique_ptr<LoopbackLink> link;
};

Pair run_pair(Setup setup) {
  Pair pair;
  pair.link = std::make_unique<LoopbackLink>(setup.seed, setup.faults);
  setup.prefill.role = EngineRole::kPrefill;
  setup.decode.role = EngineRole::kDecode;
  setup.decode.min_remote_tokens = 8;
  auto prefill =
      *Engine::create(test_model(), test_tokenizer(), setup.prefill, &pair.link->prefill());
  auto decode = *Engine::create(test_model(), test_tokenizer(), setup.decode, &pair.link->decode());
  pair.link->set_pump([&] { prefill->step(); });
  std::mt19937_64 random(setup.seed);
  std::uniform_real_distribution<double> uniform(0, 1);
  size_t added = 0;
  const auto in_flight = [&] {
    size_t count = 0;
    for (const auto& [id, outcome] : pair.outcomes) count += !outcome.finished;
    return count;
  };
  until([&] { return added == kRequests && !decode->has_work() && !prefill->has_work(); },
        [&] {
          while (added < kRequests && random() % 3 == 0 && in_flight() < setup.in_flight) {
            const Request& request = requests()[added++];
            const absl::Status status = submit(*decode, request, &pair.outcomes[request.id]);
            EXPECT_TRUE(status.ok()) << status;
          }
          if (uniform(random) < setup.aborts && added > 0) decode->abort(random() % added);
          bool moved = decode->step();
          if (random() % 2 == 0) moved |= prefill->step();
          if (random() % 16 == 0) {
            EXPECT_TRUE(decode->check_integrity().ok()) << decode->check_integrity();
            EXPECT_TRUE(prefill->check_integrity().ok()) << prefill->check_integrity();
          }
          return moved || added < kRequests;
        });
  pair.prefill = prefill->stats();
  pair.decode = decode->stats();
  EXPECT_TRUE(decode->check_integrity().ok()) << decode->check_integrity();
  EXPECT_TRUE(prefill->check_integrity().ok()) << prefill->check_integrity();
  EXPECT_EQ(pair.decode.free_blocks, setup.decode.blocks);
  EXPECT_EQ(pair.prefill.free_blocks, setup.prefill.blocks);
  return pair;
}

TEST(Disaggregation, SameTokensAsOneEngine) {
  const Pair pair = run_pair({.prefill = {.blocks = 256}, .decode = {.blocks = 256}});
  expect_same(expected(), pair.outcomes);
  EXPECT_GT(pair.link->loads_started, kRequests / 2);
  EXPECT_GT(pair.link->blocks_moved, kRequests);
  EXPECT_GT(pair.link->repeats, kRequests);
  EXPECT_GT(pair.decode.loaded_tokens, 0u);
  EXPECT_EQ(pair.decode.loads_failed, 0u);
  for (const auto& [id, outcome] : pair.outcomes) {
    const RequestMetrics& metrics = outcome.metrics;
    EXPECT_EQ(metrics.kv_wait > Time{}, metrics.loaded_tokens > 0) << id;
    EXPECT_GE(metrics.admitted, metrics.arrival) << id;
    EXPECT_LE(metrics.queued() + metrics.kv_wait, metrics.ttft()) << id;
  }
}

TEST(Disaggregation, OneAtATimeStreamsLayers) {
  const Pair pair =
      run_pair({.prefill = {.blocks = 256}, .decode = {.blocks = 256}, .in_flight = 1});
  expect_same(expected(), pair.outcomes);
  EXPECT_GT(pair.decode.loads_streamed, 15u);
}

TEST(Disaggregation, SmallChunksAndFewBlocks) {
  for (uint64_t seed : {2, 3, 4}) {
    const Pair pair = run_pair({.seed = seed,
                                .prefill = {.blocks = 24, .token_budget = 21, .max_sequences = 5},
                                .decode = {.blocks = 26, .token_budget = 16, .max_sequences = 6}});
    expect_same(expected(), pair.outcomes);
    EXPECT_GT(pair.decode.preemptions, 0u);
  }
}

TEST(Disaggregation, BlocksStayPutUntilTheyAreSent) {
  const Pair pair = run_pair({.seed = 14,
                              .faults = {.speed = 0.02},
                              .prefill = {.blocks = 14},
                              .decode = {.blocks = 256}});
  expect_same(expected(), pair.outcomes);
}

TEST(Disaggregation, FailedLoadsAreRecomputed) {
  for (uint64_t seed : {5, 6, 7}) {
    const Pair pair = run_pair({.seed = seed,
                                .faults = {.refuse_start = 0.1, .fail_load = 0.3, .lose_load = 0.2},
                                .prefill = {.blocks = 64, .token_budget = 40},
                                .decode = {.blocks = 48, .token_budget = 40}});
    expect_same(expected(), pair.outcomes);
    EXPECT_GT(pair.decode.loads_failed, 20u);
    EXPECT_GT(pair.link->late_writes, 0u);
  }
}

// Neither a prefill worker that cannot be asked nor one that does not answer goes unnoticed.
TEST(Disaggregation, PromptsComputedTwiceAreCountedToldAndLogged) {
  for (const LoopbackFaults faults : {LoopbackFaults{.refuse_start = 1}, {.fail_load = 1}}) {
    const CapturedLog log(base::LogLevel::kWarning);
    const std::vector<std::string>& lines = log.lines;
    const Pair pair = run_pair(
        {.seed = 15, .faults = faults, .prefill = {.blocks = 256}, .decode = {.blocks = 256}});
    expect_same(expected(), pair.outcomes);
    size_t told = 0;
    for (const auto& [id, outcome] : pair.outcomes) told += !outcome.metrics.load_error.ok();
    EXPECT_GT(told, kRequests / 2);
    EXPECT_EQ(pair.decode.loads_failed, told);
    ASSERT_FALSE(lines.empty());
    EXPECT_NE(lines[0].find("computed here"), std::string::npos) << lines[0];
    EXPECT_NE(lines[0].find("injected"), std::string::npos) << lines[0];
  }
}

TEST(Disaggregation, FailedStreamsAreRecomputed) {
  const Pair pair = run_pair({.seed = 8,
                              .faults = {.fail_load = 0.5},
                              .prefill = {.blocks = 64, .token_budget = 40},
                              .decode = {.blocks = 64},
                              .in_flight = 1});
  expect_same(expected(), pair.outcomes);
  EXPECT_GT(pair.decode.loads_failed, 20u);
  EXPECT_GT(pair.decode.loads_streamed, 0u);
}

TEST(Disaggregation, FailedLoadsFailTheRequestIfAskedTo) {
  const Pair pair =
      run_pair({.seed = 9,
                .faults = {.refuse_start = 0.1, .fail_load = 0.3},
                .prefill = {.blocks = 128},
                .decode = {.blocks = 128, .on_load_failure = LoadFailurePolicy::kFail}});
  size_t failed = 0;
  for (const auto& [id, outcome] : pair.outcomes) {
    ASSERT_TRUE(outcome.finished);
    if (outcome.reason == FinishReason::kError) {
      ++failed;
      EXPECT_NE(outcome.status.message().find("injected"), absl::string_view::npos);
      EXPECT_TRUE(outcome.tokens.empty());
    } else {
      EXPECT_EQ(outcome.tokens, expected().at(id).tokens);
    }
  }
  EXPECT_GT(failed, 10u);
}

TEST(Disaggregation, AbortsWhileBytesAreInFlight) {
  for (uint64_t seed : {10, 11, 12}) {
    const Pair pair = run_pair({.seed = seed,
                                .faults = {.fail_load = 0.1},
                                .prefill = {.blocks = 40, .token_budget = 32},
                                .decode = {.blocks = 40, .token_budget = 32, .max_sequences = 8},
                                .aborts = 0.3});
    size_t aborted = 0;
    for (const auto& [id, outcome] : pair.outcomes) {
      ASSERT_TRUE(outcome.finished);
      const std::vector<int32_t>& want = expected().at(id).tokens;
      if (outcome.reason == FinishReason::kAbort) {
        ++aborted;
        ASSERT_LE(outcome.tokens.size(), want.size());
        ASSERT_TRUE(std::equal(outcome.tokens.begin(), outcome.tokens.end(), want.begin()));
      } else {
        ASSERT_EQ(outcome.tokens, want) << "request " << id;
      }
    }
    EXPECT_GT(aborted, 10u);
    EXPECT_GT(pair.link->late_writes, 0u);
  }
}

TEST(Disaggregation, HostileJobsAreRefused) {
  LoopbackLink link(13);
  auto prefill = *Engine::create(test_model(), test_tokenizer(),
                                 {.role = EngineRole::kPrefill, .blocks = 8}, &link.prefill());
  ASSERT_TRUE(link.decode()
                  .allocate_cache(kvtransfer::KvLayout::transposed_keys({.layers = 2,
                                                                         .blocks = 64,
                                                                         .block_tokens = 16,
                                                                         .total_heads = 1,
                                                                         .heads = 1,
                                                                         .head_size = 16}))
                  .ok());
  const auto outcome = [&](kvtransfer::KvRequestId id, std::vector<int32_t> tokens) {
    const size_t blocks = (tokens.size() + 15) / 16;
    EXPECT_TRUE(link.decode()
                    .start_load({.id = id,
                                 .prefill = "prefill",
                                 .tokens = std::move(tokens),
                                 .blocks = std::vector<uint32_t>(blocks, 0)})
                    .ok());
    for (int i = 0; i < 1000 && link.decode().load_status(id).ok(); ++i) prefill->step();
    return link.decode().load_status(id);
  };
  EXPECT_EQ(outcome(1, {5, 272, 6}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(outcome(2, {5, -7, 6}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(outcome(3, std::vector<int32_t>(129, 1)).code(), absl::StatusCode::kResourceExhausted);
  prefill->step();
  EXPECT_FALSE(prefill->has_work());
  EXPECT_TRUE(prefill->check_integrity().ok());
}

// A prefill worker that hangs in the middle of a prompt costs that prompt's request its deadline,
// and nobody else anything.
// Promise(kv): A hung prefill worker costs its request the deadline, and other requests nothing | a
//   wait for a layer ends after 100 ms or with the next command
TEST(Disaggregation, AHungPrefillDelaysNoOtherRequest) {
  LoopbackLink link(3, {.repeat = 0});
  auto prefill = *Engine::create(test_model(), test_tokenizer(),
                                 {.role = EngineRole::kPrefill, .blocks = 64}, &link.prefill());
  auto decode = *Engine::create(test_model(), test_tokenizer(),
                                {.role = EngineRole::kDecode, .blocks = 64, .min_remote_tokens = 8},
                                &link.decode());
  link.set_pump([&] { prefill->step(); });
  link.hold_from_layer = 1;
  Request hung, other, local;
  hung.id = 1;
  hung.tokens.assign(100, 7);
  hung.sampling = {.max_tokens = 5, .ignore_eos = true};
  hung.prefill_address = "prefill";
  other = hung;
  other.id = 2;
  other.tokens.assign(80, 9);
  local = hung;
  local.id = 3;
  local.tokens = {1, 2, 3};
  const std::map<uint64_t, Outcome> want = run_one_at_a_time({hung, other, local});

  std::map<uint64_t, Outcome> seen;
  ASSERT_TRUE(submit(*decode, hung, &seen[1]).ok());
  // Its first layer comes, the engine has nothing else to do, and the second never comes.
  const auto both = [&] {
    const bool moved = decode->step();
    return prefill->step() || moved || true;
  };
  until([&] { return decode->stats().loads_stalled > 0; }, both);
  ASSERT_TRUE(submit(*decode, local, &seen[3]).ok());
  until([&] { return seen[3].finished; }, both);
  EXPECT_FALSE(seen[1].finished);
  EXPECT_EQ(decode->stats().loading, 1u);
  // One that is fetched too, as far as its layers come.
  ASSERT_TRUE(submit(*decode, other, &seen[2]).ok());
  until([&] { return decode->stats().loading == 2; }, both);
  // A client that leaves now is forgotten at once.
  EXPECT_TRUE(decode->abort(2));
  EXPECT_TRUE(seen[2].finished);
  EXPECT_TRUE(decode->check_integrity().ok());
  // The layers come after all.
  link.hold_from_layer = -1;
  until([&] { return seen[1].finished && !decode->has_work() && !prefill->has_work(); }, both);
  EXPECT_EQ(seen[1].tokens, want.at(1).tokens);
  EXPECT_EQ(seen[3].tokens, want.at(3).tokens);
  EXPECT_EQ(seen[1].metrics.loaded_tokens, 96u);
  EXPECT_EQ(decode->stats().free_blocks, 64u);
}

// With a wake-up, not even for the moment that a layer is waited for.
TEST(Disaggregation, AWakeUpEndsTheWaitForALayer) {
  LoopbackLink link(4, {.repeat = 0});
  auto prefill = *Engine::create(test_model(), test_tokenizer(),
                                 {.role = EngineRole::kPrefill, .blocks = 64}, &link.prefill());
  auto decode = *Engine::create(test_model(), test_tokenizer(),
                                {.role = EngineRole::kDecode, .blocks = 64, .min_remote_tokens = 8},
                                &link.decode());
  link.hold_from_layer = 1;
  const int rung = eventfd(1, EFD_CLOEXEC);
  ASSERT_GE(rung, 0);
  Request hung;
  hung.tokens.assign(100, 7);
  hung.prefill_address = "prefill";
  Outcome outcome;
  ASSERT_TRUE(submit(*decode, hung, &outcome).ok());
  until([&] { return decode->stats().loads_stalled > 0; },
        [&] { return prefill->step() || decode->step(rung) || true; });
  EXPECT_EQ(link.sleeps, 0u);
  EXPECT_TRUE(decode->abort(hung.id));
  close(rung);
}

}  // namespace
}  // namespace baton::engine::serve::loopback
