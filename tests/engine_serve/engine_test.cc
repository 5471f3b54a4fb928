// One engine: the same tokens whatever the batch, the chunks, the preemptions and the prefix hits.
#include "engine/serve/engine.h"

#include "tests/engine_serve/engine_fixture.h"
#include "tests/test.h"

namespace baton::engine::serve {
namespace {

constexpr size_t kRequests = 200;

const std::vector<Request>& requests() {
  static const auto* list = new std::vector<Request>(random_requests(11, kRequests));
  return *list;
}

const std::map<uint64_t, Outcome>& expected() {
  static const auto* outcomes = new std::map<uint64_t, Outcome>(run_one_at_a_time(requests()));
  return *outcomes;
}

// Requests arrive at random moments; now and then everything is counted again.
std::map<uint64_t, Outcome> run_batched(EngineOptions options, uint64_t seed, EngineStats* stats,
                                        const Model& model = test_model()) {
  auto engine = *Engine::create(model, test_tokenizer(), std::move(options));
  std::mt19937_64 random(seed);
  std::map<uint64_t, Outcome> outcomes;
  size_t added = 0;
  until([&] { return added == kRequests && !engine->has_work(); },
        [&] {
          while (added < kRequests && random() % 3 == 0) {
            const Request& request = requests()[added++];
            const absl::Status status = submit(*engine, request, &outcomes[request.id]);
            EXPECT_TRUE(status.ok()) << status;
          }
          const bool moved = engine->step();
          if (random() % 16 == 0) {
            EXPECT_TRUE(engine->check_integrity().ok());
          }
          return moved || added < kRequests;
        });
  *stats = engine->stats();
  EXPECT_TRUE(engine->check_integrity().ok()) << engine->check_integrity();
  return outcomes;
}

TEST(Engine, ChunksChangeNothing) {
  for (size_t budget : {4u, 7u, 33u}) {
    EngineStats stats;
    expect_same(expected(), run_batched({.blocks = 512, .token_budget = budget, .max_sequences = 4},
                                        budget, &stats));
    EXPECT_GT(stats.steps, 2 * kRequests);
  }
}

// Promise(engine): In fp32 and bf16 arithmetic tokens are the same alone and batched | sums and
//   rounding do not depend on the batch
TEST(Engine, OtherModelsAndArithmeticsSayTheSameAloneAndTogether) {
  const struct {
    const char* name;
    const Model& model;
  } models[] = {{"fp32", test_model()},
                {"bf16", test_model(Arithmetic::kBf16)},
                {"Qwen3-MoE", qwen3_moe_test_model()},
                {"Mixtral", mixtral_test_model()}};
  for (const auto& [name, model] : models) {
    SCOPED_TRACE(name);
    const std::map<uint64_t, Outcome> alone = run_one_at_a_time(requests(), model);
    std::map<std::vector<int32_t>, int> seen;
    for (const auto& [id, outcome] : alone) ++seen[outcome.tokens];
    EXPECT_GT(seen.size(), kRequests * 3 / 4) << "comparisons of texts that are alike mean little";
    for (size_t i = 0; i < 20; ++i) {
      const std::vector<int32_t> oracle = oracle_tokens(requests()[i], model);
      const std::vector<int32_t>& said = alone.at(i).tokens;
      ASSERT_LE(said.size(), oracle.size());
      ASSERT_TRUE(std::equal(said.begin(), said.end(), oracle.begin())) << i;
      if (requests()[i].sampling.stop.empty()) {
        ASSERT_EQ(said.size(), oracle.size()) << i;
      }
    }
    EngineStats stats;
    expect_same(alone, run_batched({.blocks = 512, .threads = 2}, 1, &stats, model));
    EXPECT_GT(stats.cached_tokens, 0u);
    EXPECT_EQ(stats.free_blocks, 512u);
    expect_same(alone, run_batched({.blocks = 20, .token_budget = 33, .max_sequences = 8}, 2,
                                   &stats, model));
    EXPECT_GT(stats.preemptions, 10u);
  }
}

TEST(Engine, ResumedStreamsGoOnWhereTheyBroke) {
  auto engine = *Engine::create(test_model(), test_tokenizer(), {.blocks = 64});
  for (size_t i = 0; i < 60; ++i) {
    const Request& request = requests()[i];
    const Outcome& want = expected().at(request.id);
    for (size_t cut : {size_t{0}, want.tokens.size() / 2, want.tokens.size()}) {
      // What a client had seen after `cut` tokens, then the rest from a new stream.
      Outcome before, after;
      Request first = request;
      first.sampling.max_tokens = static_cast<int>(want.tokens.size()) + 1;
      first.on_event = [&](const OutputEvent& event) {
        if (before.tokens.size() >= cut || !event.has_token) return;
        before.tokens.push_back(event.choice.token);
        before.text += event.text;
      };
      if (cut > 0) {
        if (cut == want.tokens.size()) first.sampling.max_tokens = request.sampling.max_tokens;
        ASSERT_TRUE(engine->add_request(first).ok());
        finish_all(*engine);
      }
      Request second = request;
      second.resume_tokens = before.tokens;
      ASSERT_TRUE(submit(*engine, second, &after).ok());
      finish_all(*engine);
      ASSERT_EQ(before.text + after.text, want.text) << "request " << i << " cut at " << cut;
      ASSERT_EQ(before.tokens.size() + after.tokens.size(), want.tokens.size());
      ASSERT_EQ(after.reason, want.reason);
    }
  }
}

TEST(Engine, AbortsFreeEverything) {
  auto engine = *Engine::create(test_model(), test_tokenizer(),
                                {.blocks = 40, .token_budget = 32, .max_sequences = 6});
  std::mt19937_64 random(5);
  std::map<uint64_t, Outcome> outcomes;
  for (const Request& request : requests()) {
    ASSERT_TRUE(submit(*engine, request, &outcomes[request.id]).ok());
  }
  EXPECT_FALSE(engine->abort(kRequests + 5));
  size_t aborted = 0;
  until([&] { return !engine->has_work(); },
        [&] {
          if (random() % 4 == 0) aborted += engine->abort(random() % kRequests);
          EXPECT_TRUE(engine->check_integrity().ok());
          return engine->step();
        });
  EXPECT_GT(aborted, 10u);
  EXPECT_EQ(engine->stats().free_blocks, 40u);
  for (const auto& [id, outcome] : outcomes) {
    ASSERT_TRUE(outcome.finished);
    const std::vector<int32_t>& want = expected().at(id).tokens;
    if (outcome.reason == FinishReason::kAbort) {
      EXPECT_EQ(outcome.status.code(), absl::StatusCode::kCancelled);
      ASSERT_LE(outcome.tokens.size(), want.size());
      ASSERT_TRUE(std::equal(outcome.tokens.begin(), outcome.tokens.end(), want.begin()));
    } else {
      ASSERT_EQ(outcome.tokens, want);
    }
  }
}

TEST(Engine, MetricsAddUp) {
  auto engine = *Engine::create(test_model(), test_tokenizer(), {.blocks = 64});
  Outcome outcome;
  Request request;
  request.tokens = {1, 2, 3};
  request.sampling = {.max_tokens = 5, .ignore_eos = true};
  ASSERT_TRUE(submit(*engine, request, &outcome).ok());
  finish_all(*engine);
  EXPECT_EQ(outcome.reason, FinishReason::kLength);
  EXPECT_EQ(outcome.metrics.prompt_tokens, 3u);
  EXPECT_EQ(outcome.metrics.output_tokens, 5u);
  EXPECT_EQ(outcome.metrics.gaps.size(), 4u);
  EXPECT_GE(outcome.metrics.first_token, outcome.metrics.arrival);
  EXPECT_GE(outcome.metrics.finish, outcome.metrics.last_token);
}

TEST(Engine, LongPromptsAreRefusedWithTheReason) {
  auto engine = *Engine::create(test_model(), test_tokenizer(), {.blocks = 4});
  Outcome outcome;
  Request request;
  request.tokens.assign(64, 1);
  const absl::Status status = submit(*engine, request, &outcome);
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_NE(status.message().find("64 tokens"), absl::string_view::npos) << status;
  EXPECT_NE(status.message().find("--blocks"), absl::string_view::npos) << status;

  request.tokens.resize(60);
  request.sampling = {.max_tokens = 100, .ignore_eos = true};
  ASSERT_TRUE(submit(*engine, request, &outcome).ok());
  finish_all(*engine);
  EXPECT_EQ(outcome.tokens.size(), 4u);  // then the cache is full
  EXPECT_EQ(outcome.reason, FinishReason::kLength);
}

TEST(Engine, BadRequestsAndOptionsAreRefused) {
  auto engine = *Engine::create(test_model(), test_tokenizer(), {.blocks = 8});
  const auto code = [&](Request request) { return engine->add_request(std::move(request)).code(); };
  EXPECT_EQ(code({.tokens = {}}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.tokens = {-1}}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.tokens = {272}}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.tokens = {1}, .resume_tokens = {300}}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.tokens = {1}, .sampling = {.top_p = 0}}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.id = 3, .tokens = {1}}), absl::StatusCode::kOk);
  EXPECT_EQ(code({.id = 3, .tokens = {1}}), absl::StatusCode::kAlreadyExists);
  EXPECT_FALSE(Engine::create(test_model(), test_tokenizer(), {.blocks = 0}).ok());
  EXPECT_FALSE(
      Engine::create(test_model(), test_tokenizer(), {.token_budget = 2, .max_sequences = 4}).ok());
}

}  // namespace
}  // namespace baton::engine::serve
