// The HTTP face: OpenAI's shapes, errors, disconnects, and the router in front of dying workers.
#include <future>

#include "absl/strings/match.h"
#include "engine/http/openai/openai_request.h"
#include "engine/http/prompt_tokens.h"
#include "engine/router/router.h"
#include "tests/engine_serve/http_fixture.h"
#include "tests/no_descriptors.h"
#include "tests/test.h"

namespace baton::engine::serve {
namespace {

using testing::HasSubstr;

TEST(Http, CompletionsPlainAndStreamedAgree) {
  Worker worker;
  json body = request_body();
  const json whole = post_json(worker.port(), body);
  EXPECT_EQ(whole["object"], "text_completion");
  EXPECT_EQ(whole["model"], "tiny");
  EXPECT_EQ(whole["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(whole["choices"][0]["token_ids"].size(), 24u);
  EXPECT_EQ(whole["usage"]["completion_tokens"], 24);
  EXPECT_EQ(whole["usage"]["total_tokens"],
            24 + static_cast<int>(test_tokenizer().encode("And it came to pass").size()));

  body["stream"] = true;
  body["stream_options"] = {{"include_usage", true}};
  const httplib::Result result = post(worker.port(), body);
  ASSERT_TRUE(result);
  EXPECT_EQ(result->get_header_value("Content-Type"), "text/event-stream");
  const Streamed streamed = parse_stream(result->body);
  EXPECT_TRUE(streamed.done);
  EXPECT_EQ(streamed.text, whole["choices"][0]["text"]);
  EXPECT_EQ(json(streamed.tokens), whole["choices"][0]["token_ids"]);
  EXPECT_EQ(streamed.finish_reason, "length");
  EXPECT_EQ(streamed.usage["completion_tokens"], 24);
}

TEST(Http, ChatAndLogprobs) {
  Worker worker;
  json body = {{"messages", {{{"role", "user"}, {"content", "Who made the stars?"}}}},
               {"max_completion_tokens", 5},
               {"temperature", 0},
               {"ignore_eos", true},
               {"logprobs", true},
               {"top_logprobs", 2}};
  const json whole = post_json(worker.port(), body, "/v1/chat/completions");
  EXPECT_EQ(whole["object"], "chat.completion");
  EXPECT_EQ(whole["choices"][0]["message"]["role"], "assistant");
  ASSERT_EQ(whole["choices"][0]["logprobs"]["content"].size(), 5u);
  const json& first = whole["choices"][0]["logprobs"]["content"][0];
  EXPECT_EQ(first["top_logprobs"].size(), 2u);
  EXPECT_EQ(first["logprob"], first["top_logprobs"][0]["logprob"]);  // greedy
  body["stream"] = true;
  httplib::Result result = post(worker.port(), body, "/v1/chat/completions");
  ASSERT_TRUE(result);
  EXPECT_EQ(parse_stream(result->body, true).text, whole["choices"][0]["message"]["content"]);
  body.erase("logprobs");
  result = post(worker.port(), body, "/v1/chat/completions");
  EXPECT_EQ(result->status, 400);
  EXPECT_THAT(result->body, HasSubstr("top_logprobs"));
}

TEST(Http, SeveralPromptsAndChoices) {
  Worker worker;
  json body = request_body();
  body["prompt"] = {"And it came to pass", "In the beginning"};
  body["n"] = 2;
  const json both = post_json(worker.port(), body);
  ASSERT_EQ(both["choices"].size(), 4u);
  EXPECT_EQ(both["usage"]["completion_tokens"], 4 * 24);
  body["stream"] = true;
  const std::string streamed = post(worker.port(), body)->body;
  const auto router = *router::Router::start({.port = 0, .decode = {worker.url()}});
  body["stream"] = false;
  const json relayed = post_json(router->port(), body);
  for (size_t i = 0; i < 4; ++i) {
    // The same as alone, with the choice's own seed.
    json alone = request_body();
    alone["prompt"] = body["prompt"][i / 2];
    alone["seed"] = 7 + i % 2;
    const json want = post_json(worker.port(), alone)["choices"][0];
    EXPECT_EQ(both["choices"][i]["index"], i);
    EXPECT_EQ(both["choices"][i]["token_ids"], want["token_ids"]);
    EXPECT_EQ(relayed["choices"][i]["token_ids"], want["token_ids"]);
    EXPECT_NE(streamed.find(absl::StrCat("\"index\":", i)), std::string::npos);
  }
  EXPECT_NE(both["choices"][0]["token_ids"], both["choices"][1]["token_ids"]);
  EXPECT_EQ(relayed["usage"]["completion_tokens"], 4 * 24);
}

TEST(Http, ContentMayComeAsParts) {
  Worker worker;
  json body = {{"messages", {{{"role", "user"}, {"content", "Who made the stars?"}}}},
               {"max_tokens", 5},
               {"temperature", 0},
               {"repetition_penalty", 1.0},
               {"stop_token_ids", json::array()}};
  const auto text = [&] {
    return post_json(worker.port(), body,
                     "/v1/chat/completions")["choices"][0]["message"]["content"];
  };
  const json whole = text();
  body["messages"][0]["content"] = {{{"type", "text"}, {"text", "Who made the stars?"}}};
  EXPECT_EQ(text(), whole);
  body["messages"][0]["content"] = {{{"type", "image_url"}, {"image_url", {{"url", "x"}}}}};
  EXPECT_EQ(post(worker.port(), body, "/v1/chat/completions")->status, 400);
}

TEST(Http, EveryKeyOfAMessageIsUsedOrRefused) {
  const auto read = [](const json& message) {
    return http::read_api_request({{"messages", json::array({message})}}, true);
  };
  const auto refused = [&](json message, const char* words) {
    message.emplace("role", "user");
    const absl::Status status = read(message).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << message;
    EXPECT_NE(status.message().find(words), absl::string_view::npos) << status;
  };
  refused({{"content", "x"}, {"reasoning_content", "y"}}, "\"reasoning_content\" of a message");
  refused({{"content", "x"}, {"tool_calls", {{{"id", "1"}}}}}, "\"tool_calls\" of a message");
  refused({{"content", "x"}, {"weight", 0}}, "\"weight\" of a message");
  refused({{"contents", "x"}}, "did you mean content?");
  refused({{"content", "x"}, {"name", 5}}, "name of a message must be a string");
  refused({{"content", {{{"type", "text"}, {"text", "x"}, {"cache_control", {{"a", 1}}}}}}},
          "\"cache_control\" of a part of a message's content");
  // What an answer has and says nothing, clients send back.
  const auto answer = must(read({{"role", "assistant"},
                                 {"content", "x"},
                                 {"refusal", nullptr},
                                 {"annotations", json::array()},
                                 {"reasoning_content", ""},
                                 {"name", "Ann"}}));
  EXPECT_EQ(answer.prompts[0].text, "assistant Ann: x\nassistant:");
  const auto by_template = ChatTemplate::parse(
      "{% for m in messages %}{{ m.name | default('nobody') }} {{ m.content }}{% endfor %}");
  EXPECT_EQ(*http::chat_text(answer, *by_template), "Ann x");
  EXPECT_EQ(*http::chat_text(*read({{"role", "user"}, {"content", "x"}}), *by_template),
            "nobody x");
}

TEST(Http, ALimitByTwoNamesIsOne) {
  const auto limit = [](int old_name, int new_name) {
    return http::read_api_request({{"messages", {{{"role", "user"}, {"content", "x"}}}},
                                   {"max_tokens", old_name},
                                   {"max_completion_tokens", new_name}},
                                  true);
  };
  EXPECT_EQ(limit(7, 7)->sampling.max_tokens, 7);
  EXPECT_TRUE(absl::IsInvalidArgument(limit(7, 8).status())) << limit(7, 8).status();
}

TEST(Http, AModelIsFoundByItsName) {
  Worker worker(test_model(), {.blocks = 64}, {.model = "org/tiny"});
  const auto router = *router::Router::start({.port = 0, .decode = {worker.url()}});
  for (const int port : {worker.port(), router->port()}) {
    httplib::Client client = client_of(port);
    const json listed = json::parse(client.Get("/v1/models")->body)["data"][0];
    EXPECT_EQ(listed["id"], "org/tiny");
    for (const char* path : {"/v1/models/org/tiny", "/v1/models/org%2ftiny"}) {
      const httplib::Result found = client.Get(path);
      ASSERT_TRUE(found);
      EXPECT_EQ(found->status, 200) << found->body;
      EXPECT_EQ(json::parse(found->body), listed);
    }
    for (const char* path :
         {"/v1/models/tiny", "/v1/models/", "/v1/models/org%2", "/v1/models/%"}) {
      const httplib::Result lost = client.Get(path);
      ASSERT_TRUE(lost);
      EXPECT_EQ(lost->status, 404) << path;
      const json error = json::parse(lost->body)["error"];
      EXPECT_EQ(error["type"], "invalid_request_error");
      EXPECT_EQ(error["code"], "model_not_found");
      EXPECT_EQ(error["param"], "model");
    }
    EXPECT_EQ(client.Post("/v1/models/org/tiny", "{}", "application/json")->status, 405);
    const httplib::Result nowhere = client.Get("/v1/model/x");
    EXPECT_EQ(nowhere->status, 404);
    EXPECT_TRUE(json::parse(nowhere->body)["error"]["code"].is_null());
  }
}

TEST(Http, AChatWithoutALimitRunsToTheContextsEnd) {
  Worker worker;
  const json whole =
      post_json(worker.port(),
                {{"messages", {{{"role", "user"}, {"content", "Go on"}}}}, {"ignore_eos", true}},
                "/v1/chat/completions");
  EXPECT_EQ(whole["usage"]["total_tokens"], worker.thread().max_context());
  EXPECT_EQ(whole["choices"][0]["finish_reason"], "length");
}

// Promise(serving): No field of a request is ignored: done, without effect, or refused by name |
//   tables of fields
TEST(Http, ErrorsSayWhatIsWrong) {
  Worker worker;
  const auto refused = [&](const std::string& body, const char* expected) {
    httplib::Client client = client_of(worker.port());
    const httplib::Result result = client.Post("/v1/completions", body, "application/json");
    ASSERT_TRUE(result);
    EXPECT_EQ(result->status, 400) << body;
    const json reply = json::parse(result->body);
    EXPECT_NE(reply["error"]["message"].get<std::string>().find(expected), std::string::npos)
        << result->body;
    EXPECT_EQ(reply["error"]["type"], "invalid_request_error");
    EXPECT_TRUE(reply["error"].contains("param") && reply["error"].contains("code"));
  };
  refused("{", "not valid JSON");
  refused("[]", "object");
  refused("{}", "prompt");
  refused(R"({"prompt":[1,"x"]})", "prompt");
  refused(R"({"prompt":[99999]})", "vocabulary");
  refused(R"({"prompt":"x","temperature":"hot"})", "temperature");
  refused(R"({"prompt":"x","top_p":0})", "top_p");
  // Also where no KV is fetched, as here: what cannot be meant is not ignored.
  const auto of_kv = [&](const std::string& params, const char* expected) {
    refused(absl::StrCat(R"({"prompt":"x","max_tokens":1,"kv_transfer_params":)", params, "}"),
            expected);
  };
  of_kv("5", "\"kv_transfer_params\" must be an object");
  of_kv("[]", "\"kv_transfer_params\" must be an object");
  of_kv(R"({"prefil":"127.0.0.1:1"})", "kv_transfer_params has no \"prefil\"; did you mean");
  of_kv(R"({"prefill":5})", "\"prefill\" of kv_transfer_params must be a string");
  for (const char* address :
       {"nonsense", "h:", "h:99999", "baton1:!", "baton-ranks1:", "baton-ranks1:h:1,x"}) {
    of_kv(absl::StrCat(R"({"prefill":")", address, "\"}"), "\"prefill\" of kv_transfer_params");
  }
  for (const char* tokens : {"5", R"("1,2")", R"({"a":1})", "[-1]", "[1.5]"}) {
    of_kv(absl::StrCat(R"({"resume_token_ids":)", tokens, "}"),
          "\"resume_token_ids\" of kv_transfer_params must be an array of token ids");
  }
  refused(R"({"prompt":"x","max_tokens":0})", "max_tokens");
  refused(R"({"prompt":"x","stop":[1]})", "stop");
  refused(R"({"prompt":"x","n":200})", "\"n\"");
  refused(R"({"prompt":"x","best_of":3})", "best_of");
  refused(R"({"prompt":"x","n":3,"best_of":2})", "best_of");
  refused(R"({"prompt":"x","response_format":{"type":"json_object"}})", "response_format");
  refused(R"({"prompt":"x","tools":[{"type":"function"}]})", "tools");
  refused(R"({"prompt":"x","guided_json":{"a":1}})", "guided_json");
  refused(R"({"prompt":"x","temprature":1})", "temperature");
  refused(R"({"prompt":"x","logit_bias":{"a":1}})", "logit_bias");
  refused(R"({"prompt":"x","logit_bias":{"99999":1}})", "logit_bias");
  refused(R"({"prompt":"x","stream_options":{"chunk":1}})", "chunk");
  refused(json{{"prompt", std::vector<int>(600, 1)}}.dump(), "longer than");
  refused(json{{"prompt", std::vector<int>(600, 1)}, {"stream", true}}.dump(), "longer than");
  post_json(worker.port(), request_body());  // still serves
}

TEST(Http, MetricsCountWhatWasAnswered) {
  Worker worker;
  post_json(worker.port(), request_body());
  const std::string metrics = client_of(worker.port()).Get("/metrics")->body;
  EXPECT_THAT(metrics, HasSubstr("baton_output_tokens_total 24\n"));
  EXPECT_THAT(metrics, HasSubstr("baton_time_to_first_token_seconds_count 1\n"));
  EXPECT_THAT(metrics, HasSubstr("baton_requests_total{reason=\"length\"} 1\n"));
}

// In the middle of the step that ends it, which the page's reader cannot see the end of.
TEST(Http, AnAnswerIsCountedBeforeItIsSent) {
  Worker worker;
  std::promise<EngineStats> counted;
  worker.thread().submit({.tokens = {1, 2, 3},
                          .sampling = {.max_tokens = 4, .ignore_eos = true},
                          .on_event = [&](const OutputEvent& event) {
                            if (event.finished) counted.set_value(worker.thread().stats());
                          }});
  const EngineStats stats = counted.get_future().get();
  EXPECT_EQ(stats.requests_finished, 1);
  EXPECT_EQ(stats.running, 0);
  EXPECT_EQ(stats.tokens_computed, 6);  // the last output is nobody's input
}

// ... and its place free, where nobody may wait for one.
TEST(Http, AnAnsweredRequestFreesItsSlot) {
  std::promise<absl::Status> next;
  Worker worker(test_model(), {.blocks = 64, .max_sequences = 2}, {}, {.max_waiting = 0});
  const auto submit = [&](int max_tokens, std::function<void(const OutputEvent&)> on_event) {
    worker.thread().submit({.tokens = {1, 2, 3},
                            .sampling = {.max_tokens = max_tokens, .ignore_eos = true},
                            .on_event = std::move(on_event)});
  };
  // One goes on, beside which another one ends.
  submit(400, [&, begun = false](const OutputEvent&) mutable {
    if (std::exchange(begun, true)) return;
    submit(4, [&](const OutputEvent& event) {
      if (event.finished) next.set_value(worker.thread().admit(false, 1));
    });
  });
  EXPECT_EQ(next.get_future().get(), absl::OkStatus());
}

TEST(Http, APortInUseIsAnError) {
  Worker worker;
  const auto second =
      http::HttpServer::start({.port = worker.port()}, worker.thread(), test_tokenizer());
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_NE(second.status().message().find("--port"), absl::string_view::npos);
  for (const char* host : {"10.99.99.99", "nosuch.invalid", "0.0.0.0:8000"}) {
    EXPECT_FALSE(
        http::HttpServer::start({.host = host, .port = 0}, worker.thread(), test_tokenizer()).ok())
        << host;
  }
}

TEST(Http, WithoutADescriptorForItsThreadNoServerStarts) {
  const auto engine = must(Engine::create(test_model(), test_tokenizer(), {.blocks = 16}));
  std::unique_ptr<EngineThread> thread;
  {
    const NoDescriptors none;
    thread = std::make_unique<EngineThread>(*engine);
  }
  const auto server =
      http::HttpServer::start({.port = 0, .model = "tiny"}, *thread, test_tokenizer());
  EXPECT_THAT(std::string(server.status().message()), HasSubstr("ulimit -n"));
  EXPECT_TRUE(thread->idle());
}

// Promise(serving): A client that leaves has its request ended | the socket is watched while the
//   answer is made
TEST(Http, AClientThatLeavesIsAborted) {
  for (bool stream : {true, false}) {
    Worker worker(patient_model(), {.blocks = 4096});
    json body = request_body();
    body["max_tokens"] = 60000;
    body["stream"] = stream;
    // One leaves at once, perhaps before the engine has heard of it; the other one is computed.
    for (const bool computed : {false, true}) {
      RawClient client(worker.port());
      client.post("/v1/completions", body.dump());
      until([&] { return worker.server().connections().answering != 0; });
      until([&] { return !computed || worker.thread().stats().running != 0; });
      client.leave();
      until([&] { return worker.server().connections().answering == 0; });
      until([&] { return worker.thread().stats().running + worker.thread().stats().waiting == 0; });
    }
    // Nobody hears of its end, behind which it is counted.
    httplib::Client other = client_of(worker.port());
    until([&] {
      const std::string page = other.Get("/metrics")->body;
      const std::string aborted = "baton_requests_total{reason=\"abort\"} ";
      return absl::StrContains(page, aborted + "1\n") || absl::StrContains(page, aborted + "2\n");
    });
  }
}

TEST(Router, ReportsWhenNoWorkerAnswers) {
  const auto router = *router::Router::start({.port = 0, .decode = {"http://127.0.0.1:1"}});
  httplib::Client client = client_of(router->port());
  EXPECT_EQ(client.Get("/health")->status, 503);
  json body = request_body();
  httplib::Result result = post(router->port(), body);
  ASSERT_TRUE(result);
  EXPECT_EQ(result->status, 503);
  EXPECT_NE(result->body.find("http://127.0.0.1:1"), std::string::npos) << result->body;
  body["max_tokens"] = -1;
  EXPECT_EQ(post(router->port(), body)->status, 400);
  body["max_tokens"] = 5;
  body["stream"] = true;
  result = post(router->port(), body);
  EXPECT_EQ(result->status, 503);  // nothing was streamed yet
  EXPECT_NE(result->body.find("gave up"), std::string::npos);
}

}  // namespace
}  // namespace baton::engine::serve
