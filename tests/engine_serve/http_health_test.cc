// Whether a worker is well, by what its engine does: over its own clock, and at a router.
#include <future>

#include "absl/strings/match.h"
#include "engine/router/router.h"
#include "engine/serve/step_hook.h"
#include "tests/engine_serve/http_fixture.h"
#include "tests/manual_clock.h"
#include "tests/test.h"

namespace baton::engine::serve {
namespace {

using namespace std::chrono_literals;

TEST(Liveness, CountsOnlyTimeWithWorkAndWithoutAnEnd) {
  ManualClock clock;
  Liveness engine(clock);
  clock.advance(1h);
  EXPECT_EQ(engine.quiet(), Time{});  // idle
  engine.asked();
  clock.advance(3s);
  engine.asked();
  EXPECT_EQ(engine.quiet(), 3s);  // and it does not look
  engine.begin_step();
  EXPECT_EQ(engine.quiet(), 0s);
  clock.advance(4s);
  EXPECT_EQ(engine.quiet(), 4s);
  engine.moved();  // a layer
  clock.advance(5s);
  EXPECT_EQ(engine.quiet(), 5s);
  engine.end_step(true, true);
  EXPECT_EQ(engine.quiet(), 0s);
  // It has work, and step after step does nothing.
  for (int i = 0; i < 6; ++i) {
    clock.advance(1s);
    engine.begin_step();
    engine.end_step(false, true);
  }
  EXPECT_EQ(engine.quiet(), 6s);
  engine.asked();
  EXPECT_EQ(engine.quiet(), 6s);
  engine.end_step(false, false);
  clock.advance(1h);
  EXPECT_EQ(engine.quiet(), 0s);
}

TEST(Liveness, EachLayerIsAStepForward) {
  ManualClock clock;
  Liveness engine(clock);
  StepHook hook(nullptr, clock, engine);
  engine.begin_step();
  hook.begin(0);
  for (int layer = 0; layer < 3; ++layer) {
    clock.advance(9s);
    EXPECT_EQ(engine.quiet(), 9s);
    EXPECT_TRUE(hook.before_layer(layer).ok());
    EXPECT_EQ(engine.quiet(), 0s);
  }
}

// A worker whose engine gets no further than its first token, as long as the test likes.
class HeldWorker {
 public:
  HeldWorker() : worker(test_model(), {.blocks = 64, .clock = &clock}, {.stuck_after = 10s}) {
    Request request{.tokens = {1, 2, 3}};
    request.sampling = {.max_tokens = 2, .ignore_eos = true};
    request.on_event = [this](const OutputEvent& event) {
      if (event.finished) return finished_.set_value();
      held_.set_value();
      released_.get_future().wait();
    };
    worker.thread().submit(std::move(request));
    held_.get_future().wait();
  }
  ~HeldWorker() { release(); }
  void release() {
    if (std::exchange(let_go_, true)) return;
    released_.set_value();
    finished_.get_future().wait();
  }

  ManualClock clock;

 private:
  std::promise<void> held_, released_, finished_;
  bool let_go_ = false;

 public:
  Worker worker;
};

// Promise(serving): `/health` answers at once under any load, with 503 when the engine is stuck |
//   the engine's thread leaves a note of each step and layer
TEST(Health, AnEngineThatDoesNotGetOnIsNotWell) {
  HeldWorker held;
  httplib::Client client = client_of(held.worker.port());
  const auto page = [&](const char* path, int status) {
    const httplib::Result answer = client.Get(path);
    EXPECT_TRUE(answer) << httplib::to_string(answer.error());
    EXPECT_EQ(answer->status, status) << answer->body;
    return json::parse(answer->body);
  };
  EXPECT_EQ(page("/health", 200)["status"], "ok");
  held.clock.advance(9s);
  EXPECT_EQ(page("/health", 200)["quiet_s"], 9.0);
  held.clock.advance(1s);
  const json sick = page("/health", 503);
  EXPECT_EQ(sick["status"], "the engine has work but made no step for 10 s");
  EXPECT_EQ(sick["quiet_s"], 10.0);
  EXPECT_EQ(page("/v1/baton/address", 503)["status"], sick["status"]);
  held.release();
  until([&] { return client.Get("/health")->status == 200; });
  // Without work it may be quiet for as long as it likes.
  // With work it would have been quiet since the clock was moved; a step may come between.
  for (int idle = 0; idle < 2;) {
    held.clock.advance(1ms);
    idle = page("/health", 200)["quiet_s"] == 0.0 ? idle + 1 : 0;
  }
  held.clock.advance(1h);
  EXPECT_EQ(page("/health", 200)["quiet_s"], 0.0);
  EXPECT_EQ(page("/v1/baton/address", 200)["address"], "");
  held.worker.stop_engine();
  EXPECT_EQ(page("/health", 503)["status"], "the engine has stopped");
}

TEST(Health, TheRouterSkipsUnhealthyWorkers) {
  HeldWorker held;
  Worker well;
  const auto router = *router::Router::start(
      {.port = 0, .decode = {held.worker.url(), well.url()}, .health_interval = 5ms});
  httplib::Client client = client_of(router->port());
  const auto known = [&] {
    const json page = json::parse(client.Get("/health")->body);
    for (const json& worker : page["workers"]) {
      if (worker["url"] == held.worker.url()) return worker;
    }
    return json{};
  };
  EXPECT_EQ(known()["up"], true);
  held.clock.advance(1h);
  until([&] { return known()["up"] == false; });
  EXPECT_TRUE(absl::StrContains(known()["why"].get<std::string>(), "made no step for 3600 s"));
  for (int i = 0; i < 3; ++i) post_json(router->port(), request_body());
  EXPECT_EQ(well.thread().stats().requests_finished, 3u);
  held.release();
  until([&] { return known()["up"] == true; });
  EXPECT_FALSE(known().contains("why"));
}

}  // namespace
}  // namespace baton::engine::serve
