// Two engines joined by Baton itself: the same tokens as one, over every transport.
#include "engine/serve/engine.h"
#include "kvtransfer/baton_connector.h"
#include "tests/engine_model/test_model.h"
#include "tests/engine_serve/engine_fixture.h"
#include "tests/test.h"
#include "transport/base/log.h"

namespace baton::engine::serve::transports {
namespace {

constexpr size_t kRequests = 200;

const std::vector<Request>& requests() {
  static const auto* list = new std::vector<Request>(random_requests(21, kRequests));
  return *list;
}

const std::map<uint64_t, Outcome>& expected() {
  static const auto* outcomes = new std::map<uint64_t, Outcome>(run_one_at_a_time(requests()));
  return *outcomes;
}

std::unique_ptr<kvtransfer::KvConnector> make_connector(const std::string& name,
                                                        const std::string& provider,
                                                        kvtransfer::KvSendMode mode) {
  kvtransfer::BatonConnectorOptions options;
  options.worker.name = name;
  options.worker.providers = {provider};
  options.worker.key = *ClusterKey::from_bytes("a secret for these tests, 32 bytes long");
  options.mode = mode;
  auto connector = kvtransfer::make_baton_connector(options);
  EXPECT_TRUE(connector.ok()) << connector.status();
  return connector.ok() ? *std::move(connector) : nullptr;
}

// A prefill engine on a thread of its own.
class Prefill {
 public:
  Prefill(std::unique_ptr<kvtransfer::KvConnector> connector, EngineOptions options,
          const Model& model = test_model())
      : connector_(std::move(connector)) {
    options.role = EngineRole::kPrefill;
    engine_ = *Engine::create(model, test_tokenizer(), options, connector_.get());
    thread_ = std::thread([this] {
      while (!stop_) {
        const std::lock_guard running(mutex_);
        if (!engine_->step()) engine_->wait(std::chrono::milliseconds(1), -1);
      }
    });
  }
  ~Prefill() { finish(); }
  Engine& finish() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
    return *engine_;
  }
  std::string address() const { return connector_->address(); }
  // It does nothing while this is held, as a process that is stopped.
  std::unique_lock<std::mutex> stop_for_a_while() { return std::unique_lock(mutex_); }

 private:
  std::unique_ptr<kvtransfer::KvConnector> connector_;
  std::unique_ptr<Engine> engine_;
  std::mutex mutex_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

struct Case {
  const char* provider;
  kvtransfer::KvSendMode mode;
};

class BatonDisaggregation : public testing::TestWithParam<Case> {};

// All requests, many at a time, through a prefill and a decode engine with this model: `want`.
void expect_same_tokens(const Case& given, const Model& model,
                        const std::map<uint64_t, Outcome>& want) {
  Prefill prefill(make_connector("prefill", given.provider, given.mode),
                  {.blocks = 64, .token_budget = 64}, model);
  const auto connector = make_connector("decode", given.provider, given.mode);
  auto decode = *Engine::create(model, test_tokenizer(),
                                {.role = EngineRole::kDecode,
                                 .blocks = 48,
                                 .token_budget = 48,
                                 .max_sequences = 8,
                                 .min_remote_tokens = 8},
                                connector.get());
  std::map<uint64_t, Outcome> outcomes;
  std::mt19937_64 random(1);
  size_t added = 0;
  until([&] { return added == kRequests && !decode->has_work(); },
        [&] {
          while (added < kRequests && random() % 3 == 0) {
            Request request = requests()[added++];
            request.prefill_address = prefill.address();
            ASSERT_TRUE(submit(*decode, request, &outcomes[request.id]).ok());
          }
          if (!decode->step()) decode->wait(std::chrono::milliseconds(1), -1);
        },
        [&] { return state_of(*decode); });
  expect_same(want, outcomes);
  EXPECT_EQ(decode->stats().loads_failed, 0u);
  EXPECT_GT(decode->stats().loaded_tokens, 1000u);
  EXPECT_GT(connector->stats().bytes_loaded, 0u);
  EXPECT_EQ(decode->stats().free_blocks, 48u);
  EXPECT_TRUE(decode->check_integrity().ok()) << decode->check_integrity();
  const Engine& other = prefill.finish();
  EXPECT_TRUE(other.check_integrity().ok()) << other.check_integrity();
}

TEST_P(BatonDisaggregation, SameTokensAsOneEngine) {
  expect_same_tokens(GetParam(), test_model(), expected());
}

TEST_P(BatonDisaggregation, SameTokensAsOneEngineInBf16) {
  const Model& model = test_model(Arithmetic::kBf16);
  const auto alone = run_one_at_a_time(requests(), model);
  size_t different = 0;
  for (const auto& [id, outcome] : alone) different += outcome.tokens != expected().at(id).tokens;
  EXPECT_GT(different, 0u) << "the arithmetics differ somewhere, or one of them is not used";
  const Request& first = requests()[0];
  EXPECT_EQ(oracle_tokens(first, model), alone.at(first.id).tokens);
  expect_same_tokens(GetParam(), model, alone);
}

TEST_P(BatonDisaggregation, SameTokensAsOneEngineWithExperts) {
  expect_same_tokens(GetParam(), qwen3_moe_test_model(),
                     run_one_at_a_time(requests(), qwen3_moe_test_model()));
}

TEST_P(BatonDisaggregation, PrefillThatIsGoneIsSurvived) {
  const Case& given = GetParam();
  const auto connector = make_connector("decode", given.provider, given.mode);
  auto decode = *Engine::create(test_model(), test_tokenizer(),
                                {.role = EngineRole::kDecode, .blocks = 64, .min_remote_tokens = 8},
                                connector.get());
  std::string address;
  {
    Prefill prefill(make_connector("prefill", given.provider, given.mode), {.blocks = 64});
    address = prefill.address();
  }
  std::map<uint64_t, Outcome> outcomes;
  for (size_t i = 0; i < 5; ++i) {
    Request request = requests()[i];
    request.prefill_address = address;
    ASSERT_TRUE(submit(*decode, request, &outcomes[request.id]).ok());
  }
  finish_all(*decode);
  for (const auto& [id, outcome] : outcomes) EXPECT_EQ(outcome.tokens, expected().at(id).tokens);
  EXPECT_EQ(decode->stats().free_blocks, 64u);
}

// What it costs is a moment, not the minute that a load may take; and the answer is the same.
TEST_P(BatonDisaggregation, PrefillThatIsStoppedIsGivenUpWhenItIsSilent) {
  const Case& given = GetParam();
  Prefill prefill(make_connector("prefill", given.provider, given.mode), {.blocks = 64});
  const auto connector = make_connector("decode", given.provider, given.mode);
  auto decode = *Engine::create(test_model(), test_tokenizer(),
                                {.role = EngineRole::kDecode,
                                 .blocks = 64,
                                 .min_remote_tokens = 8,
                                 .load_timeout = kNever,
                                 .load_silence = std::chrono::milliseconds(200)},
                                connector.get());
  Outcome outcome;
  int32_t asked = 0;
  const auto ask = [&] {
    outcome = {};
    const int32_t token = ++asked;  // that no cache knows
    Request request{.id = static_cast<uint64_t>(asked), .tokens = std::vector<int32_t>(40, token)};
    request.sampling = {.max_tokens = 5, .ignore_eos = true};
    const std::vector<int32_t> want = oracle_tokens(request);
    request.prefill_address = prefill.address();
    ASSERT_TRUE(submit(*decode, request, &outcome).ok());
    until([&] { return outcome.finished; },
          [&] {
            if (!decode->step()) decode->wait(std::chrono::milliseconds(1), -1);
          },
          [&] { return state_of(*decode); });
    EXPECT_EQ(outcome.tokens, want);
  };
  // Where nobody stops it, the machine may do so for as long; then it is asked again.
  const auto ask_until_loaded = [&] {
    do {
      ASSERT_NO_FATAL_FAILURE(ask());
      ASSERT_LT(asked, 250);
    } while (outcome.metrics.loaded_tokens != 32);
  };
  ASSERT_NO_FATAL_FAILURE(ask_until_loaded());
  {
    const auto stopped = prefill.stop_for_a_while();
    ASSERT_NO_FATAL_FAILURE(ask());
    const std::string why(outcome.metrics.load_error.message());
    EXPECT_NE(why.find("no sign of life"), std::string::npos) << why;
    EXPECT_EQ(outcome.metrics.loaded_tokens, 0u);
    EXPECT_GT(decode->stats().quarantined_blocks, 0u);
  }
  // Nothing can arrive any more when it has heard of it; and it is asked again.
  finish_all(*decode);
  EXPECT_EQ(decode->stats().quarantined_blocks, 0u);
  ASSERT_NO_FATAL_FAILURE(ask_until_loaded());
}

// A prefill engine with `other`, a decode engine with `model`: nothing is loaded, and it is said
// why, with `what` in it.
void expect_refused(const Case& given, const Model& other, const Model& model = test_model(),
                    std::string_view what = "same checkpoint") {
  std::mutex mutex;
  std::vector<std::string> lines;
  base::set_log_level(base::LogLevel::kWarning);
  base::set_log_sink([&](base::LogLevel, std::string_view line) {
    const std::lock_guard lock(mutex);
    lines.emplace_back(line);
  });
  Prefill prefill(make_connector("prefill", given.provider, given.mode), {.blocks = 64}, other);
  const auto connector = make_connector("decode", given.provider, given.mode);
  auto decode = *Engine::create(model, test_tokenizer(),
                                {.role = EngineRole::kDecode, .blocks = 64, .min_remote_tokens = 8},
                                connector.get());
  std::map<uint64_t, Outcome> outcomes;
  for (size_t i = 0; i < 5; ++i) {
    Request request = requests()[i];
    request.tokens.resize(40, 7);
    request.prefill_address = prefill.address();
    ASSERT_TRUE(submit(*decode, request, &outcomes[request.id]).ok());
    finish_all(*decode);
    request.prefill_address.clear();
    EXPECT_EQ(outcomes[request.id].tokens, oracle_tokens(request, model));
    const std::string why(outcomes[request.id].metrics.load_error.message());
    EXPECT_NE(why.find(what), std::string::npos) << why;
  }
  base::set_log_sink(nullptr);
  base::set_log_level(base::LogLevel::kError);
  EXPECT_EQ(decode->stats().loads_failed, 5u);
  EXPECT_EQ(decode->stats().loaded_tokens, 0u);
  const auto said = [&](std::string_view by) {
    return std::any_of(lines.begin(), lines.end(), [&](const std::string& line) {
      return line.find(by) != std::string::npos && line.find(what) != std::string::npos;
    });
  };
  EXPECT_TRUE(said("no KV can be sent to decode worker decode"));
  EXPECT_TRUE(said("KV loads have failed"));
}

TEST_P(BatonDisaggregation, TheKvOfAnotherCheckpointIsRefusedAtBothEnds) {
  Checkpoint tuned = make_test_checkpoint(tiny_model_config(), 1);
  tuned.weights[3].data[5] ^= 1;  // one bit of one weight
  expect_refused(GetParam(), Model::create(tuned).value());
}

TEST_P(BatonDisaggregation, TheKvOfAnotherArithmeticIsRefusedAtBothEnds) {
  const Model& bf16 = test_model(Arithmetic::kBf16);
  expect_refused(GetParam(), bf16, test_model(), "same checkpoint");
  expect_refused(GetParam(), test_model(), bf16, "+bf16");
}

INSTANTIATE_TEST_SUITE_P(Transports, BatonDisaggregation,
                         testing::Values(Case{"shm", kvtransfer::KvSendMode::kLayerwise},
                                         Case{"tcp", kvtransfer::KvSendMode::kLayerwise},
                                         Case{"tcp", kvtransfer::KvSendMode::kSerialized}),
                         [](const auto& test) {
                           return std::string(test.param.provider) +
                                  (test.param.mode == kvtransfer::KvSendMode::kLayerwise
                                       ? "Layerwise"
                                       : "Serialized");
                         });

}  // namespace
}  // namespace baton::engine::serve::transports
