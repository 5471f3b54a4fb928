// What a request may cost others: the time of a worker that is down, and many times the memory of a
// long prompt.
#include "absl/strings/match.h"
#include "tests/routing/fake_worker.h"
#include "tests/routing/routing_fixture.h"
#include "tests/test.h"

namespace baton::engine::serve {
namespace {

constexpr char kAnswer[] =
    "data: {\"id\":\"i\",\"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":\"length\","
    "\"token_ids\":[1]}]}\n\ndata: [DONE]\n\n";

// Posts by a thread of its own.
class Asker {
 public:
  Asker(int port, json body)
      : thread_([this, port, body = std::move(body)] { answer_ = post_json(port, body); }) {}
  json answer() {
    thread_.join();
    return answer_;
  }

 private:
  json answer_;
  std::thread thread_;
};

json long_request(size_t bytes, int n) {
  return {{"prompt", std::string(bytes, 'a')}, {"n", n}, {"max_tokens", 1}, {"seed", 3}};
}

TEST(AnyWorker, OneThatIsDownIsNotAskedWhatAnyCanAnswer) {
  FakeWorker down;
  down.draining = true;  // it says 503
  Worker well;
  const auto router = *router::Router::start(options_for({down.url(), well.url()}));
  httplib::Client client = client_of(router->port());
  EXPECT_EQ(client.Get("/v1/models")->status, 200);
  EXPECT_EQ(client.Get("/version")->status, 200);
  EXPECT_EQ(client.Post("/tokenize", R"({"prompt": "a"})", "application/json")->status, 200);
  EXPECT_EQ(down.asked(), 0);
}

TEST(AnyWorker, WhereAllAreDownTheyAreAskedAllTheSame) {
  Worker sick;
  sick.stop_engine();
  const auto router = *router::Router::start(options_for({"http://127.0.0.1:1", sick.url()}));
  httplib::Client client = client_of(router->port());
  EXPECT_EQ(client.Get("/health")->status, 503);
  EXPECT_EQ(client.Get("/v1/models")->status, 200);
}

TEST(LongPrompts, ChoicesAreAskedOneAfterTheOther) {
  constexpr int kChoices = 4;
  FakeWorker worker;
  const auto router = *router::Router::start(options_for({worker.url()}));
  Asker asker(router->port(), long_request(size_t{5} << 20, kChoices));
  for (int i = 0; i < kChoices; ++i) {
    until([&] { return worker.waiting() == 1; });
    // Nobody else waits for it meanwhile, and no second one comes.
    for (int look = 0; look < 10; ++look) {
      EXPECT_EQ(client_of(router->port()).Get("/health")->status, 200);
    }
    ASSERT_EQ(worker.waiting(), 1u);
    worker.say(kAnswer);
  }
  EXPECT_EQ(asker.answer()["choices"].size(), size_t{kChoices});
  std::set<json> seeds;
  for (const json& body : worker.questions()) {
    EXPECT_EQ(body["prompt"].get_ref<const std::string&>().size(), size_t{5} << 20);
    seeds.insert(body["seed"]);
  }
  EXPECT_EQ(seeds.size(), size_t{kChoices});
}

TEST(LongPrompts, ChoicesOfShortOnesAreAskedAtOnce) {
  constexpr size_t kChoices = 128;
  FakeWorker worker;
  const auto router = *router::Router::start(options_for({worker.url()}));
  Asker asker(router->port(), long_request(1000, kChoices));
  until([&] { return worker.waiting() == kChoices; });
  for (size_t i = 0; i < kChoices; ++i) worker.say(kAnswer);
  EXPECT_EQ(asker.answer()["choices"].size(), kChoices);
}

TEST(LongPrompts, TogetherTheyHaveALimit) {
  FakeWorker worker;
  router::RouterOptions options = options_for({worker.url()});
  options.max_bodies = size_t{1} << 20;
  const auto router = *router::Router::start(options);
  const json body = long_request(size_t{700} << 10, 1);
  Asker first(router->port(), body);
  until([&] { return worker.waiting() == 1; });
  const httplib::Result second = post(router->port(), body);
  ASSERT_TRUE(second);
  EXPECT_EQ(second->status, 429) << second->body;
  EXPECT_TRUE(absl::StrContains(second->body, "1 MiB is its limit: try again later"));
  EXPECT_EQ(second->get_header_value("Retry-After"), "1");
  EXPECT_EQ(post(router->port(), body, "/tokenize")->status, 429);
  Asker small(router->port(), long_request(1000, 1));
  until([&] { return worker.waiting() == 2; });
  worker.say(kAnswer);
  worker.say(kAnswer);
  first.answer();
  small.answer();
  // They are forgotten with their answers, of which a client may have the last byte before. One
  // alone may be as long as a body may be.
  for (const size_t bytes : {size_t{700} << 10, size_t{2} << 20}) {
    std::atomic<int> status{429};
    std::thread alone([&] {
      until([&] { return (status = post(router->port(), long_request(bytes, 1))->status) != 429; });
    });
    until([&] { return worker.waiting() == 1; });
    worker.say(kAnswer);
    alone.join();
    EXPECT_EQ(status, 200) << bytes;
  }
}

}  // namespace
}  // namespace baton::engine::serve
