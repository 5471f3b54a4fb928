// Clients of every kind at once: thousands of streams, strangers who send half a request, clients
// who leave; ids, keys and models that are not there.
#include "absl/strings/match.h"
#include "engine/http/completion.h"
#include "engine/router/router.h"
#include "engine/tokenizer/chat_template.h"
#include "tests/engine_serve/http_fixture.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"
#include "transport/base/limits/memory_left.h"

namespace baton::engine::serve {
namespace {

using namespace std::chrono_literals;

std::string stream_body(int max_tokens) {
  json body = request_body();
  body["max_tokens"] = max_tokens;
  body["stream"] = true;
  return body.dump();
}

size_t threads_of_this_process() {
  size_t threads = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    threads += entry.is_directory() ? 1 : 0;
  }
  return threads;
}

// Promise(serving): Open streams and half-sent requests keep no client out | one thread serves all
//   sockets and never blocks
TEST(Clients, StreamsAndHalfSentRequestsBlockNoOtherClient) {
  constexpr size_t kEach = 400;
  // However slow the machine, nobody is given up.
  Worker worker(patient_model(), {.blocks = 16384, .max_sequences = 16},
                {.listener = {.max_unsent = size_t{1} << 30,
                              .head_timeout = 1h,
                              .body_timeout = 1h,
                              .write_timeout = 1h}});
  const size_t threads = threads_of_this_process();
  std::vector<RawClient> streams, strangers;
  for (size_t i = 0; i < kEach; ++i) {
    streams.emplace_back(worker.port());
    streams.back().post("/v1/completions", stream_body(60000));
    strangers.emplace_back(worker.port());
    strangers.back().send(
        i % 2 == 0 ? "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-"
                   : "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{");
  }
  // They all come in, those that have a request are being answered, and nobody has a thread.
  until([&] {
    return worker.server().connections().answering >= kEach &&
           worker.server().connections().connections >= 2 * kEach;
  });
  // One of an earlier test may still have been ending.
  EXPECT_LE(threads_of_this_process(), threads);
  httplib::Client client = client_of(worker.port());
  for (int i = 0; i < 20; ++i) {
    const httplib::Result health = client.Get("/health");
    ASSERT_TRUE(health);
    EXPECT_EQ(health->status, 200);
  }
  EXPECT_GE(worker.server().connections().answering, kEach);  // none was pushed out
  EXPECT_NE(streams[0].read_until("data: ").find("HTTP/1.1 200"), std::string::npos);
  // Whoever leaves is forgotten, in the batch and in the queue: all have been read by now.
  const auto known = [&] {
    const auto stats = worker.thread().stats();
    return stats.running + stats.waiting + stats.requests_finished;
  };
  until([&] { return known() >= kEach; });
  for (RawClient& stream : streams) stream.leave();
  until([&] { return worker.thread().stats().requests_finished >= kEach; });
  EXPECT_EQ(worker.thread().stats().running + worker.thread().stats().waiting, 0u);
}

TEST(Clients, AnIdleServerWithoutAQueueStillServes) {
  Worker worker(patient_model(), {.blocks = 16384, .max_sequences = 1}, {}, {.max_waiting = 0});
  json two = request_body();
  two["n"] = 2;
  EXPECT_EQ(post_json(worker.port(), two)["choices"].size(), 2u);
  RawClient stream(worker.port());
  stream.post("/v1/completions", stream_body(60000));
  stream.read_until("data: ");
  const httplib::Result refused = post(worker.port(), request_body());
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->status, 429);
  EXPECT_TRUE(refused->has_header("Retry-After"));
  stream.leave();
  // The place of who has left is free some time later.
  int status = 0;
  until([&] { return (status = post(worker.port(), request_body())->status) != 429; });
  EXPECT_EQ(status, 200);
}

TEST(Clients, ARouterSaysThatItsOwnWaitsForTheLastToken) {
  http::HttpRequest asked;
  http::ApiRequest request;
  EXPECT_FALSE(http::waits_for_first_token(asked, request));
  request.stream = true;
  EXPECT_TRUE(http::waits_for_first_token(asked, request));
  asked.headers["x-baton-waits-for"] = "answer";
  EXPECT_FALSE(http::waits_for_first_token(asked, request));
}

TEST(Clients, HalfSentRequestsHaveADeadline) {
  {
    Worker worker(test_model(), {.blocks = 64}, {.listener = {.head_timeout = 50ms}});
    RawClient head(worker.port()), silent(worker.port());
    head.send("GET /health HTT");
    EXPECT_EQ(head.read_to_end(), "");
    EXPECT_EQ(silent.read_to_end(), "");
    EXPECT_EQ(worker.server().connections().timed_out, 2u);
  }
  Worker worker(test_model(), {.blocks = 64},
                {.listener = {.body_timeout = 50ms, .idle_timeout = 50ms}});
  RawClient body(worker.port()), idle(worker.port());
  body.send("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{\"pro");
  idle.send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(body.read_to_end(), "");
  EXPECT_TRUE(absl::StrContains(idle.read_to_end(), "HTTP/1.1 200"));
  EXPECT_EQ(worker.server().connections().timed_out, 2u);
}

TEST(Clients, TheOldestHalfSentRequestMakesRoom) {
  Worker worker(test_model(), {.blocks = 64}, {.listener = {.max_connections = 3}});
  std::vector<RawClient> strangers;
  for (int i = 0; i < 3; ++i) {
    strangers.emplace_back(worker.port());
    strangers.back().send("GET /hea");
  }
  until([&] { return worker.server().connections().connections >= 3; });
  httplib::Client client = client_of(worker.port());
  const httplib::Result health = client.Get("/health");
  ASSERT_TRUE(health);
  EXPECT_EQ(health->status, 200);
  EXPECT_EQ(strangers[0].read_to_end(), "");
  EXPECT_EQ(worker.server().connections().refused, 1u);
}

TEST(Clients, RequestsThatAreTooLongAreRefused) {
  Worker worker(test_model(), {.blocks = 64}, {.listener = {.max_head = 1000, .max_body = 1000}});
  RawClient head(worker.port()), announced(worker.port()), chunked(worker.port());
  head.send("GET /health HTTP/1.1\r\nX: " + std::string(2000, 'x') + "\r\n\r\n");
  EXPECT_TRUE(absl::StrContains(head.read_to_end(), "HTTP/1.1 431"));
  announced.send("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n{");
  EXPECT_TRUE(absl::StrContains(announced.read_to_end(), "HTTP/1.1 413"));
  chunked.send(
      "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n7d0\r\n" +
      std::string(2000, ' ') + "\r\n");
  EXPECT_TRUE(absl::StrContains(chunked.read_to_end(), "HTTP/1.1 413"));
  RawClient nonsense(worker.port());
  nonsense.send("\x16\x03\x01 hello\r\n\r\n");
  EXPECT_TRUE(absl::StrContains(nonsense.read_to_end(), "HTTP/1.1 400"));
}

// Whoever stands in front may see its end elsewhere: what is a body there would be a request here.
TEST(Clients, ABodyInACodingThatIsNotKnownIsRefusedAndEndsTheConnection) {
  Worker worker;
  for (const char* coding :
       {"xchunked", "identity", "gzip", "chunked, identity", "gzip, chunked"}) {
    RawClient client(worker.port());
    client.send(absl::StrCat("POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: ",
                             coding, "\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n"));
    const std::string answer = client.read_to_end();
    EXPECT_TRUE(absl::StartsWith(answer, "HTTP/1.1 501")) << coding << ": " << answer;
    EXPECT_FALSE(absl::StrContains(answer, "\"ok\"")) << coding;
  }
}

TEST(Clients, OneConnectionCarriesManyRequests) {
  Worker worker;
  RawClient client(worker.port());
  const std::string get = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n";
  client.send(get + get + get.substr(0, 5));  // others before the first is answered
  std::string seen = client.read_until("\"status\":\"ok\"}");
  if (seen.find("HTTP", 10) == std::string::npos) seen += client.read_until("\"status\":\"ok\"}");
  client.send(get.substr(5));
  EXPECT_TRUE(absl::StrContains(client.read_until("\"ok\"}"), "HTTP/1.1 200"));
  client.post("/v1/completions", stream_body(3));
  EXPECT_TRUE(absl::StrContains(client.read_until("\r\n0\r\n\r\n"), "[DONE]"));
  client.send("GET /version HTTP/1.0\r\n\r\n");
  EXPECT_TRUE(absl::StrContains(client.read_to_end(), "Connection: close"));
}

// One that shows its next request early must still be seen to leave.
TEST(Clients, APipeliningClientThatLeavesIsAborted) {
  Worker worker(patient_model(), {.blocks = 4096});
  RawClient client(worker.port());
  client.post("/v1/completions", stream_body(60000));
  client.send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n");
  client.read_until("data: ");
  client.leave();
  until([&] { return worker.thread().stats().requests_finished != 0; });
}

// Promise(serving): A failure after the first token is an error event, not a success | the first
//   byte decides
TEST(Clients, AFailureAfterTheFirstTokenIsNoSuccess) {
  for (const bool stream : {false, true}) {
    Worker worker(patient_model(), {.blocks = 4096});
    RawClient client(worker.port());
    json body = request_body();
    body["max_tokens"] = 60000;
    body["stream"] = stream;
    client.post("/v1/completions", body.dump(), "Connection: close\r\n");
    until([&] { return worker.thread().stats().tokens_computed >= 100; });
    worker.stop_engine();
    const std::string answer = client.read_to_end();
    EXPECT_EQ(absl::StrContains(answer, "HTTP/1.1 503"), !stream) << answer.substr(0, 500);
    EXPECT_TRUE(absl::StrContains(answer, "\"type\":\"server_error\"")) << answer.substr(0, 500);
    EXPECT_FALSE(absl::StrContains(answer, "\"finish_reason\":\"")) << answer.substr(0, 500);
  }
}

TEST(Clients, IdsAreUniqueAcrossWorkers) {
  std::set<std::string> ids;
  for (int i = 0; i < 3; ++i) {
    Worker worker;
    for (int j = 0; j < 3; ++j) ids.insert(post_json(worker.port(), request_body())["id"]);
  }
  EXPECT_EQ(ids.size(), 9u);
  for (const std::string& id : ids) EXPECT_TRUE(id.starts_with("cmpl-")) << id;
}

TEST(Clients, TheRequestsIdComesBack) {
  Worker worker;
  httplib::Client client = client_of(worker.port());
  const auto id_for = [&](const std::string& given) {
    return client.Get("/health", {{"X-Request-Id", given}})->get_header_value("X-Request-Id");
  };
  EXPECT_EQ(id_for("mine-7"), "mine-7");
  EXPECT_EQ(id_for("not mine").size(), 32u);
  EXPECT_EQ(id_for(std::string(200, 'x')).size(), 32u);
  EXPECT_NE(id_for(""), id_for(""));
}

TEST(Clients, AnotherModelIsNotFound) {
  Worker worker;
  json body = request_body();
  body["model"] = "tiny";
  post_json(worker.port(), body);
  body["model"] = "gpt-5";
  const httplib::Result result = post(worker.port(), body);
  EXPECT_EQ(result->status, 404);
  const json error = json::parse(result->body)["error"];
  EXPECT_EQ(error["code"], "model_not_found");
  EXPECT_TRUE(absl::StrContains(error["message"].get<std::string>(), "gpt-5")) << error;
}

TEST(Clients, KeysAreAskedFor) {
  Worker worker(test_model(), {.blocks = 64}, {.api_key = "opensesame"});
  httplib::Client client = client_of(worker.port());
  const auto status = [&](const char* path, const std::string& key) {
    httplib::Headers headers;
    if (!key.empty()) headers.emplace("Authorization", key);
    return client.Get(path, headers)->status;
  };
  EXPECT_EQ(status("/v1/models", ""), 401);
  EXPECT_EQ(status("/v1/models", "Bearer opensesamf"), 401);
  EXPECT_EQ(status("/v1/models", "Bearer open"), 401);
  EXPECT_EQ(status("/v1/models", "opensesame"), 401);
  EXPECT_EQ(status("/v1/models", "Bearer opensesame"), 200);
  EXPECT_EQ(status("/health", ""), 200);
  EXPECT_EQ(status("/metrics", ""), 200);
  EXPECT_EQ(post(worker.port(), request_body())->status, 401);
}

TEST(Clients, TokensThereAndBack) {
  Worker worker;
  const json tokens = post_json(worker.port(), {{"prompt", "In the beginning"}}, "/tokenize");
  EXPECT_EQ(tokens["tokens"], json(test_tokenizer().encode("In the beginning")));
  EXPECT_EQ(tokens["count"], tokens["tokens"].size());
  EXPECT_EQ(post_json(worker.port(), {{"tokens", tokens["tokens"]}}, "/detokenize")["prompt"],
            "In the beginning");
  EXPECT_EQ(post(worker.port(), {{"tokens", {99999}}}, "/detokenize")->status, 400);
  EXPECT_EQ(post(worker.port(), {{"prompt", 5}}, "/tokenize")->status, 400);
  httplib::Client client = client_of(worker.port());
  EXPECT_FALSE(json::parse(client.Get("/version")->body)["version"].get<std::string>().empty());
  EXPECT_EQ(client.Get("/v1/completions")->status, 405);
}

TEST(Clients, SpecialTokensThatAreGivenByIdAreShown) {
  Worker worker;
  const int32_t special = test_tokenizer().special_id("<|endoftext|>");
  ASSERT_GE(special, 0);
  const json tokens = {72, special, 105};
  EXPECT_EQ(post_json(worker.port(), {{"tokens", tokens}}, "/detokenize")["prompt"],
            "H<|endoftext|>i");
  json body = request_body();
  body["prompt"] = tokens;
  body["echo"] = true;
  const std::string text = post_json(worker.port(), body)["choices"][0]["text"];
  EXPECT_TRUE(absl::StartsWith(text, "H<|endoftext|>i")) << text;
  const json made = post_json(
      worker.port(), {{"prompt", "H i<|endoftext|>"}, {"return_token_strs", true}}, "/tokenize");
  // As transformers' convert_ids_to_tokens() names them.
  std::string all;
  for (const json& name : made["token_strs"]) all += name.get<std::string>();
  EXPECT_EQ(made["token_strs"].size(), made["tokens"].size());
  EXPECT_EQ(all, "H\u0120i<|endoftext|>");
}

TEST(Clients, FieldsOfTokenizeAreReadOrRefusedByName) {
  Worker worker;
  const json messages = {{{"role", "user"}, {"content", "hi"}}};
  const auto refused = [&](const char* path, const json& body) {
    const httplib::Result result = post(worker.port(), body, path);
    return result->status == 400 ? json::parse(result->body)["error"]["message"].get<std::string>()
                                 : std::string();
  };
  for (const auto& [name, value] : {std::pair<const char*, json>{"add_generation_prompt", false},
                                    {"continue_final_message", true},
                                    {"tools", json::array({json::object({{"type", "function"}})})},
                                    {"chat_template", "{{ messages }}"},
                                    {"chat_template_kwargs", {{"a", 1}}},
                                    {"mm_processor_kwargs", {{"a", 1}}},
                                    {"add_generation_promp", true},
                                    {"nonsense", 1}}) {
    json body = {{"messages", messages}};
    body[name] = value;
    const std::string message = refused("/tokenize", body);
    EXPECT_TRUE(absl::StrContains(message, absl::StrCat("\"", name, "\""))) << name << message;
  }
  EXPECT_TRUE(absl::StrContains(refused("/detokenize", {{"tokens", {1}}, {"nonsense", 1}}),
                                "\"nonsense\" in a detokenize request"));
  // What asks for nothing is taken.
  EXPECT_EQ(refused("/tokenize", {{"messages", messages},
                                  {"add_generation_prompt", true},
                                  {"continue_final_message", false},
                                  {"return_token_strs", false},
                                  {"tools", nullptr}}),
            "");
}

// Chunks count for the choice that they are of, as vLLM's do; through a router as well.
TEST(Clients, UsageIsRightInEveryChunk) {
  Worker worker;
  const auto router = *router::Router::start({.port = 0, .decode = {worker.url()}});
  for (const bool chat : {false, true}) {
    json body = request_body();
    body["max_tokens"] = 6;
    body["stream"] = true;
    body["n"] = 2;
    if (chat) {
      body.erase("prompt");
      body["messages"] = {{{"role", "user"}, {"content", "And it came to pass"}}};
    }
    const char* path = chat ? "/v1/chat/completions" : "/v1/completions";
    for (const int port : {worker.port(), router->port()}) {
      for (const bool continuous : {true, false}) {
        body["stream_options"] = {{"include_usage", true}, {"continuous_usage_stats", continuous}};
        const std::string bytes = post(port, body, path)->body;
        const json total = parse_stream(bytes, chat).usage;
        ASSERT_GT(total["prompt_tokens"], 0);
        EXPECT_EQ(total["completion_tokens"], 12);
        std::map<int, int> made;
        for (const json& chunk : events_in(bytes)) {
          if (chunk["choices"].empty()) continue;
          const json& choice = chunk["choices"][0];
          ASSERT_TRUE(chunk.contains("usage")) << chunk;
          if (!continuous) {
            EXPECT_TRUE(chunk["usage"].is_null()) << chunk;
            continue;
          }
          int& tokens = made[choice["index"].get<int>()];
          if (choice.contains("token_ids")) tokens += static_cast<int>(choice["token_ids"].size());
          EXPECT_EQ(chunk["usage"],
                    (json{{"prompt_tokens", total["prompt_tokens"]},
                          {"completion_tokens", tokens},
                          {"total_tokens", total["prompt_tokens"].get<int>() + tokens}}))
              << chunk;
        }
      }
      body["stream_options"] = {{"continuous_usage_stats", true}};  // without include_usage: none
      EXPECT_FALSE(absl::StrContains(post(port, body, path)->body, "\"usage\""));
    }
  }
}

TEST(Clients, WholeFloatsAreIntegersAndSeedsHave64Bits) {
  Worker worker;
  const json want = post_json(worker.port(), request_body())["choices"];
  json body = request_body();
  for (const char* name : {"max_tokens", "seed", "top_k"}) {
    body[name] = static_cast<double>(body[name].get<int>());
  }
  body["n"] = 1.0;
  json ids = json::array();
  for (const int32_t id : test_tokenizer().encode(body["prompt"].get<std::string>())) {
    ids.push_back(static_cast<double>(id));
  }
  EXPECT_EQ(post_json(worker.port(), body)["choices"], want);
  body["prompt"] = ids;
  EXPECT_EQ(post_json(worker.port(), body)["choices"], want);
  const auto router = *router::Router::start({.port = 0, .decode = {worker.url()}});
  for (const json& seed :
       {json(uint64_t{1} << 63), json(UINT64_MAX), json(INT64_MIN), json(9.3e18)}) {
    body["seed"] = seed;
    const json drawn = post_json(worker.port(), body)["choices"];
    EXPECT_EQ(post_json(router->port(), body)["choices"], drawn) << seed;
    EXPECT_NE(drawn, want) << seed;
  }
  for (const auto& [name, value] : {std::pair<const char*, json>{"max_tokens", 3.5},
                                    {"max_tokens", 1e300},
                                    {"max_tokens", "3"},
                                    {"n", 0.0},
                                    {"seed", 1e20},
                                    {"seed", 0.5}}) {
    json wrong = request_body();
    wrong[name] = value;
    const httplib::Result result = post(worker.port(), wrong);
    EXPECT_EQ(result->status, 400) << wrong;
    EXPECT_TRUE(absl::StrContains(result->body, name)) << result->body;
  }
}

TEST(ChatTemplates, WriteTheChatAndRefuseWhatTheyRefuse) {
  const auto made = must(ChatTemplate::parse(
      "{% if messages[0].role != 'user' %}{{ raise_exception('a user speaks first') }}{% endif %}"
      "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"));
  Worker worker(test_model(), {.blocks = 256}, {.chat_template = made});
  const json messages = {{{"role", "user"}, {"content", "And it came"}}};
  const json chat =
      post_json(worker.port(), {{"messages", messages}, {"max_tokens", 8}, {"seed", 1}},
                "/v1/chat/completions");
  const json plain = post_json(
      worker.port(), {{"prompt", "<user>And it came<answer>"}, {"max_tokens", 8}, {"seed", 1}});
  EXPECT_EQ(chat["choices"][0]["message"]["content"], plain["choices"][0]["text"]);
  EXPECT_EQ(chat["usage"]["prompt_tokens"], plain["usage"]["prompt_tokens"]);
  EXPECT_EQ(
      post_json(worker.port(), {{"messages", messages}}, "/tokenize")["tokens"],
      post_json(worker.port(), {{"prompt", "<user>And it came<answer>"}}, "/tokenize")["tokens"]);

  const json refused = {{"messages", {{{"role", "system"}, {"content", "x"}}}}};
  for (const char* path : {"/v1/chat/completions", "/tokenize"}) {
    const httplib::Result result = post(worker.port(), refused, path);
    EXPECT_EQ(result->status, 400) << path;
    EXPECT_NE(result->body.find("a user speaks first"), std::string::npos) << result->body;
  }
}

// Promise(serving): A chat whose template does not come to an end holds up no completion | a
//   thread of their own reads chats
TEST(ChatTemplates, AProcessThatStandsStillHoldsUpNoCompletion) {
  const auto made = must(ChatTemplate::parse("{% for m in messages %}{{ m.content }}{% endfor %}"));
  Worker worker(test_model(), {.blocks = 256}, {.chat_template = made});
  const pid_t process = TemplateProcess::shared()->pid();
  ASSERT_EQ(kill(process, SIGSTOP), 0);
  RawClient chat(worker.port());
  chat.post("/v1/chat/completions",
            json{{"messages", {{{"role", "user"}, {"content", "And"}}}}, {"max_tokens", 1}}.dump());
  std::atomic<bool> answered{false};
  std::thread waiter([&] {
    chat.read_bytes(1);
    answered = true;
  });
  for (int i = 0; i < 3; ++i) {  // behind these the chat has been read
    EXPECT_EQ(client_of(worker.port()).Get("/health")->status, 200);
  }
  EXPECT_EQ(post(worker.port(), request_body())->status, 200);
  EXPECT_FALSE(answered) << "the completion has waited for the chat";
  EXPECT_EQ(kill(process, SIGCONT), 0);
  waiter.join();
}

// Promise(serving): A request for which there is no memory is refused: the server is not killed for
//   it | asked before a body is read, and before a long prompt becomes tokens
TEST(LargeRequests, AreRefusedWhereTheirMemoryIsNotLeft) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder.path("proc"));
  const auto leave = [&](size_t mib) {
    std::ofstream(folder.path("proc/meminfo")) << "MemAvailable: " << (mib << 10) << " kB\n";
  };
  leave(4096);
  Worker worker;
  base::look_for_memory_below(folder.path());
  const json large = {{"prompt", std::string(2 << 20, 'a')}, {"max_tokens", 1}};
  const auto asked = [&] { return post(worker.port(), large); };
  EXPECT_EQ(asked()->status, 400);  // longer than the context
  leave(32);                        // the body, and not the tokens
  httplib::Result refused = asked();
  EXPECT_EQ(refused->status, 429);
  EXPECT_NE(refused->body.find("are left"), std::string::npos) << refused->body;
  leave(4);
  refused = asked();
  EXPECT_EQ(refused->status, 503);
  EXPECT_NE(refused->body.find("reading a request: memory of"), std::string::npos) << refused->body;
  EXPECT_EQ(post(worker.port(), request_body())->status, 200);
  leave(4096);
  EXPECT_EQ(asked()->status, 400);
  base::look_for_memory_below("");
}

}  // namespace
}  // namespace baton::engine::serve
