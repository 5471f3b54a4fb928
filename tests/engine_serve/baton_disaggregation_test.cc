// Two engines joined by Baton itself: the same tokens as one, over every transport.
#include <sys/eventfd.h>

#include "engine/serve/engine.h"
#include "tests/captured_log.h"
#include "tests/engine_model/test_model.h"
#include "tests/engine_serve/engine_fixture.h"
#include "tests/engine_serve/sessions.h"
#include "tests/test.h"

namespace baton::engine::serve::transports {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;

constexpr size_t kRequests = 200;

const std::vector<Request>& requests() {
  static const auto* list = new std::vector<Request>(random_requests(21, kRequests));
  return *list;
}

const std::map<uint64_t, Outcome>& expected() {
  static const auto* outcomes = new std::map<uint64_t, Outcome>(run_one_at_a_time(requests()));
  return *outcomes;
}

// A prefill engine on a thread of its own.
class Prefill {
 public:
  Prefill(const std::string& provider, EngineOptions options, const Model& model = test_model())
      : session_(test_session("prefill", provider, model)) {
    options.hand_off = session_.get();
    engine_ = *Engine::create(model, test_tokenizer(), options);
    thread_ = std::thread([this] {
      while (!stop_) {
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
  std::string address() const { return engine_->kv_address(); }

 private:
  const std::unique_ptr<handoff::HandOff> session_;
  std::unique_ptr<Engine> engine_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// A prefill that computes what a test says.
class Bare {
 public:
  explicit Bare(const std::string& provider, handoff::HandOffOptions options = {},
                const std::string& name = "prefill")
      : session_(test_session(name, provider, test_model(), std::move(options))) {
    memory_ = *shard::KvMemory::make(test_model(), 64);
    EXPECT_TRUE(session_->use_cache(memory_->cache()).ok());
  }
  ~Bare() { session_->close(); }
  std::string address() const { return session_->agent()->address(); }
  handoff::HandOff& operator*() { return *session_; }
  handoff::HandOff* operator->() { return session_.get(); }

 private:
  std::optional<shard::KvMemory> memory_;
  const std::unique_ptr<handoff::HandOff> session_;
};

struct Case {
  const char* provider;
  bool serialized = false;
  bool push = false;
};

// A decode engine, which its caller steps.
struct Decode {
  Decode(const Case& given, EngineOptions options, const Model& model = test_model())
      : session(test_session("decode", given.provider, model)) {
    options.push = given.push;
    options.hand_off = session.get();
    options.min_remote_tokens = 8;
    engine = *Engine::create(model, test_tokenizer(), options);
  }
  Engine* operator->() { return engine.get(); }
  Engine& operator*() { return *engine; }
  void turn() {
    if (!engine->step()) engine->wait(std::chrono::milliseconds(1), -1);
  }
  const std::unique_ptr<handoff::HandOff> session;
  std::unique_ptr<Engine> engine;
};

class BatonDisaggregation : public testing::TestWithParam<Case> {};

// All requests, many at a time, through a prefill and a decode engine with this model: `want`.
void expect_same_tokens(const Case& given, const Model& model,
                        const std::map<uint64_t, Outcome>& want) {
  Prefill prefill(given.provider,
                  {.blocks = 64, .token_budget = 64, .serialize_sends = given.serialized}, model);
  Decode decode(given, {.blocks = 48, .token_budget = 48, .max_sequences = 8}, model);
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
          decode.turn();
        },
        [&] { return state_of(*decode); });
  expect_same(want, outcomes);
  EXPECT_EQ(decode->stats().loads_failed, 0u);
  EXPECT_GT(decode->stats().loaded_tokens, 1000u);
  EXPECT_EQ(decode->stats().kv_bytes_loaded,
            decode->stats().loaded_tokens * model.kv_geometry().token_bytes());
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
  Decode decode(given, {.blocks = 64});
  std::string address;
  {
    Prefill prefill(given.provider, {.blocks = 64});
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

Request hung_request(uint64_t id, const std::string& address) {
  Request request{.id = id, .tokens = std::vector<int32_t>(100, static_cast<int32_t>(id))};
  request.sampling = {.max_tokens = 5, .ignore_eos = true};
  request.prefill_address = address;
  return request;
}

// What it costs is a moment, not the minute that a load may take; and the answer is the same.
TEST_P(BatonDisaggregation, PrefillThatIsStoppedIsGivenUpWhenItIsSilent) {
  std::optional<Bare> prefill;
  prefill.emplace(GetParam().provider, handoff::HandOffOptions{{.start_thread = false}});
  Decode decode(
      GetParam(),
      {.blocks = 64, .load_timeout = kNever, .load_silence = std::chrono::milliseconds(200)});
  const Request request = hung_request(7, prefill->address());
  Outcome outcome;
  ASSERT_TRUE(submit(*decode, request, &outcome).ok());
  until([&] { return outcome.finished; }, [&] { decode.turn(); },
        [&] { return state_of(*decode); });
  EXPECT_EQ(outcome.tokens, oracle_tokens(request));
  EXPECT_THAT(std::string(outcome.metrics.load_error.message()), HasSubstr("is silent for"));
  EXPECT_EQ(outcome.metrics.loaded_tokens, 0u);
  if (GetParam().push) {  // it may write yet, until it is gone
    EXPECT_GT(decode->stats().quarantined_blocks, 0u);
    prefill.reset();
  }
  finish_all(*decode);
  EXPECT_EQ(decode->stats().quarantined_blocks, 0u);
}

// A prefill worker that hangs in the middle of a prompt costs that prompt's request its deadline,
// and nobody else anything.
// Promise(kv): A hung prefill worker costs its request the deadline, and other requests nothing | a
//   wait for a layer ends after 100 ms or with the next command
TEST_P(BatonDisaggregation, AHungPrefillDelaysNoOtherRequest) {
  Bare prefill(GetParam().provider);
  Decode decode(GetParam(), {.blocks = 64});
  Request local{.id = 3, .tokens = {1, 2, 3}};
  local.sampling = {.max_tokens = 5, .ignore_eos = true};
  std::map<uint64_t, Outcome> seen;
  ASSERT_TRUE(submit(*decode, hung_request(1, prefill.address()), &seen[1]).ok());
  // Its first layer comes, the engine has nothing else to do, and the second never comes.
  std::vector<uint32_t> blocks(7);
  std::iota(blocks.begin(), blocks.end(), 0);
  const auto both = [&] {
    while (const auto asked = prefill->next_asked()) {
      prefill->computed(prefill->open(asked->transfer, asked->tokens.size()), 0,
                        asked->tokens.size(), blocks);
    }
    decode.turn();
  };
  // With a wake-up, it does not even wait for the moment that it would else.
  const int rung = eventfd(1, EFD_CLOEXEC);
  ASSERT_GE(rung, 0);
  until([&] { return decode->stats().loads_stalled > 0; },
        [&] {
          both();
          decode->step(rung);
        });
  close(rung);
  ASSERT_TRUE(submit(*decode, local, &seen[3]).ok());
  until([&] { return seen[3].finished; }, both);
  EXPECT_FALSE(seen[1].finished);
  EXPECT_EQ(seen[3].tokens, oracle_tokens(local));
  // One that is fetched too; a client that leaves now is forgotten at once.
  ASSERT_TRUE(submit(*decode, hung_request(2, prefill.address()), &seen[2]).ok());
  until([&] { return decode->stats().loading == 2; }, both);
  EXPECT_TRUE(decode->abort(2));
  EXPECT_TRUE(seen[2].finished);
  EXPECT_TRUE(decode->check_integrity().ok()) << decode->check_integrity();
  EXPECT_TRUE(decode->abort(1));
  until([&] { return !decode->has_work(); }, both);
  EXPECT_EQ(decode->stats().free_blocks, 64u);
}

TEST_P(BatonDisaggregation, HostileAsksAreRefused) {
  Prefill prefill(GetParam().provider, {.blocks = 8});
  Bare decode(GetParam().provider, {}, "decode");
  uint64_t id = 0;
  const auto why = [&](std::vector<int32_t> tokens) {
    kvtransfer::KvLoad load;
    load.id = ++id;
    load.transfer.emplace();
    load.transfer->transfer = absl::StrCat("t", id);
    load.transfer->workers = {{"prefill/0", prefill.address()}};
    load.ask = true;
    load.push = GetParam().push;
    load.blocks.assign((tokens.size() + 15) / 16, 0);
    load.tokens = std::move(tokens);
    EXPECT_TRUE(decode->start_load(std::move(load)).ok());
    until([&] { return !decode->load_status(id).ok(); },
          [&] { decode->wait(std::chrono::milliseconds(1), -1); });
    return std::string(decode->load_status(id).message());
  };
  EXPECT_THAT(why({5, 272, 6}), HasSubstr("token 272 is not in the vocabulary"));
  EXPECT_THAT(why({5, -7, 6}), HasSubstr("token -7 is not in the vocabulary"));
  EXPECT_THAT(why(std::vector<int32_t>(129, 1)), HasSubstr("the prompt has 129 tokens"));
  EXPECT_TRUE(prefill.finish().check_integrity().ok());
}

TEST_P(BatonDisaggregation, AbortsWhileBytesAreInFlight) {
  Prefill prefill(GetParam().provider, {.blocks = 40, .token_budget = 32});
  Decode decode(GetParam(), {.blocks = 40, .token_budget = 32, .max_sequences = 8});
  std::mt19937_64 random(10);
  std::map<uint64_t, Outcome> outcomes;
  for (size_t i = 0; i < kRequests; ++i) {
    Request request = requests()[i];
    request.prefill_address = prefill.address();
    ASSERT_TRUE(submit(*decode, request, &outcomes[i]).ok());
    for (uint64_t turns = random() % 4; turns > 0; --turns) decode.turn();
    if (random() % 3 == 0) decode->abort(random() % (i + 1));
    ASSERT_TRUE(decode->check_integrity().ok()) << decode->check_integrity();
  }
  finish_all(*decode);
  size_t aborted = 0;
  for (const auto& [id, outcome] : outcomes) {
    ASSERT_TRUE(outcome.finished);
    if (outcome.reason == FinishReason::kAbort) {
      ++aborted;
    } else {
      EXPECT_EQ(outcome.tokens, expected().at(id).tokens) << id;
    }
  }
  EXPECT_GT(aborted, 10u);
  EXPECT_EQ(decode->stats().free_blocks, 40u);
  Engine& other = prefill.finish();
  until([&] { return !other.owes_others(); },
        [&] {
          if (!other.step()) other.wait(std::chrono::milliseconds(1), -1);
        },
        [&] { return state_of(other); });
  EXPECT_EQ(other.stats().free_blocks, 40u);
  EXPECT_TRUE(other.check_integrity().ok()) << other.check_integrity();
}

TEST_P(BatonDisaggregation, FailedLoadsFailTheRequestIfAskedTo) {
  Decode decode(GetParam(), {.blocks = 64, .on_load_failure = LoadFailurePolicy::kFail});
  Outcome outcome;
  ASSERT_TRUE(submit(*decode, hung_request(1, "baton-ranks2:x"), &outcome).ok());
  finish_all(*decode);
  EXPECT_EQ(outcome.reason, FinishReason::kError);
  EXPECT_TRUE(outcome.tokens.empty());
  EXPECT_EQ(decode->stats().free_blocks, 64u);
}

// A prefill engine has this model and not the decode engine's: nothing is loaded, and both say why.
void expect_refused(const Case& given, const Model& other) {
  constexpr const char* kWhy = "another model";
  CapturedLog log(base::LogLevel::kWarning);
  {
    Prefill prefill(given.provider, {.blocks = 64}, other);
    Decode decode(given, {.blocks = 64});
    std::map<uint64_t, Outcome> outcomes;
    for (size_t i = 0; i < 5; ++i) {
      Request request = requests()[i];
      request.tokens.resize(40, 7);
      request.prefill_address = prefill.address();
      ASSERT_TRUE(submit(*decode, request, &outcomes[request.id]).ok());
      finish_all(*decode);
      request.prefill_address.clear();
      EXPECT_EQ(outcomes[request.id].tokens, oracle_tokens(request));
      EXPECT_THAT(std::string(outcomes[request.id].metrics.load_error.message()), HasSubstr(kWhy));
    }
    EXPECT_EQ(decode->stats().loads_failed, 5u);
    EXPECT_EQ(decode->stats().loaded_tokens, 0u);
  }
  for (const char* words : {"cannot hand KV over to decode/0", "KV loads have failed"}) {
    EXPECT_THAT(log.lines, Contains(AllOf(HasSubstr(words), HasSubstr(kWhy))));
  }
}

TEST_P(BatonDisaggregation, TheKvOfAnotherCheckpointIsRefusedAtBothEnds) {
  Checkpoint tuned = make_test_checkpoint(tiny_model_config(), 1);
  tuned.weights[3].data[5] ^= 1;  // one bit of one weight
  expect_refused(GetParam(), Model::create(tuned).value());
}

TEST_P(BatonDisaggregation, TheKvOfAnotherArithmeticIsRefusedAtBothEnds) {
  expect_refused(GetParam(), test_model(Arithmetic::kBf16));
}

INSTANTIATE_TEST_SUITE_P(Transports, BatonDisaggregation,
                         testing::Values(Case{"shm"}, Case{"tcp"}, Case{"tcp", true},
                                         Case{"shm", false, true}, Case{"tcp", false, true},
                                         Case{"tcp", true, true}),
                         [](const auto& test) {
                           return std::string(test.param.provider) +
                                  (test.param.push ? "Pushed" : "Pulled") +
                                  (test.param.serialized ? "Serialized" : "Layerwise");
                         });

}  // namespace
}  // namespace baton::engine::serve::transports
