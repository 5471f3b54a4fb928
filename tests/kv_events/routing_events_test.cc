// A router that hears by vLLM's events what its workers have cached.
#include "engine/http/http_listener.h"
#include "engine/kv_events/batch.h"
#include "engine/kv_events/sockets.h"
#include "tests/routing/routing_fixture.h"
#include "tests/routing/stuck_worker.h"
#include "tests/test.h"

namespace baton::engine::serve {
namespace {

using testing::HasSubstr;

std::unique_ptr<kv_events::EventPublisher> publisher() {
  return *kv_events::EventPublisher::start(
      {.enabled = true, .endpoint = "tcp://*:0", .replay_endpoint = "tcp://*:0"});
}

// As a router's flag lists it.
std::string listed(const std::string& url, const kv_events::EventPublisher& events) {
  const auto reached = [](const std::string& endpoint) {
    return absl::StrCat("tcp://127.0.0.1", endpoint.substr(endpoint.rfind(':')));
  };
  return absl::StrCat(url, ",kv_events=", reached(events.endpoint()),
                      ",replay=", reached(events.replay_endpoint()));
}

// Answers as vLLM's server does: one token, and nothing at /health but 200.
class VllmServer {
 public:
  VllmServer() : events(publisher()) {
    listener_.route("GET", "/health",
                    [](const Exchange& exchange) { exchange->reply(200, "text/plain", ""); });
    listener_.route("POST", "/v1/completions", [this](const Exchange& exchange) {
      ++asked;
      exchange->begin(200, "text/event-stream");
      exchange->write(
          R"(data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":)"
          R"([{"index":0,"text":" x","logprobs":null,"finish_reason":"length","token_ids":[5]}]})"
          "\n\n"
          R"(data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":)"
          R"([],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}})"
          "\n\ndata: [DONE]\n\n");
      exchange->end();
    });
    EXPECT_TRUE(listener_.listen("127.0.0.1", 0).ok());
  }
  ~VllmServer() { listener_.stop(); }
  std::string url() const { return absl::StrCat("http://127.0.0.1:", listener_.port()); }

  std::atomic<int> asked{0};
  std::unique_ptr<kv_events::EventPublisher> events;

 private:
  http::HttpListener listener_;
};

// The first blocks of a prompt, of 32 tokens, under hashes that are vLLM's own affair.
kv_events::BlockStored blocks_of(const std::vector<int32_t>& prompt, size_t count) {
  kv_events::BlockStored stored{.block_size = 32, .medium = "GPU"};
  for (size_t i = 0; i < count; ++i) {
    stored.hashes.push_back(absl::StrCat("vLLM's own name of block ", prompt[0], " ", i));
  }
  stored.tokens.assign(prompt.begin(), prompt.begin() + static_cast<ptrdiff_t>(32 * count));
  return stored;
}

json ask_for(const std::vector<int32_t>& prompt) {
  return {{"prompt", prompt}, {"max_tokens", 1}, {"temperature", 0}};
}

router::RouterOptions options_of(const TokenizerFolder& tokenizer,
                                 std::vector<std::string> decode) {
  router::RouterOptions options{
      .port = 0, .decode = std::move(decode), .tokenizer = tokenizer.path()};
  options.hedge_after = std::chrono::milliseconds(0);  // which depends on time
  options.health_interval = std::chrono::milliseconds(20);
  return options;
}

TEST(RoutingEvents, GoesWhereVllmsBlocksAre) {
  TokenizerFolder tokenizer;
  VllmServer one, other;
  const std::vector<int32_t> prompt(200, 7);
  one.events->publish({.events = {blocks_of(std::vector<int32_t>(200, 9), 2)}});
  other.events->publish({.events = {blocks_of(prompt, 6)}});
  const auto router = *router::Router::start(
      options_of(tokenizer, {listed(one.url(), *one.events), listed(other.url(), *other.events)}));
  const auto settled = [&](VllmServer& server, int64_t blocks) {
    until([&] {
      return of_worker(router->port(), "cache_known", server.url()) == 1 &&
             of_worker(router->port(), "cached_blocks", server.url()) == blocks &&
             of_worker(router->port(), "in_flight", server.url()) == 0;
    });
  };
  settled(one, 2);
  settled(other, 6);
  for (int i = 1; i <= 3; ++i) {
    EXPECT_EQ(post_json(router->port(), ask_for(prompt))["choices"][0]["text"], " x");
    EXPECT_EQ(other.asked, i);
    settled(other, 6);
  }
  EXPECT_EQ(one.asked, 0);
  EXPECT_EQ(of_worker(router->port(), "expected_hit_tokens_total", other.url()), 3 * 6 * 32);
  // It forgets them, and the first one computes the prompt meanwhile.
  kv_events::BlockRemoved gone{.medium = "GPU"};
  gone.hashes = blocks_of(prompt, 6).hashes;
  other.events->publish({.events = {gone}});
  one.events->publish({.events = {blocks_of(prompt, 6)}});
  settled(other, 0);
  settled(one, 8);
  post_json(router->port(), ask_for(prompt));
  EXPECT_EQ(one.asked, 1);
  // Told before they are counted.
  until([&] { return of_worker(router->port(), "kv_event_batches_total", one.url()) == 3; });
  EXPECT_EQ(of_worker(router->port(), "kv_event_forgotten_total", one.url()), 0);
}

TEST(RoutingEvents, AServerThatStartsAnewHasNothing) {
  TokenizerFolder tokenizer;
  VllmServer server;
  TemporaryFolder folder;
  const kv_events::PublisherConfig config{.enabled = true,
                                          .endpoint = "ipc://" + folder.path("events"),
                                          .replay_endpoint = "ipc://" + folder.path("replay")};
  auto events = *kv_events::EventPublisher::start(config);
  events->publish({.events = {blocks_of(std::vector<int32_t>(200, 7), 6)}});
  const auto router = *router::Router::start(
      options_of(tokenizer, {absl::StrCat(server.url(), ",kv_events=", config.endpoint,
                                          ",replay=", config.replay_endpoint)}));
  const auto wait_for_blocks = [&](int64_t blocks) {
    until([&] {
      return of_worker(router->port(), "cache_known", server.url()) == 1 &&
             of_worker(router->port(), "cached_blocks", server.url()) == blocks;
    });
  };
  wait_for_blocks(6);
  events = nullptr;
  until([&] { return of_worker(router->port(), "cache_known", server.url()) == 0; });
  EXPECT_EQ(of_worker(router->port(), "cached_blocks", server.url()), 0);
  events = *kv_events::EventPublisher::start(config);
  events->publish({.events = {blocks_of(std::vector<int32_t>(200, 8), 1)}});
  wait_for_blocks(1);
  until([&] { return of_worker(router->port(), "kv_event_forgotten_total", server.url()) == 1; });
}

// Baton's own server in vLLM's words: what a router expects of it is what it finds.
TEST(RoutingEvents, BatonsOwnEventsSayWhatItsCacheHas) {
  TokenizerFolder tokenizer;
  Worker worker(test_model(), {.blocks = 40});
  const auto events = publisher();
  worker.thread().record_cache([to = events.get()](std::span<const CacheEvent> steps) {
    to->publish(kv_events::batch_of(steps));
  });
  const auto router =
      *router::Router::start(options_of(tokenizer, {listed(worker.url(), *events)}));
  int64_t cached = 0;
  for (int i = 0; i < 24; ++i) {
    // Four beginnings, for which the cache has no room, so that blocks come and go.
    const json answer =
        post_json(router->port(), {{"prompt", std::string(150, static_cast<char>('a' + i * i % 6)) +
                                                  std::string(20, static_cast<char>('a' + i))},
                                   {"max_tokens", 8},
                                   {"temperature", 0},
                                   {"ignore_eos", true}});
    cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"].get<int64_t>();
    until([&] {
      const std::string page = metrics_page(router->port());
      return of_worker(page, "in_flight", worker.url()) == 0 &&
             of_worker(page, "cached_blocks", worker.url()) ==
                 static_cast<int64_t>(worker.thread().stats().cached_blocks) &&
             of_worker(page, "cache_changes", worker.url()) ==
                 static_cast<int64_t>(worker.thread().stats().cache_changes);
    });
  }
  EXPECT_EQ(of_worker(router->port(), "expected_hit_tokens_total", worker.url()), cached);
  EXPECT_GT(cached, 100);
  EXPECT_GT(worker.thread().stats().cache_changes, 60u);
  worker.stop_engine();
}

// vLLM would write the answer from its beginning.
TEST(RoutingEvents, AnAnswerThatHasBegunIsNotGivenToVllm) {
  Worker baton;
  const std::vector<std::string> events = events_of(baton.port());
  auto breaks = std::make_unique<StuckWorker>(first(events, 9));
  VllmServer vllm;
  // Both are looked at once, when the router starts.
  router::RouterOptions options = options_for({breaks->url(), vllm.url()});
  options.hedge_after = std::chrono::milliseconds(0);
  const auto router = *router::Router::start(options);
  RawClient client(router->port());
  client.post("/v1/completions", stream_request().dump());
  client.read_until("\"token_ids\"");
  breaks = nullptr;
  EXPECT_THAT(client.read_until("[DONE]"), HasSubstr("no decode worker is left that can continue"));
  EXPECT_EQ(vllm.asked, 0);
  // What has not begun is.
  EXPECT_EQ(post(router->port(), request_body())->status, 200);
  EXPECT_EQ(vllm.asked, 1);
}

TEST(RoutingEvents, WithoutATokenizerBlocksHaveNoNames) {
  VllmServer server;
  const auto router =
      router::Router::start({.port = 0, .decode = {listed(server.url(), *server.events)}});
  EXPECT_EQ(router.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(router.status().message()), HasSubstr("needs --tokenizer"));
}

}  // namespace
}  // namespace baton::engine::serve
