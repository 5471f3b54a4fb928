// Pairs that the router drives by vLLM's kv_transfer_params: what either half is asked, and that
// decode computes what prefill does not hand over. The workers here say what the test tells them.
#include "absl/strings/match.h"
#include "engine/http/openai/openai_reply.h"
#include "tests/routing/fake_worker.h"
#include "tests/routing/routing_fixture.h"
#include "tests/test.h"

namespace baton::engine::serve {
namespace {

using namespace std::chrono_literals;

std::string prefilled(const json& params) {
  return json{{"id", "p"}, {"choices", {{{"text", "x"}}}}, {"kv_transfer_params", params}}.dump();
}

// As NixlConnector answers: the router need not know what any of it means.
const json kNixl = {{"do_remote_prefill", true},
                    {"do_remote_decode", false},
                    {"remote_block_ids", {{3, 1, 4}, {1, 5}}},
                    {"remote_engine_id", "e-1"},
                    {"remote_host", "10.0.0.1"},
                    {"remote_port", 5600},
                    {"tp_size", 2}};
// As Baton's connectors do.
json by_agent(const std::string& transfer = "t", const std::string& agent = "agent") {
  return {{"do_remote_prefill", true},       {"transfer_id", transfer}, {"remote_agent", agent},
          {"remote_address", "127.0.0.1:9"}, {"remote_finished", true}, {"tp_size", 2}};
}

router::RouterOptions pairs_of(std::vector<std::string> prefill, std::vector<std::string> decode) {
  router::RouterOptions options = options_for(std::move(decode));
  options.prefill = std::move(prefill);
  return options;
}

int64_t handed(const router::Router& router) {
  return metric(router.port(), "baton_router_handed_over_total");
}
int64_t not_handed(const router::Router& router) {
  return metric(router.port(), "baton_router_not_handed_over_total");
}

void expect_answered(const httplib::Result& result) {
  ASSERT_TRUE(result);
  EXPECT_EQ(result->status, 200) << result->body;
  const Streamed got = parse_stream(result->body);
  EXPECT_TRUE(got.done);
  EXPECT_EQ(got.tokens, parse_stream(whole_answer()).tokens);
}

// No KV is spoken of: decode computes.
void expect_alone(const json& question) {
  EXPECT_EQ(question["kv_transfer_params"],
            (json{{"prefill", ""}, {"resume_token_ids", json::array()}}));
}

TEST(RoutingPairs, DecodeIsToldWhatPrefillAnswered) {
  FakeWorker prefill(kVllm), decode(kVllm);
  prefill.answer(200, prefilled(kNixl));
  decode.answer(200, whole_answer());
  const auto router = *router::Router::start(pairs_of({prefill.url()}, {decode.url()}));
  json request = stream_request();
  request["min_tokens"] = 4;
  for (int i = 0; i < 2; ++i) expect_answered(post(router->port(), request));
  for (size_t i = 0; i < 2; ++i) {
    const json asked = prefill.question(i);
    EXPECT_EQ(asked["prompt"], request["prompt"]);
    EXPECT_EQ(asked["max_tokens"], 1);
    EXPECT_EQ(asked["kv_transfer_params"]["do_remote_decode"], true);
    EXPECT_FALSE(asked["kv_transfer_params"].contains("transfer_id"));
    for (const char* of_answer : {"stream", "stream_options", "min_tokens", "return_token_ids"}) {
      EXPECT_FALSE(asked.contains(of_answer)) << of_answer;
    }
    EXPECT_EQ(decode.params(i), kNixl);
    EXPECT_EQ(decode.question(i)["max_tokens"], request["max_tokens"]);
    EXPECT_EQ(decode.question(i)["min_tokens"], 4);
    EXPECT_EQ(decode.question(i)["stream"], true);
  }
  const json page = health(router->port());
  for (const json& worker : page["workers"]) EXPECT_EQ(worker["model"], "served");
  EXPECT_EQ(handed(*router), 2);
  EXPECT_EQ(not_handed(*router), 0);
  EXPECT_EQ(of_worker(router->port(), "in_flight", prefill.url()), 0);
}

// Baton's connectors answer who they are: after the first answer both halves are asked at once.
TEST(RoutingPairs, BothAreAskedAtOnceWherePrefillsAgentIsKnown) {
  for (const Make make : {kVllm, kOursWithAgent}) {
    const size_t in_turn = make == kVllm ? 1 : 0;
    FakeWorker prefill(make), decode(kOursWithAgent);
    decode.answer(200, whole_answer());
    const auto router = *router::Router::start(pairs_of({prefill.url()}, {decode.url()}));
    if (in_turn == 1) {
      prefill.answer(200, prefilled(by_agent("first")));
      expect_answered(post(router->port(), stream_request()));
      EXPECT_EQ(decode.params(0), by_agent("first"));
      prefill.answer(0, "");
    }
    expect_answered(post(router->port(), stream_request()));  // though prefill has not answered
    until([&] { return prefill.asked() == 1 + in_turn; });
    const json at_prefill = prefill.params(in_turn);
    const json at_decode = decode.params(in_turn);
    EXPECT_EQ(at_prefill["do_remote_decode"], true);
    EXPECT_EQ(at_prefill["transfer_id"].get<std::string>().size(), 32u);
    EXPECT_EQ(at_decode["transfer_id"], at_prefill["transfer_id"]);
    EXPECT_EQ(at_decode["do_remote_prefill"], true);
    EXPECT_EQ(at_decode["remote_agent"], "agent");
    EXPECT_EQ(at_decode["remote_address"], in_turn == 1 ? "127.0.0.1:9" : "127.0.0.1:7");
    EXPECT_FALSE(at_decode.contains("remote_finished"));
    EXPECT_EQ(at_decode["tp_size"], in_turn == 1 ? 2 : 1);  // ours have one agent
    EXPECT_EQ(not_handed(*router), 0);
  }
}

// Promise(serving): What prefill does not hand over by `kv_transfer_params` is computed at decode |
//   decode is asked again before its first token
TEST(RoutingPairs, WhatPrefillDoesNotHandOverDecodeComputes) {
  const std::pair<int, std::string> answers[] = {
      {200, prefilled(nullptr)}, {200, "no JSON"},          {200, R"({"kv_transfer_params": 7})"},
      {400, R"({"error": {}})"}, {429, R"({"error": {}})"}, {500, "it failed"}};
  for (const Make make : {kVllm, kOursWithAgent}) {
    for (const auto& [status, body] : answers) {
      FakeWorker prefill(kVllm), decode(make);
      prefill.answer(status, body);
      decode.answer(200, whole_answer());
      const auto router = *router::Router::start(pairs_of({prefill.url()}, {decode.url()}));
      expect_answered(post(router->port(), stream_request()));
      ASSERT_EQ(decode.asked(), 1u);
      expect_alone(decode.question(0));
      EXPECT_EQ(handed(*router), 0);
      EXPECT_EQ(not_handed(*router), 1);
      EXPECT_EQ(metric(router->port(), "baton_router_retries_total"), 0);
      EXPECT_EQ(of_worker(router->port(), "worker_up", prefill.url()), 1);
    }
  }
}

TEST(RoutingPairs, DecodeThatWaitsForPrefillIsAskedAnewWherePrefillSaysNo) {
  FakeWorker prefill(kOursWithAgent), decode(kVllm);
  const auto router = *router::Router::start(pairs_of({prefill.url()}, {decode.url()}));
  std::thread client([&] { expect_answered(post(router->port(), stream_request())); });
  until([&] { return prefill.asked() == 1 && decode.asked() == 1; });
  EXPECT_EQ(decode.params(0)["do_remote_prefill"], true);
  prefill.answer(429, R"({"error": {}})");
  until([&] { return decode.asked() == 2 && decode.left == 1; });
  expect_alone(decode.question(1));
  decode.answer(200, whole_answer());
  client.join();
  EXPECT_EQ(not_handed(*router), 1);
}

TEST(RoutingPairs, WhatAPrefillThatBreaksOffWasAskedDecodeComputes) {
  for (const Make make : {kVllm, kOursWithAgent}) {
    auto prefill = std::make_unique<FakeWorker>(make);
    const std::string url = prefill->url();
    FakeWorker decode(kVllm);
    const auto router = *router::Router::start(pairs_of({url}, {decode.url()}));
    std::thread client([&] { expect_answered(post(router->port(), stream_request())); });
    const size_t before = make == kVllm ? 0 : 1;
    until([&] { return prefill->asked() == 1 && decode.asked() == before; });
    prefill = nullptr;
    until([&] { return decode.asked() == before + 1; });
    expect_alone(decode.question(before));
    decode.answer(200, whole_answer());
    client.join();
    EXPECT_EQ(of_worker(router->port(), "worker_up", url), 0);
    // And it is not asked again.
    expect_answered(post(router->port(), stream_request()));
    expect_alone(decode.question(before + 1));
  }
}

// Its connection stays, and nobody asks it but for its health.
TEST(RoutingPairs, WhatAPrefillThatIsFoundDownWasAskedDecodeComputes) {
  std::atomic<bool> well = true;
  http::HttpListener prefill;
  std::atomic<int> asked = 0;
  std::vector<Exchange> held;
  prefill.route("GET", "/health", [&](const Exchange& exchange) {
    exchange->reply(well ? 200 : 503, "text/plain", "");
  });
  prefill.route("POST", "/v1/completions", [&](const Exchange& exchange) {
    held.push_back(exchange);
    ++asked;
  });
  ASSERT_TRUE(prefill.listen("127.0.0.1", 0).ok());
  FakeWorker decode(kVllm);
  decode.answer(200, whole_answer());
  router::RouterOptions options =
      pairs_of({absl::StrCat("http://127.0.0.1:", prefill.port())}, {decode.url()});
  options.health_interval = 5ms;
  const auto router = *router::Router::start(options);
  std::thread client([&] { expect_answered(post(router->port(), stream_request())); });
  until([&] { return asked == 1; });
  well = false;
  client.join();
  expect_alone(decode.question(0));
  prefill.stop();
}

// As vLLM's decode does by default where the KV does not come; and where it has no room, which is
// not charged.
TEST(RoutingPairs, WhatDecodeFailsAtIsComputedTheNextTime) {
  for (const auto& [status, retries] : {std::pair(500, 1), {429, 0}}) {
    FakeWorker prefill(kVllm), decode(kVllm), other(kVllm);
    prefill.answer(200, prefilled(kNixl));
    decode.answer(status, R"({"error": {"message": "no"}})");
    other.answer(200, whole_answer());
    const auto router =
        *router::Router::start(pairs_of({prefill.url()}, {decode.url(), other.url()}));
    expect_answered(post(router->port(), stream_request()));
    EXPECT_EQ(prefill.asked(), 1u);
    EXPECT_EQ(decode.params(0), kNixl);
    expect_alone(other.question(0));
    EXPECT_EQ(metric(router->port(), "baton_router_retries_total"), retries);
  }
}

constexpr char kFailedLoad[] =
    R"({"error": {"message": "kv load failed", "type": "InternalServerError", "code": 500}})";

std::string error_event(const std::string& error) {
  return absl::StrCat("data: ", error, "\n\ndata: [DONE]\n\n");
}

// However it says so: the same worker is asked again, for there is no other.
TEST(RoutingPairs, WhateverDecodeSaysOfWhatWasHandedOverItIsAskedAgainWithout) {
  const std::pair<int, std::string> answers[] = {{200, error_event(kFailedLoad)},
                                                 {200, "data: {no JSON\n\n"},
                                                 {500, kFailedLoad},
                                                 {400, kFailedLoad},
                                                 {404, kFailedLoad},
                                                 {422, kFailedLoad}};
  for (const Make make : {kVllm, kOursWithAgent}) {
    for (const auto& [status, body] : answers) {
      for (const bool stream : {true, false}) {
        FakeWorker prefill(make), decode(kVllm);
        prefill.answer(200, prefilled(kNixl));
        decode.answer(200, whole_answer());
        decode.answer_behind_prefill(status, body);
        const auto router = *router::Router::start(pairs_of({prefill.url()}, {decode.url()}));
        json request = stream_request();
        request["stream"] = stream;
        const auto result = post(router->port(), request);
        ASSERT_EQ(result->status, 200) << status << " " << result->body;
        if (stream) expect_answered(result);
        ASSERT_EQ(decode.asked(), 2u);
        EXPECT_EQ(decode.params(0)["do_remote_prefill"], true);
        expect_alone(decode.question(1));
        EXPECT_EQ(metric(router->port(), "baton_router_retries_total"), 1);
      }
    }
  }
}

TEST(RoutingPairs, WhatDecodeRefusesWithoutKvTooTheClientIsTold) {
  for (const int status : {400, 404, 422}) {
    FakeWorker prefill(kVllm), decode(kVllm);
    prefill.answer(200, prefilled(kNixl));
    decode.answer(status, R"({"error": {"message": "not so"}})");
    const auto router = *router::Router::start(pairs_of({prefill.url()}, {decode.url()}));
    const auto result = post(router->port(), stream_request());
    EXPECT_EQ(result->status, status);
    EXPECT_EQ(json::parse(result->body)["error"]["message"], "not so");
    EXPECT_EQ(decode.asked(), 2u);
  }
}

TEST(RoutingPairs, TheCodeOfAnErrorInAStreamIsTheClientsStatus) {
  for (const int code : {400, 404, 422, 429, 500, 503}) {
    FakeWorker prefill(kVllm), decode(kVllm);
    prefill.answer(500, "");
    decode.answer(200, error_event(json{{"error", {{"message", "no"}, {"code", code}}}}.dump()));
    router::RouterOptions options = pairs_of({prefill.url()}, {decode.url()});
    options.max_retries = 1;
    const auto router = *router::Router::start(options);
    EXPECT_EQ(post(router->port(), stream_request())->status, code);
    EXPECT_EQ(decode.asked(), code < 500 ? 1u : 2u);
  }
}

// As of a worker that does not know return_token_ids.
std::vector<std::string> without_ids(std::vector<std::string> events) {
  for (std::string& event : events) {
    if (event == http::kSseDone) continue;
    json data = json::parse(event.substr(6));
    for (json& choice : data["choices"]) choice.erase("token_ids");
    event = http::sse(data);
  }
  return events;
}

// Neither can another worker of vLLM go on behind known ids.
TEST(RoutingPairs, TextIsRepeatedOnlyIfAnotherWorkerCanContinue) {
  Worker well;
  const std::vector<std::string> with_ids = events_of(well.port());
  const std::string text = parse_stream(first(with_ids, with_ids.size())).text;
  for (const Make make : {kVllm, kOursWithAgent}) {
    for (const bool ids : {true, false}) {
      if (ids && make == kOursWithAgent) continue;  // these go on
      const std::vector<std::string> events = ids ? with_ids : without_ids(with_ids);
      for (const bool stream : {true, false}) {
        FakeWorker prefill(kVllm), decode(make), other(make);
        prefill.answer(200, prefilled(kNixl));
        decode.answer(200, first(events, 3));  // and ends there
        other.answer(200, first(events, events.size()));
        const auto router =
            *router::Router::start(pairs_of({prefill.url()}, {decode.url(), other.url()}));
        json request = stream_request();
        request["stream"] = stream;
        const std::string got = post(router->port(), request)->body;
        if (stream) {
          const size_t error = got.find(R"(data: {"error":)");
          ASSERT_NE(error, std::string::npos) << got;
          EXPECT_EQ(parse_stream(got.substr(0, error)).text, parse_stream(first(events, 3)).text);
          EXPECT_EQ(other.asked(), 0u);
        } else {
          EXPECT_EQ(json::parse(got)["choices"][0]["text"], text) << got;
          ASSERT_EQ(other.asked(), 1u);
          expect_alone(other.question(0));
        }
      }
    }
  }
}

// What it took to begin is learnt from, so that a late prefill is known for one, and prefill's part
// is over.
TEST(RoutingPairs, AnAnswerHasBegunWithItsTextThoughNoIdsAreSaid) {
  Worker well;
  const std::vector<std::string> events = without_ids(events_of(well.port()));
  FakeWorker prefill(kVllm), decode(kVllm);
  prefill.answer(200, prefilled(kNixl));
  decode.begin(first(events, 3));
  const auto router = *router::Router::start(pairs_of({prefill.url()}, {decode.url()}));
  Streamed got;
  std::thread client([&] { got = parse_stream(post(router->port(), stream_request())->body); });
  until([&] { return decode.asked() == 1; });
  until([&] { return of_worker(router->port(), "in_flight", prefill.url()) == 0; });
  std::string rest;
  for (size_t i = 3; i < events.size(); ++i) rest += events[i];
  decode.answer(200, rest);
  client.join();
  EXPECT_EQ(got.text, parse_stream(first(events, events.size())).text);
}

// Prefill's part is the prompt: what is behind it the next worker computes with it.
TEST(RoutingPairs, WhatHasBegunGoesOnWithoutPrefill) {
  Worker well;
  const std::vector<std::string> events = events_of(well.port());
  std::string rest;
  for (size_t i = 3; i < events.size(); ++i) rest += events[i];
  FakeWorker prefill(kVllm), decode(kOursWithAgent), other(kOursWithAgent);
  prefill.answer(500, "not now");
  decode.answer(200, first(events, 3));  // and ends there
  other.answer(200, rest);
  const auto router =
      *router::Router::start(pairs_of({prefill.url()}, {decode.url(), other.url()}));
  const Streamed got = parse_stream(post(router->port(), stream_request())->body);
  EXPECT_EQ(got.tokens, parse_stream(first(events, events.size())).tokens);
  EXPECT_EQ(other.params(0)["resume_token_ids"].size(), 3u);
  EXPECT_EQ(prefill.asked(), 1u);
}

TEST(RoutingPairs, EachChoiceIsATransferOfItsOwn) {
  FakeWorker prefill(kOursWithAgent), decode(kVllm);
  decode.answer(200, whole_answer());
  const auto router = *router::Router::start(pairs_of({prefill.url()}, {decode.url()}));
  json request = request_body();
  request["n"] = 2;
  EXPECT_EQ(post_json(router->port(), request)["choices"].size(), 2u);
  until([&] { return prefill.asked() == 2; });
  EXPECT_NE(prefill.params(0)["transfer_id"], prefill.params(1)["transfer_id"]);
  for (size_t i = 0; i < 2; ++i) EXPECT_FALSE(prefill.question(i).contains("n"));
}

TEST(RoutingPairs, AChatIsAskedOfPrefillAsAChat) {
  FakeWorker prefill(kVllm), decode(kVllm);
  prefill.answer(500, "");
  decode.answer(400, R"({"error": {"message": "no chats here"}})");
  const auto router = *router::Router::start(pairs_of({prefill.url()}, {decode.url()}));
  const json messages = {{{"role", "user"}, {"content", "hi"}}};
  post(router->port(), {{"messages", messages}, {"max_completion_tokens", 5}},
       "/v1/chat/completions");
  EXPECT_EQ(prefill.question(0)["messages"], messages);
  EXPECT_EQ(prefill.question(0)["max_tokens"], 1);
  EXPECT_FALSE(prefill.question(0).contains("max_completion_tokens"));
  EXPECT_EQ(decode.question(0)["messages"], messages);
  EXPECT_EQ(decode.question(0)["max_completion_tokens"], 5);
}

// Its log-probabilities are made where it is computed.
TEST(RoutingPairs, APromptThatIsRatedIsComputedAtDecode) {
  FakeWorker prefill(kVllm), decode(kVllm);
  decode.answer(400, R"({"error": {"message": "no"}})");
  const auto router = *router::Router::start(pairs_of({prefill.url()}, {decode.url()}));
  json request = request_body();
  request["echo"] = true;
  request["logprobs"] = 1;
  post(router->port(), request);
  EXPECT_EQ(decode.asked(), 1u);
  EXPECT_EQ(prefill.asked(), 0u);
}

// Where tokens are known, a prompt of a few is not worth the way.
TEST(RoutingPairs, AShortPromptIsComputedAtDecode) {
  FakeWorker prefill(kVllm), decode(kVllm);
  prefill.answer(200, prefilled(kNixl));
  decode.answer(200, whole_answer());
  const auto router = *router::Router::start(pairs_of({prefill.url()}, {decode.url()}));
  json request = stream_request();
  request["prompt"] = std::vector<int>(31, 5);
  post(router->port(), request);
  EXPECT_EQ(prefill.asked(), 0u);
  request["prompt"] = std::vector<int>(32, 5);
  post(router->port(), request);
  EXPECT_EQ(prefill.asked(), 1u);
}

// Two of ours are paired by their connectors, also where they could be otherwise.
TEST(RoutingPairs, OursAreToldOfTheConnector) {
  FakeWorker prefill(kOursAndPrefill), vllm(kVllm), decode(kOursWithAgent);
  decode.answer(200, whole_answer());
  vllm.answer(200, prefilled(kNixl));
  const auto router = *router::Router::start(pairs_of({prefill.url()}, {decode.url()}));
  expect_answered(post(router->port(), stream_request()));
  EXPECT_EQ(decode.params(0)["prefill"], "P");
  EXPECT_EQ(prefill.asked(), 0u);
  // Beside one of each make both are used, each in its way.
  const auto mixed = *router::Router::start(pairs_of({prefill.url(), vllm.url()}, {decode.url()}));
  for (int i = 0; i < 2; ++i) {
    json request = stream_request();
    request["prompt"] = absl::StrCat("prompt ", i);
    expect_answered(post(mixed->port(), request));
  }
  EXPECT_EQ(decode.params(1)["prefill"], "P");
  EXPECT_EQ(decode.params(2), kNixl);
}

// Decode has told all of itself, down to its name, before prefill tells what it is.
TEST(RoutingPairs, AHalfIsJudgedByWhatTheOtherTellsLater) {
  const std::string ours = R"({"address": "P"})";
  std::mutex mutex;
  Exchange waits;
  bool named = false;
  http::HttpListener prefill, decode;
  prefill.route("GET", "/v1/baton/address", [&](const Exchange& exchange) {
    const std::lock_guard lock(mutex);
    if (named) return exchange->reply(200, "application/json", ours);
    waits = exchange;
  });
  decode.route("GET", "/health",
               [](const Exchange& exchange) { exchange->reply(200, "text/plain", ""); });
  decode.route("GET", "/v1/models", [&](const Exchange& exchange) {
    const std::lock_guard lock(mutex);
    named = true;
    if (waits != nullptr) waits->reply(200, "application/json", ours);
    exchange->reply(404, "text/plain", "");
  });
  for (http::HttpListener* each : {&prefill, &decode})
    ASSERT_TRUE(each->listen("127.0.0.1", 0).ok());
  const auto url = [](const http::HttpListener& of) {
    return absl::StrCat("http://127.0.0.1:", of.port());
  };
  const auto router = *router::Router::start(pairs_of({url(prefill)}, {url(decode)}));
  const json page = health(router->port());
  EXPECT_EQ(page["workers"][0]["up"], false) << page;
  EXPECT_EQ(page["workers"][1]["up"], true) << page;
  prefill.stop();
  decode.stop();
}

}  // namespace
}  // namespace baton::engine::serve
