// Two engines that hand KV over by name, over real agents: the same tokens as one, and what is
// promised when the other half is another, is silent, or is gone.
#include "engine/handoff/hand_off.h"

#include "engine/serve/engine.h"
#include "tests/engine_handoff/bare_hand_off.h"
#include "tests/engine_serve/engine_fixture.h"
#include "tests/test.h"

namespace baton::engine::handoff {
namespace {

using serve::Engine;
using serve::EngineOptions;
using serve::Outcome;
using serve::Request;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

// One half of a pair. Nothing of it moves but by turn().
class Half {
 public:
  Half(const std::string& name, const Clock& clock, EngineOptions options,
       HandOffOptions more = {}) {
    if (more.fingerprint.empty()) more.fingerprint = serve::test_model().fingerprint();
    hand_off_ = test_hand_off(name, clock, std::move(more));
    options.hand_off = hand_off_.get();
    options.load_timeout = seconds(20);
    engine_ = *Engine::create(serve::test_model(), serve::test_tokenizer(), options);
  }

  void submit(Request request) {
    Outcome& outcome = outcomes_[request.id];
    request.prefill_address.clear();
    request.on_event = [this, &outcome, id = request.id](const serve::OutputEvent& event) {
      if (event.has_token) outcome.tokens.push_back(event.choice.token);
      outcome.text += event.text;
      if (!event.finished) return;
      outcome.finished = true;
      outcome.reason = event.reason;
      outcome.status = event.status;
      outcome.metrics = *event.metrics;
      if (event.handed_over.has_value()) handed_over_[id] = *event.handed_over;
    };
    const absl::Status status = engine_->add_request(std::move(request));
    EXPECT_TRUE(status.ok()) << status;
  }
  void turn() {
    hand_off_->turn();
    engine_->step();
  }
  // Every block is free again, and none is lost.
  bool quiet() const {
    return !engine_->has_work() && engine_->stats().free_blocks == engine_->stats().blocks;
  }

  Engine& engine() { return *engine_; }
  HandOff& hand_off() { return *hand_off_; }
  Outcome& outcome(uint64_t id) { return outcomes_[id]; }
  const std::map<uint64_t, Outcome>& outcomes() const { return outcomes_; }
  std::optional<kvtransfer::KvTransfer> handed_over(uint64_t id) const {
    const auto it = handed_over_.find(id);
    return it == handed_over_.end() ? std::nullopt : std::optional(it->second);
  }
  kvtransfer::KvTransfer at(const std::string& transfer) const {
    kvtransfer::KvTransfer params = hand_off_->params_of(transfer);
    params.finished = false;
    return params;
  }

 private:
  std::unique_ptr<HandOff> hand_off_;
  std::unique_ptr<Engine> engine_;
  std::map<uint64_t, Outcome> outcomes_;
  std::map<uint64_t, kvtransfer::KvTransfer> handed_over_;
};

Request request_of(uint64_t id, size_t tokens, int output = 8) {
  Request request;
  request.id = id;
  for (size_t i = 0; i < tokens; ++i) {
    request.tokens.push_back(static_cast<int32_t>((i * 7 + id * 13 + i / 9) % 250));
  }
  request.sampling.max_tokens = output;
  request.sampling.ignore_eos = true;
  return request;
}

Request prefill_of(Request request, const std::string& transfer) {
  request.sampling = {};
  request.sampling.max_tokens = 1;
  request.hand_over = transfer;
  return request;
}

class Pair : public testing::Test {
 protected:
  Pair() { make(); }
  template <typename Fact>
  void until(Fact fact, bool prefill = true, CallSite from = CallSite::here()) {
    const auto turn = [&] {
      if (prefill) p_->turn();
      d_->turn();
    };
    const auto state = [&] {
      return (p_ ? "prefill: " + serve::state_of(p_->engine()) : "") +
             "decode: " + serve::state_of(d_->engine());
    };
    baton::until(fact, turn, state, from);
  }
  void make(const HandOffOptions& prefill = {}, const HandOffOptions& decode = {},
            Time silence = seconds(1)) {
    p_.reset();
    d_.reset();
    p_.emplace("prefill", clock_, EngineOptions{.blocks = 64, .token_budget = 64}, prefill);
    d_.emplace(
        "decode", clock_,
        EngineOptions{
            .blocks = 64, .token_budget = 64, .min_remote_tokens = 8, .load_silence = silence},
        decode);
  }
  // One request, in turn or at once; decode's answer, which has to be right.
  Outcome& answer(Request request, bool together) {
    const uint64_t id = request.id;
    const std::string transfer = absl::StrCat("transfer ", id);
    std::map<uint64_t, Outcome> want = serve::run_one_at_a_time({request});
    Request there = prefill_of(request, transfer);
    if (!together) {
      p_->submit(std::move(there));
      until([&] { return p_->outcome(id).finished; });
      request.remote_prefill = p_->handed_over(id);
      EXPECT_TRUE(request.remote_prefill.has_value());
      d_->submit(std::move(request));
    } else {
      request.remote_prefill = p_->at(transfer);
      d_->submit(std::move(request));
      for (int i = 0; i < 20; ++i) d_->turn();
      p_->submit(std::move(there));
    }
    until([&] { return d_->outcome(id).finished; });
    EXPECT_EQ(d_->outcome(id).tokens, want[id].tokens);
    return d_->outcome(id);
  }
  std::string why(uint64_t id) { return std::string(d_->outcome(id).metrics.load_error.message()); }

  ManualClock clock_;
  std::optional<Half> p_;
  std::optional<Half> d_;
};

TEST_F(Pair, GivesTheSameTokensAsOneEngine) {
  std::vector<Request> requests = serve::random_requests(5, 60);
  for (Request& request : requests) request.prefill_address.clear();
  const auto want = serve::run_one_at_a_time(requests);
  size_t asked = 0, at_once = 0;
  std::mt19937_64 random(1);
  std::map<uint64_t, bool> sent;
  until([&] {
    if (asked < requests.size() && random() % 3 == 0) {
      const Request& request = requests[asked++];
      const std::string transfer = absl::StrCat("transfer ", request.id);
      p_->submit(prefill_of(request, transfer));
      if (random() % 2 == 0) {
        Request here = request;
        here.remote_prefill = p_->at(transfer);
        d_->submit(std::move(here));
        sent[request.id] = true;
        ++at_once;
      }
    }
    for (size_t i = 0; i < asked; ++i) {
      const uint64_t id = requests[i].id;
      if (sent[id] || !p_->outcome(id).finished) continue;
      Request here = requests[i];
      here.remote_prefill = p_->handed_over(id);
      EXPECT_TRUE(here.remote_prefill.has_value()) << p_->outcome(id).status;
      d_->submit(std::move(here));
      sent[id] = true;
    }
    return asked == requests.size() && d_->outcomes().size() == requests.size() &&
           !d_->engine().has_work();
  });
  serve::expect_same(want, d_->outcomes());
  EXPECT_GT(at_once, 10u);
  EXPECT_EQ(d_->engine().stats().loads_failed, 0u);
  EXPECT_GT(d_->engine().stats().loaded_tokens, 500u);
  until([&] { return p_->quiet() && d_->quiet(); });
  EXPECT_TRUE(p_->engine().check_integrity().ok());
  EXPECT_TRUE(d_->engine().check_integrity().ok());
}

TEST_F(Pair, LoadsAllThatFillsABlock) {
  for (const bool together : {false, true}) {
    const Outcome& outcome = answer(request_of(together ? 1 : 2, 100), together);
    EXPECT_EQ(outcome.metrics.loaded_tokens, 96u);
    EXPECT_TRUE(outcome.metrics.load_error.ok()) << outcome.metrics.load_error;
  }
}

TEST_F(Pair, AnotherCheckpointIsRefusedAndRecomputed) {
  make({.model = "another checkpoint"});
  const Outcome& outcome = answer(request_of(1, 100), false);
  EXPECT_EQ(outcome.metrics.loaded_tokens, 0u);
  EXPECT_THAT(why(1), HasSubstr("another model"));
  answer(request_of(2, 100), true);
  EXPECT_THAT(why(2), HasSubstr("another model"));
  until([&] { return p_->quiet() && d_->quiet(); });  // it was told that nothing is wanted
}

TEST_F(Pair, WhatAnotherArithmeticComputedIsNotGivenToOthers) {
  make({.fingerprint = "another arithmetic"});
  answer(request_of(1, 100), false);
  EXPECT_EQ(d_->outcome(1).metrics.loaded_tokens, 96u);
  EXPECT_EQ(d_->engine().stats().cached_blocks, 0u);
  make();
  answer(request_of(1, 100), false);
  EXPECT_EQ(d_->outcome(1).metrics.loaded_tokens, 96u);
  EXPECT_GE(d_->engine().stats().cached_blocks, 6u);
}

TEST_F(Pair, AShortOrKnownPromptIsDeclinedAndItsBlocksComeBack) {
  answer(request_of(1, 100), false);
  answer(request_of(2, 6), false);  // too short to be asked for
  EXPECT_EQ(d_->outcome(2).metrics.loaded_tokens, 0u);
  EXPECT_TRUE(d_->outcome(2).metrics.load_error.ok());
  until([&] { return p_->quiet() && d_->quiet(); });
  Request again = request_of(3, 100);
  again.tokens = request_of(1, 100).tokens;
  answer(again, false);
  EXPECT_EQ(d_->outcome(3).metrics.cached_tokens, 96u);
  until([&] { return p_->quiet() && d_->quiet(); });
}

TEST_F(Pair, UnclaimedBlocksReturnAfterTheirLease) {
  p_->submit(prefill_of(request_of(1, 100), "t"));
  until([&] { return p_->outcome(1).finished; });
  ASSERT_TRUE(p_->handed_over(1).has_value());
  for (int i = 0; i < 50; ++i) p_->turn();
  EXPECT_EQ(p_->engine().stats().free_blocks, 64u - 7u);
  clock_.advance(seconds(31));
  until([&] { return p_->quiet(); });
  // Who comes now hears that it is too late, at once.
  Request request = request_of(1, 100);
  request.remote_prefill = p_->handed_over(1);
  d_->submit(std::move(request));
  until([&] { return d_->outcome(1).finished; });
  EXPECT_THAT(why(1), HasSubstr("no longer has it"));
}

TEST_F(Pair, AnAnsweringPrefillThatNeverComputesTimesOut) {
  Request request = request_of(1, 100);
  make({}, {}, seconds(30));  // the clock is quicker than its answers
  request.remote_prefill = p_->at("t");
  d_->submit(std::move(request));
  const Time began = clock_.now();
  until([&] {
    clock_.advance(milliseconds(1));
    return d_->outcome(1).finished;
  });
  EXPECT_THAT(why(1), HasSubstr("not complete after 20 s"));
  EXPECT_GE(clock_.now() - began, seconds(20));
}

// Whoever asks hears, whatever happens to the request: here a reader that says what a test says.
TEST_F(Pair, ARequestThatIsAbortedAtPrefillIsGoneForItsReader) {
  Stranger reader("reader/0");
  ASSERT_TRUE(reader.agent().fetch_metadata("prefill/0", p_->at("t").address).ok());
  until([&] { return reader.agent().has_remote("prefill/0"); });
  const KvGeometry geometry = serve::test_model().kv_geometry();
  reader.say("prefill/0", reader.want("t", true, geometry));
  until([&] { return reader.count("alive") > 0; });
  EXPECT_EQ(reader.count("layout"), 1U);
  EXPECT_EQ(reader.last()["kind"], "alive") << reader.state();
  p_->submit(prefill_of(request_of(1, 300), "t"));
  p_->turn();  // its first chunk
  EXPECT_TRUE(p_->engine().abort(1));
  until([&] { return reader.count("gone") > 0; });
  EXPECT_EQ(reader.last()["kind"], "gone") << reader.state();
  until([&] { return p_->quiet(); });
  // What is converted needs the engine's blocks no more, though the reader has read nothing.
  p_->submit(prefill_of(request_of(2, 100), "u"));
  reader.say("prefill/0", reader.want("u", false, geometry));
  until([&] {
    reader.count("");
    return p_->outcome(2).finished && p_->quiet();
  });
}

TEST_F(Pair, ARequestThatIsAbortedAtDecodeGivesItsBlocksBackAtBoth) {
  for (const bool early : {true, false}) {
    const uint64_t id = early ? 1 : 2;
    p_->submit(prefill_of(request_of(id, 100), absl::StrCat(id)));
    until([&] { return p_->outcome(id).finished; });
    Request request = request_of(id, 100);
    request.remote_prefill = p_->handed_over(id);
    d_->submit(std::move(request));
    if (!early) until([&] { return d_->engine().stats().loading == 1; });
    d_->engine().abort(id);
    until([&] { return p_->quiet() && d_->quiet(); });
  }
}

TEST_F(Pair, APrefillThatDiesIsFoundAndTheNextOneIsUsed) {
  answer(request_of(1, 100), false);
  p_->submit(prefill_of(request_of(2, 100), "t"));
  until([&] { return p_->outcome(2).finished; });
  Request request = request_of(2, 100);
  request.remote_prefill = p_->handed_over(2);
  p_.reset();
  d_->submit(std::move(request));
  until(
      [&] {
        clock_.advance(milliseconds(1));
        return d_->outcome(2).finished;
      },
      false);
  EXPECT_FALSE(d_->outcome(2).metrics.load_error.ok());
  EXPECT_EQ(d_->outcome(2).tokens, serve::run_one_at_a_time({request_of(2, 100)})[2].tokens);
  p_.emplace("prefill", clock_, EngineOptions{.blocks = 64, .token_budget = 64});
  answer(request_of(3, 100), false);
  EXPECT_EQ(d_->outcome(3).metrics.loaded_tokens, 96u) << why(3);
}

TEST_F(Pair, ANameInUseIsNotHandedOver) {
  p_->submit(prefill_of(request_of(1, 100), "t"));
  p_->submit(prefill_of(request_of(2, 100), "t"));
  until([&] { return p_->outcome(1).finished && p_->outcome(2).finished; });
  EXPECT_TRUE(p_->handed_over(1).has_value());
  EXPECT_FALSE(p_->handed_over(2).has_value());
}

TEST_F(Pair, APromptThatIsComputedTwiceIsHandedOverOnce) {
  // Another request of prefill's grows, and takes the blocks of the one that is handed over.
  p_.reset();
  p_.emplace("prefill", clock_, EngineOptions{.blocks = 20, .token_budget = 32});
  p_->submit(request_of(1, 110, 60));
  until([&] { return !p_->outcome(1).tokens.empty(); });
  Request request = request_of(2, 200);
  request.remote_prefill = p_->at("t");
  d_->submit(request);
  p_->submit(prefill_of(request_of(2, 200), "t"));
  until([&] { return d_->outcome(2).finished && p_->outcome(1).finished; });
  EXPECT_EQ(d_->outcome(2).tokens, serve::run_one_at_a_time({request_of(2, 200)})[2].tokens);
  EXPECT_EQ(d_->outcome(2).metrics.loaded_tokens, 192u) << why(2);
  EXPECT_GT(p_->outcome(2).metrics.preemptions, 0u);
  until([&] { return p_->quiet() && d_->quiet(); });
}

TEST_F(Pair, ARequestWithoutAKvAgentIsRefused) {
  auto alone = *Engine::create(serve::test_model(), serve::test_tokenizer(), {});
  const absl::Status status = alone->add_request(prefill_of(request_of(1, 100), "t"));
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("--kv-agent"));
  Request both = prefill_of(request_of(1, 100), "t");
  both.remote_prefill = p_->at("t");
  EXPECT_TRUE(absl::IsInvalidArgument(d_->engine().add_request(both)));
}

}  // namespace
}  // namespace baton::engine::handoff
