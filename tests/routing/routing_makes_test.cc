// Pairs of workers of which one is of another make, as vLLM: nobody may take for prefilled what is
// not.
#include "absl/strings/match.h"
#include "engine/files/files.h"
#include "tests/routing/fake_worker.h"
#include "tests/routing/routing_fixture.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton::engine::serve {
namespace {

using namespace std::chrono_literals;

router::RouterOptions pair_of(const std::string& prefill, std::vector<std::string> decode) {
  router::RouterOptions options = options_for(std::move(decode));
  options.prefill = {prefill};
  return options;
}

TEST(RoutingMakes, ADecodeWorkerThatCannotFetchIsRefusedBesidePrefillWorkers) {
  FakeWorker prefill(kOursAndPrefill);
  FakeWorker other(kVllm);
  other.answer(200, whole_answer());
  const auto router = *router::Router::start(pair_of(prefill.url(), {other.url()}));
  const json page = health(router->port());
  EXPECT_EQ(page["status"], "no decode worker is up");
  EXPECT_EQ(page["workers"][0]["up"], false);
  const std::string why = page["workers"][0]["why"];
  EXPECT_TRUE(absl::StrContains(why, "--kv-agent NAME")) << why;
  // Where no other is up, one that is down is asked all the same; not so this one.
  const httplib::Result refused = post(router->port(), stream_request());
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->status, 503);
  EXPECT_TRUE(absl::StrContains(refused->body, "docs/vllm.md")) << refused->body;
  EXPECT_EQ(other.asked(), 0u);
  EXPECT_EQ(of_worker(router->port(), "in_flight", prefill.url()), 0);
}

TEST(RoutingMakes, BesideOneOfOursItIsPassedOver) {
  FakeWorker prefill(kOursAndPrefill);
  FakeWorker other(kVllm);
  other.answer(200, whole_answer());
  FakeWorker ours(whole_answer());
  const auto router = *router::Router::start(pair_of(prefill.url(), {other.url(), ours.url()}));
  for (size_t i = 1; i <= 3; ++i) {
    EXPECT_EQ(post(router->port(), stream_request())->status, 200);
    EXPECT_EQ(ours.asked(), i);
    EXPECT_EQ(ours.prefill(), "P");
  }
  EXPECT_EQ(other.asked(), 0u);
}

TEST(RoutingMakes, APrefillWorkerThatHandsNothingOverIsNotNamedAndNotCounted) {
  FakeWorker other(kVllm);
  Worker no_prefill;  // --role all
  FakeWorker ours;
  for (const auto& [url, words] : {std::pair(other.url(), "start Baton's with --kv-agent NAME"),
                                   std::pair(no_prefill.url(), "start it with --role prefill")}) {
    const auto router = *router::Router::start(pair_of(url, {ours.url()}));
    const std::string why = health(router->port())["workers"][1]["why"];
    EXPECT_TRUE(absl::StrContains(why, words)) << why;
    FakeWorker waits;
    const auto busy = *router::Router::start(pair_of(url, {waits.url()}));
    RawClient client(busy->port());
    client.post("/v1/completions", stream_request().dump());
    until([&] { return waits.asked() == 1; });
    EXPECT_EQ(waits.prefill(), "");
    EXPECT_EQ(of_worker(busy->port(), "in_flight", url), 0);
  }
}

TEST(RoutingMakes, WithoutPrefillWorkersItIsUsed) {
  FakeWorker prefill(kOursAndPrefill);
  FakeWorker other(kVllm);
  other.answer(200, whole_answer());
  TemporaryFolder folder;
  const std::string decode = absl::StrCat("decode ", other.url());
  const std::string both = absl::StrCat(decode, "\nprefill ", prefill.url());
  const auto list = [&](const std::string& text) {
    EXPECT_TRUE(write_file_atomically(folder.path("workers"), text + "\n").ok());
  };
  list(both);
  router::RouterOptions options = options_for({});
  options.health_interval = 5ms;
  options.workers_file = folder.path("workers");
  const auto router = *router::Router::start(options);
  const auto is_up = [&] { return health(router->port())["workers"][0]["up"] == true; };
  EXPECT_FALSE(is_up());
  list(decode);
  until(is_up);
  EXPECT_EQ(parse_stream(post(router->port(), stream_request())->body).tokens,
            parse_stream(whole_answer()).tokens);
  EXPECT_EQ(other.asked(), 1u);
  list(both);
  until([&] { return !is_up(); });
}

}  // namespace
}  // namespace baton::engine::serve
