// The router's parts: picking workers, and putting a stream together from broken ones.
#include "engine/router/router.h"
#include "engine/router/stream_relay.h"
#include "engine/router/worker_body.h"
#include "tests/test.h"

namespace baton::engine::serve {
namespace {

using nlohmann::json;

// What a worker would stream for a reply of `tokens`, of which `resume` are there already.
std::string worker_stream(const std::vector<int32_t>& tokens, const std::vector<int32_t>& resume,
                          bool chat) {
  std::string out;
  for (size_t i = resume.size(); i < tokens.size() || i == resume.size(); ++i) {
    const bool any = i < tokens.size();
    const bool last = i + 1 >= tokens.size();
    const std::string text = any ? absl::StrCat("<", tokens[i], ">") : "";
    json choice = {{"index", 0},
                   {"logprobs", nullptr},
                   {"finish_reason", last ? json("length") : json(nullptr)},
                   {"token_ids", any ? json{tokens[i]} : json::array()}};
    if (chat) {
      if (i == resume.size()) {
        json first = {{"index", 0},
                      {"delta", {{"role", "assistant"}, {"content", ""}}},
                      {"finish_reason", nullptr}};
        out += http::sse({{"id", absl::StrCat("worker-", resume.size())},
                          {"object", "text_completion"},
                          {"created", resume.size()},
                          {"model", "m"},
                          {"choices", {first}}});
      }
      choice["delta"] = {{"content", text}};
    } else {
      choice["text"] = text;
    }
    out += http::sse({{"id", absl::StrCat("worker-", resume.size())},
                      {"object", "text_completion"},
                      {"created", resume.size()},
                      {"model", "m"},
                      {"choices", {choice}}});
    if (last) break;
  }
  out +=
      http::sse({{"id", "u"}, {"choices", json::array()}, {"usage", {{"completion_tokens", 4}}}});
  return out.append(http::kSseDone);
}

json whole(const std::vector<http::SharedBytes>& parts) {
  std::string text;
  for (const http::SharedBytes& part : parts) text += *part;
  return json::parse(text);
}

struct Relayed {
  std::string bytes;
  std::string whole;
};

// The first worker's stream is cut after `cut` bytes, in pieces of `piece` bytes.
Relayed relay_with_cut(size_t cut, size_t piece, bool stream, bool chat, bool ids) {
  json body = {{"stream", stream},
               {"seed", 1},
               {"return_token_ids", ids},
               {"stream_options", {{"include_usage", true}}}};
  if (chat) {
    body["messages"] = {{{"role", "user"}, {"content", "hi"}}};
  } else {
    body["prompt"] = "hi";
  }
  const auto request = std::make_shared<http::ApiRequest>(*http::read_api_request(body, chat));
  const auto head = std::make_shared<json>();
  Relayed out;
  const auto posted_body = std::make_shared<router::WorkerBody>(body, *request);
  router::StreamRelay relay(posted_body, request, 0, head, [&](std::string_view bytes) {
    out.bytes += bytes;
    return true;
  });
  const std::vector<int32_t> tokens = {11, 22, 33, 44};
  for (int attempt = 0; attempt < 10 && !relay.done(); ++attempt) {
    const json posted = whole(relay.next_body("P"));
    relay.begin();
    EXPECT_EQ(posted["kv_transfer_params"]["prefill"], "P");
    EXPECT_EQ(posted["seed"], 1);
    const auto resume =
        posted["kv_transfer_params"]["resume_token_ids"].get<std::vector<int32_t>>();
    std::string bytes = worker_stream(tokens, resume, chat);
    if (attempt == 0) bytes.resize(std::min(cut, bytes.size()));
    for (size_t at = 0; at < bytes.size() && !relay.done(); at += piece) {
      EXPECT_TRUE(relay.receive(std::string_view(bytes).substr(at, piece)));
    }
  }
  EXPECT_TRUE(relay.done());
  if (stream) out.bytes += router::end_of_stream(*request, head, {&relay});
  out.whole = router::whole_reply(*request, head, {&relay});
  return out;
}

TEST(StreamRelay, NoCutRepeatsOrLosesAToken) {
  for (bool chat : {false, true}) {
    const size_t length = worker_stream({11, 22, 33, 44}, {}, chat).size();
    const Relayed want = relay_with_cut(length, 1 << 20, true, chat, true);
    EXPECT_NE(want.bytes.find("[44]"), std::string::npos);
    EXPECT_TRUE(want.bytes.ends_with(http::kSseDone));
    const Relayed want_whole = relay_with_cut(length, 1 << 20, false, chat, true);
    for (size_t cut = 0; cut < length; ++cut) {
      Relayed got = relay_with_cut(cut, 1 + cut % 7, true, chat, true);
      // The head is that of the first event that arrived; a cut before it changes nothing else.
      ASSERT_EQ(got.bytes, want.bytes) << "cut after " << cut << " bytes";
      got = relay_with_cut(cut, 1 + cut % 7, false, chat, true);
      ASSERT_EQ(got.whole, want_whole.whole) << "cut after " << cut << " bytes";
      ASSERT_EQ(got.bytes, "");
    }
  }
}

TEST(StreamRelay, TokenIdsAreShownOnRequestOnly) {
  EXPECT_EQ(relay_with_cut(0, 64, true, false, false).bytes.find("token_ids"), std::string::npos);
  EXPECT_EQ(relay_with_cut(0, 64, false, false, false).whole.find("token_ids"), std::string::npos);
  const json whole = json::parse(relay_with_cut(0, 64, false, false, true).whole);
  EXPECT_EQ(whole["choices"][0]["token_ids"], (json{11, 22, 33, 44}));
  EXPECT_EQ(whole["choices"][0]["text"], "<11><22><33><44>");
  EXPECT_EQ(whole["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(whole["usage"]["completion_tokens"], 4);
}

// The relay of one answer that a worker has begun.
std::unique_ptr<router::StreamRelay> begun_relay() {
  const json body = {{"prompt", "x"}, {"stream", true}};
  const auto request = std::make_shared<http::ApiRequest>(*http::read_api_request(body, false));
  auto relay = std::make_unique<router::StreamRelay>(
      std::make_shared<router::WorkerBody>(body, *request), request, 0, std::make_shared<json>(),
      [](std::string_view) { return true; });
  relay->next_body("");
  return relay;
}

TEST(StreamRelay, WorkerErrorsAreToldApart) {
  const auto error_after = [](std::string_view bytes) {
    const auto relay = begun_relay();
    EXPECT_FALSE(relay->receive(bytes));
    return relay->worker_error().code();
  };
  EXPECT_EQ(
      error_after(
          "data: {\"error\":{\"message\":\"too long\",\"type\":\"invalid_request_error\"}}\n\n"),
      absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(error_after("data: {\"error\":{\"message\":\"broken\",\"type\":\"server_error\"}}\n\n"),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(error_after("data: {{{\n\n"), absl::StatusCode::kUnavailable);
  // As vLLM says it.
  EXPECT_EQ(error_after("data: {\"error\":{\"type\":\"InternalServerError\",\"code\":500}}\n\n"),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(error_after("data: {\"error\":{\"type\":\"NotFoundError\",\"code\":404}}\n\n"),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(error_after("data: {\"error\":{\"type\":\"InternalServerError\"}}\n\n"),
            absl::StatusCode::kUnavailable);
}

TEST(StreamRelay, HostileEventsAreHarmless) {
  for (const char* event :
       {"data: 5\n\n", "data: []\n\n", "data: {\"choices\":5}\n\n", "data: {\"choices\":[5]}\n\n",
        "data: {\"choices\":[{\"token_ids\":7,\"text\":8,\"finish_reason\":9}]}\n\n",
        "data: [DONE]\n\n", "data: {\"choices\":[{\"logprobs\":{\"a\":{\"b\":1}}}]}\n\n"}) {
    const auto relay = begun_relay();
    relay->receive(event);
    EXPECT_FALSE(relay->done()) << event;
  }
}

TEST(WorkerBody, IsTheClientsWithOneChoice) {
  const json body = {{"prompt", {"one \"", "two"}},
                     {"n", 2},
                     {"seed", 5},
                     {"max_tokens", 3},
                     {"stream_options", {{"continuous_usage_stats", true}}}};
  const auto request = *http::read_api_request(body, false);
  const router::WorkerBody posted(body, request);
  json want = {{"prompt", "two"},
               {"seed", static_cast<int64_t>(http::seed_of_choice(5, 1))},
               {"max_tokens", 3},
               {"stream", true},
               {"stream_options", {{"continuous_usage_stats", true}, {"include_usage", true}}},
               {"return_token_ids", true},
               {"kv_transfer_params", {{"prefill", "P"}, {"resume_token_ids", {7, 8}}}}};
  EXPECT_EQ(whole(posted.of_choice(3, "P", {7, 8})), want);
  want["prompt"] = "one \"";
  want["seed"] = 5;
  want["kv_transfer_params"] = {{"prefill", ""}, {"resume_token_ids", json::array()}};
  EXPECT_EQ(whole(posted.of_choice(0, "", {})), want);

  const json ids = {{"prompt", {1, 2, 3}}, {"kv_transfer_params", {{"resume_token_ids", {9}}}}};
  const auto of_ids = *http::read_api_request(ids, false);
  const json of_tokens = whole(router::WorkerBody(ids, of_ids).of_choice(0, "", {9}));
  EXPECT_EQ(of_tokens["prompt"], (json{1, 2, 3}));
  EXPECT_EQ(of_tokens["kv_transfer_params"]["resume_token_ids"], (json{9}));

  const json chat = {{"messages", {{{"role", "user"}, {"content", "hi"}}}}, {"n", 2}};
  const auto of_chat = *http::read_api_request(chat, true);
  const json of_messages = whole(router::WorkerBody(chat, of_chat).of_choice(1, "", {}));
  EXPECT_EQ(of_messages["messages"], chat["messages"]);
  EXPECT_FALSE(of_messages.contains("n"));
}

TEST(WorkerBody, WhatChoicesHaveInCommonIsThereOnce) {
  const std::string prompt(size_t{1} << 20, 'a');
  const json body = {{"prompt", prompt}, {"n", 128}};
  const auto request = *http::read_api_request(body, false);
  const router::WorkerBody posted(body, request);
  const auto first = posted.of_choice(0, "", {});
  for (size_t choice = 0; choice < 128; ++choice) {
    const auto parts = posted.of_choice(choice, "P", {1, 2, 3});
    size_t own = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      if (parts[i] != first[i]) own += parts[i]->size();
    }
    EXPECT_LT(own, 200u);
    EXPECT_GE(posted.size(choice), prompt.size());
  }
}

TEST(Router, RefusesBadOptions) {
  EXPECT_EQ(router::Router::start({}).status().code(), absl::StatusCode::kInvalidArgument);
  const absl::Status status = router::Router::start({.decode = {"localhost:1"}}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("http://"), absl::string_view::npos);
}

}  // namespace
}  // namespace baton::engine::serve
