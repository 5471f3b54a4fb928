// Workers with two checkpoints behind one router: what one has computed is nothing to the other.
#include "engine/http/http_listener.h"
#include "tests/routing/fake_worker.h"
#include "tests/routing/routing_fixture.h"
#include "tests/test.h"

namespace baton::engine::serve {
namespace {

const Model& tuned_model() {
  static const Model* model = [] {
    Checkpoint tuned = make_test_checkpoint(tiny_model_config(), 1);
    tuned.weights[3].data[5] ^= 1;  // one bit of one weight
    return new Model(*Model::create(tuned));
  }();
  return *model;
}

std::vector<int32_t> tokens_in(const std::string& bytes) {
  std::vector<int32_t> tokens;
  for (size_t at = 0; (at = bytes.find("\"token_ids\":[", at)) != std::string::npos;) {
    at = bytes.find('[', at);
    for (const json& token : json::parse(bytes.substr(at, bytes.find(']', at) + 1 - at))) {
      tokens.push_back(token);
    }
  }
  return tokens;
}

// Promise(serving): A router and its workers never mix caches of two checkpoints | block names
//   begin with the model's fingerprint, and only workers of one fingerprint share a request
TEST(RoutingModels, AStreamGoesOnWithTheModelThatBeganIt) {
  Worker one, tuned(tuned_model());
  const std::vector<std::string> events = events_of(one.port());
  const Streamed want = parse_stream(first(events, events.size()));
  for (const bool has_another : {true, false}) {
    auto breaks = std::make_unique<FakeWorker>(first(events, 9));
    breaks->set_model(one.thread().fingerprint());
    router::RouterOptions options = options_for({breaks->url(), tuned.url()});
    if (has_another) options.decode.push_back(one.url());
    const auto router = *router::Router::start(options);
    RawClient client(router->port());
    client.post("/v1/completions", stream_request().dump());
    std::string bytes = client.read_until("]");
    breaks = nullptr;
    bytes += client.read_until("[DONE]");
    // The other checkpoint's worker is not asked, though it has nothing to do. Where no other has
    // that model the stream ends with an error, and not with another text.
    EXPECT_EQ(tuned.thread().stats().requests_finished, 0u);
    EXPECT_EQ(tokens_in(bytes) == want.tokens, has_another) << bytes;
    EXPECT_EQ(absl::StrContains(bytes, "no decode worker is left that can continue"), !has_another)
        << bytes;
  }
}

TEST(RoutingModels, APrefillWorkerOfAnotherModelIsNotNamed) {
  std::vector<std::unique_ptr<http::HttpListener>> listeners;
  router::RouterOptions options = options_for({});
  for (const char* model : {"another", "mine"}) {
    listeners.push_back(std::make_unique<http::HttpListener>());
    listeners.back()->route("GET", "/v1/baton/address", [model](const Exchange& exchange) {
      const json page = {{"address", model}, {"model", model}};
      exchange->reply(200, "application/json", page.dump());
    });
    ASSERT_TRUE(listeners.back()->listen("127.0.0.1", 0).ok());
    options.prefill.push_back(absl::StrCat("http://127.0.0.1:", listeners.back()->port()));
  }
  FakeWorker decode;
  decode.set_model("mine");
  options.decode = {decode.url()};
  const auto router = *router::Router::start(options);
  std::vector<RawClient> clients;
  for (size_t i = 1; i <= 4; ++i) {
    clients.emplace_back(router->port());
    clients.back().post("/v1/completions", stream_request().dump());
    until([&] { return decode.asked() == i; });
    EXPECT_EQ(decode.prefill(), "mine");
  }
}

}  // namespace
}  // namespace baton::engine::serve
