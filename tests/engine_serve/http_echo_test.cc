// What a model thinks of a prompt, and a checkpoint's own defaults.
#include "absl/strings/match.h"
#include "engine/router/router.h"
#include "tests/engine_serve/http_fixture.h"
#include "tests/test.h"

namespace baton::engine::serve {
namespace {

json greedy(const json& prompt, int max_tokens) {
  return {{"prompt", prompt},
          {"max_tokens", max_tokens},
          {"temperature", 0},
          {"logprobs", 2},
          {"ignore_eos", true}};
}

json choice_of(int port, const json& body) { return post_json(port, body)["choices"][0]; }

TEST(Echo, ThePromptIsRatedAsIfItHadBeenWritten) {
  // Small steps, so that the prompt comes in several pieces.
  Worker worker(test_model(), {.blocks = 256, .token_budget = 5, .max_sequences = 3});
  json first = greedy("And it came to pass", 12);
  first["return_token_ids"] = true;
  const json written = choice_of(worker.port(), first);
  std::vector<int32_t> tokens = test_tokenizer().encode("And it came to pass");
  const size_t prompt = tokens.size();
  for (const json& token : written["token_ids"]) tokens.push_back(token);

  for (int repeated = 0; repeated < 2; ++repeated) {  // the second finds the prefix cache full
    json body = greedy(tokens, 0);
    body["echo"] = true;
    const json reply = post_json(worker.port(), body);
    EXPECT_EQ(reply["usage"]["completion_tokens"], 0);
    const json& rated = reply["choices"][0];
    EXPECT_TRUE(absl::StartsWith(rated["text"].get<std::string>(), "And it came to pass"));
    EXPECT_EQ(rated["finish_reason"], "length");
    const json& got = rated["logprobs"];
    const json& want = written["logprobs"];
    ASSERT_EQ(got["token_logprobs"].size(), tokens.size());
    EXPECT_TRUE(got["token_logprobs"][0].is_null());
    EXPECT_TRUE(got["top_logprobs"][0].is_null());
    for (size_t i = 0; i < 12; ++i) {
      EXPECT_EQ(got["token_logprobs"][prompt + i], want["token_logprobs"][i]) << i;
      EXPECT_EQ(got["top_logprobs"][prompt + i], want["top_logprobs"][i]) << i;
      EXPECT_EQ(got["tokens"][prompt + i], want["tokens"][i]) << i;
    }
  }
}

TEST(Echo, PlainStreamedAndThroughARouterAreTheSame) {
  Worker worker;
  const auto router = *router::Router::start({.port = 0, .decode = {worker.url()}});
  for (const int max_tokens : {0, 1, 4}) {
    json body = greedy("And it came to pass", max_tokens);
    body["echo"] = true;
    const json whole = choice_of(worker.port(), body);
    EXPECT_TRUE(absl::StartsWith(whole["text"].get<std::string>(), "And it came to pass"));
    EXPECT_EQ(whole["logprobs"]["tokens"].size(), whole["logprobs"]["text_offset"].size());
    const json relayed = choice_of(router->port(), body);
    EXPECT_EQ(relayed["text"], whole["text"]);
    EXPECT_EQ(relayed["logprobs"], whole["logprobs"]);
    body["stream"] = true;
    for (const int port : {worker.port(), router->port()}) {
      const Streamed streamed = parse_stream(post(port, body)->body);
      EXPECT_EQ(streamed.text, whole["text"]);
      EXPECT_EQ(streamed.logprobs, whole["logprobs"]);
    }
  }
}

TEST(Echo, WithoutLogprobsItIsTheTextAlone) {
  Worker worker;
  json body = greedy("And it came to pass", 3);
  body.erase("logprobs");
  const json plain = choice_of(worker.port(), body);
  body["echo"] = true;
  const json echoed = choice_of(worker.port(), body);
  EXPECT_EQ(echoed["text"], "And it came to pass" + plain["text"].get<std::string>());
  EXPECT_TRUE(echoed["logprobs"].is_null());
  body["prompt"] = {99999};
  EXPECT_EQ(post(worker.port(), body)->status, 400);
}

TEST(Echo, AResumedStreamDoesNotRepeatThePrompt) {
  Worker worker;
  json body = greedy("And it came to pass", 6);
  body["echo"] = true;
  body["return_token_ids"] = true;
  const json whole = choice_of(worker.port(), body);
  json resumed = body;
  resumed["kv_transfer_params"] = {
      {"resume_token_ids", {whole["token_ids"][0], whole["token_ids"][1]}}};
  resumed["stream"] = true;
  const Streamed rest = parse_stream(post(worker.port(), resumed)->body);
  EXPECT_EQ(rest.logprobs["tokens"].size(), 4u);
  const std::string text = whole["text"];
  EXPECT_TRUE(absl::EndsWith(text, rest.text));
  EXPECT_LT(rest.text.size(), text.size() - 10);
  const json& offsets = whole["logprobs"]["text_offset"];
  EXPECT_EQ(rest.logprobs["text_offset"][0], offsets[offsets.size() - 4]);
}

TEST(Defaults, TheCheckpointsOwnCountWhereARequestSaysNothing) {
  const auto defaults = SamplingDefaults::parse(
      R"({"temperature":0, "top_k":-1, "top_p":0.9, "max_new_tokens":7, "eos_token_id":3})");
  ASSERT_TRUE(defaults.ok()) << defaults.status();
  Worker worker(test_model(), {.blocks = 256}, {.defaults = *defaults});
  Worker plain;
  const json want = choice_of(plain.port(), greedy("And it came to pass", 7));
  const json silent = {{"prompt", "And it came to pass"}, {"ignore_eos", true}};
  EXPECT_EQ(choice_of(worker.port(), silent)["text"], want["text"]);
  json other = silent;
  other.update({{"temperature", 1.0}, {"top_p", 1.0}, {"seed", 3}, {"max_tokens", 9}});
  EXPECT_EQ(choice_of(worker.port(), other)["text"], choice_of(plain.port(), other)["text"]);
}

TEST(Defaults, AFileThatIsWrongIsRefused) {
  EXPECT_TRUE(SamplingDefaults::parse("{}").ok());
  for (const char* text : {"{", R"({"temperature":"hot"})", R"({"top_p":0})", R"({"top_k":1.5})",
                           R"({"repetition_penalty":-1})", R"({"max_new_tokens":"all"})"}) {
    EXPECT_FALSE(SamplingDefaults::parse(text).ok()) << text;
  }
}

}  // namespace
}  // namespace baton::engine::serve
