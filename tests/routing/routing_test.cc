// Requests whose prompts begin alike go where those before them went; what a router says of itself.
#include "tests/routing/routing_fixture.h"
#include "tests/test.h"

namespace baton::engine::serve {
namespace {

std::string letters(size_t count, size_t seed) {
  std::string text;
  for (size_t i = 0; i < count; ++i) text += static_cast<char>('a' + (seed + i * (seed + 3)) % 23);
  return text;
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
    EXPECT_GE(types, 9u);
  }
}

TEST(Routing, GoesWhereThePrefixIs) {
  std::vector<std::unique_ptr<Worker>> workers;
  router::RouterOptions options{.port = 0};
  for (int i = 0; i < 3; ++i) {
    workers.push_back(std::make_unique<Worker>(test_model(), EngineOptions{.blocks = 96}));
    options.decode.push_back(workers.back()->url());
  }
  const auto router = *router::Router::start(options);
  // Returns the number of prompt tokens found in the worker's cache. The router has heard of the
  // answer's end when the next request is asked.
  const auto ask = [&](const json& prompt) {
    const json answer = post_json(
        router->port(),
        {{"prompt", prompt}, {"max_tokens", 2}, {"temperature", 0}, {"ignore_eos", true}});
    until([&] {
      const std::string page = metrics_page(router->port());
      return std::all_of(workers.begin(), workers.end(), [&](const auto& worker) {
        return of_worker(page, "in_flight", worker->url()) == 0;
      });
    });
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"].get<int>();
  };
  // Texts and tokens.
  std::vector<json> kinds = {letters(300, 0), letters(300, 1)};
  kinds.push_back(
      post_json(workers[0]->port(), {{"prompt", letters(300, 2)}}, "/tokenize")["tokens"]);
  // Each of them on another worker: nothing is cached, and all are idle.
  for (const json& kind : kinds) EXPECT_EQ(ask(kind), 0);
  for (int round = 0; round < 3; ++round) {
    for (const json& kind : kinds) EXPECT_GT(ask(kind), 100);
  }
  for (const auto& worker : workers) EXPECT_EQ(worker->thread().stats().requests_finished, 4u);
}

}  // namespace
}  // namespace baton::engine::serve
