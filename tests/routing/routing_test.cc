// Workers tell what they have cached, and routers send requests there: over real workers, and over
// such as tell nonsense.
#include "engine/http/http_listener.h"
#include "engine/serve/cache/cache_events.h"
#include "tests/routing/routing_fixture.h"
#include "tests/test.h"

namespace baton::engine::serve {
namespace {

constexpr char kEvents[] = "/v1/baton/kv_events";

// A client of a worker's events: what it knows after each line.
class Follower {
 public:
  explicit Follower(int port) : client_(port) {
    client_.send(absl::StrCat("GET ", kEvents, " HTTP/1.1\r\nHost: x\r\n\r\n"));
    lines_ = client_.read_until("\r\n\r\n");
    EXPECT_TRUE(lines_.starts_with("HTTP/1.1 200 ")) << lines_;
    lines_.erase(0, lines_.find("\r\n\r\n") + 4);
    take();
    EXPECT_EQ(snapshots_, 1);
  }
  // Reads on until this many changes are known.
  void follow_to(uint64_t changes) {
    until([&] { return changes_ >= changes; }, [&] { take(); });
  }
  const std::set<std::string>& blocks() const { return blocks_; }

 private:
  // One more line. Chunks' sizes are lines of their own.
  void take() {
    for (;;) {
      size_t end = 0;
      while ((end = lines_.find('\n')) == std::string::npos) {
        const std::string more = client_.read_until("\n");
        ASSERT_NE(more, "") << "the stream ended";
        lines_ += more;
      }
      const std::string line = lines_.substr(0, end);
      lines_.erase(0, end + 1);
      if (!line.starts_with("{")) continue;
      const absl::StatusOr<CacheNews> news = parse_cache_line(line);
      ASSERT_TRUE(news.ok()) << news.status();
      snapshots_ += news->snapshot ? 1 : 0;
      for (const BlockHash& hash : news->removed) EXPECT_EQ(blocks_.erase(block_name(hash)), 1u);
      for (const BlockHash& hash : news->stored) blocks_.insert(block_name(hash));
      EXPECT_GE(news->changes, changes_);
      changes_ = news->changes;
      return;
    }
  }

  RawClient client_;
  std::string lines_;
  std::set<std::string> blocks_;
  uint64_t changes_ = 0;
  int snapshots_ = 0;
};

json short_request(const std::string& prompt) {
  return {{"prompt", prompt}, {"max_tokens", 2}, {"temperature", 0}, {"ignore_eos", true}};
}

std::string letters(size_t count, size_t seed) {
  std::string text;
  for (size_t i = 0; i < count; ++i) text += static_cast<char>('a' + (seed + i * (seed + 3)) % 23);
  return text;
}

uint64_t changes_after(Worker& worker, uint64_t requests) {
  until([&] { return worker.thread().stats().requests_finished == requests; });
  return worker.thread().stats().cache_changes;
}

TEST(KvEvents, SayWhatIsCachedAndHowThatChanges) {
  Worker worker(test_model(), {.blocks = 40});
  Follower follower(worker.port());
  EXPECT_TRUE(follower.blocks().empty());
  const json tokens =
      post_json(worker.port(), {{"prompt", letters(300, 1)}}, "/tokenize")["tokens"];
  post_json(worker.port(), short_request(letters(300, 1)));
  follower.follow_to(changes_after(worker, 1));
  // The blocks of the prompt, by the names that anyone can compute.
  std::vector<BlockHash> chain;
  extend_chain(tokens.get<std::vector<int32_t>>(), 16, model_root(test_model().fingerprint()),
               &chain);
  ASSERT_GT(chain.size(), 5u);
  for (const BlockHash& hash : chain) EXPECT_TRUE(follower.blocks().contains(block_name(hash)));
  EXPECT_EQ(worker.thread().stats().cached_blocks, follower.blocks().size());
  // More than there is room for: the oldest go.
  for (size_t i = 2; i < 12; ++i) {
    post_json(worker.port(), short_request(letters(300, i)));
    follower.follow_to(changes_after(worker, i));
  }
  EXPECT_FALSE(follower.blocks().contains(block_name(chain.back())));
  EXPECT_LE(follower.blocks().size(), 40u);
  EXPECT_EQ(worker.thread().stats().cached_blocks, follower.blocks().size());
  // Who comes now sees the same.
  EXPECT_EQ(Follower(worker.port()).blocks(), follower.blocks());
}

TEST(KvEvents, AskForTheKey) {
  Worker worker(test_model(), {.blocks = 64}, {.api_key = "opensesame"});
  httplib::Client client = client_of(worker.port());
  EXPECT_EQ(client.Get(kEvents)->status, 401);
}

TEST(KvEvents, EndWithTheEngine) {
  Worker worker(test_model(), {.blocks = 64});
  RawClient client(worker.port());
  client.send(absl::StrCat("GET ", kEvents, " HTTP/1.1\r\nHost: x\r\n\r\n"));
  client.read_until("\"blocks\":[]}\n");
  worker.stop_engine();
  EXPECT_NE(client.read_until("0\r\n\r\n").find("0\r\n\r\n"), std::string::npos);
  // And who comes then is told at once.
  RawClient late(worker.port());
  late.send(absl::StrCat("GET ", kEvents, " HTTP/1.1\r\nHost: x\r\n\r\n"));
  EXPECT_NE(late.read_until("0\r\n\r\n").find("0\r\n\r\n"), std::string::npos);
}

TEST(KvEvents, ACacheMayBeLongerThanWhatMayLieUnsent) {
  Worker worker(test_model(), {.blocks = 64}, {.listener = {.max_unsent = 400}});
  // A prompt whose blocks' names are longer than that.
  post_json(worker.port(), short_request(letters(400, 1)));
  RawClient other(worker.port());
  other.send(absl::StrCat("GET ", kEvents, " HTTP/1.1\r\nHost: x\r\n\r\n"));
  EXPECT_GT(other.read_until("]}\n").size(), 800u);
  // The stream goes on behind it.
  post_json(worker.port(), short_request(letters(40, 2)));
  EXPECT_NE(other.read_until("]}\n").find("[\""), std::string::npos);
}

TEST(KvEvents, DepartedSubscribersAreForgotten) {
  Worker worker(test_model(), {.blocks = 64});
  for (int i = 0; i < 20; ++i) {
    RawClient client(worker.port());
    client.send(absl::StrCat("GET ", kEvents, " HTTP/1.1\r\nHost: x\r\n\r\n"));
    if (i % 2 == 0) client.read_until("\"blocks\":[");
  }
  until([&] { return worker.server().connections().connections == 0; });
  post_json(worker.port(), short_request("In the beginning"));
}

TEST(Routing, EachMetricSaysWhatItIs) {
  Worker worker;
  const auto router = *router::Router::start({.port = 0, .decode = {worker.url()}});
  for (const int port : {router->port(), worker.port()}) {
    const std::string page = metrics_page(port);
    size_t types = 0;
    for (size_t at = 0; (at = page.find("# TYPE ", at)) != std::string::npos; ++at, ++types) {
      const std::string name = page.substr(at + 7, page.find(' ', at + 7) - at - 7);
      const size_t before = at < 2 ? 0 : page.rfind('\n', at - 2) + 1;
      EXPECT_EQ(page.compare(before, 7 + name.size() + 1, "# HELP " + name + " "), 0) << name;
    }
    EXPECT_GT(types, 15u);
  }
}

TEST(Routing, RefusesATokenizerThatCannotBeRead) {
  TemporaryFolder empty;
  const absl::Status status =
      router::Router::start(
          {.port = 0, .decode = {"http://127.0.0.1:1"}, .tokenizer = empty.path()})
          .status();
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find("tokenizer.json"), absl::string_view::npos) << status;
}

TEST(Routing, GoesWhereThePrefixIs) {
  Fleet fleet(3, 96);
  // Each of them on another worker: nothing is cached, and all are idle.
  for (size_t kind = 0; kind < 3; ++kind) fleet.ask(short_request(letters(300, kind)));
  EXPECT_EQ(fleet.cached_tokens, 0);
  for (const auto& worker : fleet.workers) {
    EXPECT_EQ(worker->thread().stats().requests_finished, 1u);
  }
  for (size_t i = 0; i < 9; ++i) {
    fleet.ask(short_request(letters(300, i % 3) + " and " + letters(40, i)));
  }
  for (const auto& worker : fleet.workers) {
    EXPECT_EQ(worker->thread().stats().requests_finished, 4u);
  }
  EXPECT_GT(fleet.cached_tokens, 9 * 150);
  // What the router expected is what came, to the token.
  EXPECT_EQ(fleet.sum("expected_hit_tokens_total"), fleet.cached_tokens);
  EXPECT_EQ(fleet.sum("prompt_tokens_total"), fleet.prompt_tokens);
}

TEST(Routing, MakesTheSameTokensOfEveryKindOfPrompt) {
  const char chat_template[] =
      "{% if messages[0].role != 'user' %}{{ raise_exception('a user speaks first') }}{% endif %}"
      "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>";
  Fleet fleet(2, 256, true, {.chat_template = *ChatTemplate::parse(chat_template)}, chat_template);
  json chat = short_request("");
  chat.erase("prompt");
  chat["messages"] = {{{"role", "user"}, {"content", letters(300, 1)}}};
  json ids = short_request("");
  ids["prompt"] =
      post_json(fleet.workers[0]->port(), {{"prompt", letters(300, 2)}}, "/tokenize")["tokens"];
  for (int i = 0; i < 3; ++i) {
    fleet.ask(chat, "/v1/chat/completions");
    fleet.ask(ids);
    fleet.ask(short_request(letters(300, 3)));
    EXPECT_EQ(fleet.sum("expected_hit_tokens_total"), fleet.cached_tokens);
  }
  EXPECT_GT(fleet.cached_tokens, 6 * 150);
  // What the template refuses the worker refuses, with its words.
  chat["messages"][0]["role"] = "system";
  const httplib::Result refused = post(fleet.router->port(), chat, "/v1/chat/completions");
  EXPECT_EQ(refused->status, 400);
  EXPECT_NE(refused->body.find("a user speaks first"), std::string::npos);
}

// Looks healthy, computes nothing, and tells of its cache what the test says.
class TellingWorker {
 public:
  TellingWorker() {
    listener_.route("GET", "/health", [](const std::shared_ptr<http::HttpExchange>& exchange) {
      exchange->reply(200, "application/json", "{}");
    });
    listener_.route("GET", kEvents, [this](const std::shared_ptr<http::HttpExchange>& exchange) {
      const std::lock_guard lock(mutex_);
      ++asked;
      exchange->begin(200, "application/x-ndjson");
      if (!story_.empty()) exchange->write(story_);
      exchange_ = exchange;
    });
    EXPECT_TRUE(listener_.listen("127.0.0.1", 0).ok());
  }
  ~TellingWorker() { listener_.stop(); }
  std::string url() const { return absl::StrCat("http://127.0.0.1:", listener_.port()); }
  // From the next connection on. Who is there now is let go of.
  void tell(const std::string& story) {
    std::shared_ptr<http::HttpExchange> last;
    const std::lock_guard lock(mutex_);
    story_ = story;
    exchange_.swap(last);
  }
  std::atomic<int> asked{0};

 private:
  http::HttpListener listener_;
  std::mutex mutex_;
  std::string story_;
  std::shared_ptr<http::HttpExchange> exchange_;
};

TEST(Routing, KnowsNothingOfAWorkerWhoseStreamBreaks) {
  TokenizerFolder tokenizer;
  TellingWorker worker;
  const std::string block = block_name(chain_hash({}, "x"));
  const CacheNews one{.snapshot = true, .changes = 5, .stored = {chain_hash({}, "x")}};
  worker.tell(cache_line(one, "m"));
  const auto router = *router::Router::start({.port = 0,
                                              .decode = {worker.url()},
                                              .tokenizer = tokenizer.path(),
                                              .health_interval = std::chrono::milliseconds(10)});
  const auto of = [&](const char* name) { return of_worker(router->port(), name, worker.url()); };
  until([&] { return of("cache_known") == 1; });
  EXPECT_EQ(of("cached_blocks"), 1);
  EXPECT_EQ(of("cache_changes"), 5);
  EXPECT_EQ(metric(router->port(), "baton_router_cache_streams_lost_total"), 0);
  // It starts again, with nothing.
  worker.tell(cache_line({.snapshot = true, .changes = 0}, "m"));
  until([&] { return of("cache_known") == 1 && of("cache_changes") == 0; });
  EXPECT_EQ(of("cached_blocks"), 0);
  EXPECT_EQ(metric(router->port(), "baton_router_cache_streams_lost_total"), 1);
  // Nonsense is as good as nothing, and does not end the trying.
  const std::string snapshot = cache_line(one, "m");
  for (const std::string& nonsense :
       {std::string("what?\n"), std::string("{}\n"), snapshot + snapshot,
        std::string("{\"changes\":1,\"removed\":[],\"stored\":[]}\n"),
        snapshot + "{\"changes\":4,\"removed\":[],\"stored\":[]}\n",
        snapshot + "{\"changes\":6,\"removed\":[7],\"stored\":[]}\n"}) {
    worker.tell(nonsense);
    const int before = worker.asked;
    until([&] { return worker.asked >= before + 3; });
    worker.tell("");
    until([&] { return of("cache_known") == 0; });
    EXPECT_EQ(of("cached_blocks"), 0) << nonsense;
  }
  worker.tell(snapshot + "{\"changes\":6,\"removed\":[],\"stored\":[\"" +
              block_name(chain_hash({}, "y")) + "\"]}\n");
  until([&] { return of("cached_blocks") == 2; });
  EXPECT_EQ(of("worker_up"), 1);
}

TEST(Routing, LivesWithWorkersThatTellNothing) {
  TokenizerFolder tokenizer;
  Worker worker;
  // Without a route for events, as another engine has it.
  http::HttpListener silent;
  silent.route("GET", "/health", [](const std::shared_ptr<http::HttpExchange>& exchange) {
    exchange->reply(503, "application/json", "{}");
  });
  ASSERT_TRUE(silent.listen("127.0.0.1", 0).ok());
  const std::string url = absl::StrCat("http://127.0.0.1:", silent.port());
  const auto router = *router::Router::start({.port = 0,
                                              .decode = {url, worker.url()},
                                              .tokenizer = tokenizer.path(),
                                              .health_interval = std::chrono::milliseconds(10)});
  for (int i = 0; i < 3; ++i) post_json(router->port(), short_request(letters(300, 1)));
  until([&] { return of_worker(router->port(), "cache_known", worker.url()) == 1; });
  EXPECT_EQ(of_worker(router->port(), "cache_known", url), 0);
  post_json(router->port(), short_request(letters(300, 1)));
  EXPECT_EQ(worker.thread().stats().cached_tokens > 0, true);
}

}  // namespace
}  // namespace baton::engine::serve
