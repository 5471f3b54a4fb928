// An index that hears of an engine's cache over a way that loses messages is what the cache has.
#include "absl/strings/numbers.h"
#include "tests/kv_events/fake_engine.h"
#include "tests/test.h"

namespace baton::engine::kv_events {
namespace {

// BATON_EVENTS=1000000: what the README of tests has the result of.
uint64_t events_to_try() {
  const char* text = std::getenv("BATON_EVENTS");
  uint64_t events = 20'000;
  if (text != nullptr) {
    EXPECT_TRUE(absl::SimpleAtoi(text, &events)) << text;
  }
  return events;
}

// Promise(serving): The router's index of a vLLM worker matches its events after loss, restart and
//   replay | batches apply in unbroken order; otherwise all is forgotten
TEST(IndexProof, OneMessageInTwentyIsLostAndThreeRestartsLaterItIsTheTruth) {
  const uint64_t all = events_to_try();
  Random random(1);
  FakeEngine engine(random, 3000, 10'000);
  FakeFollower follower(random, engine, 0.05);
  uint64_t events = 0, next_look = all / 20, looks = 0;
  int restarts = 0;
  size_t largest = 0;
  while (events < all) {
    events += engine.step();
    while (random() % 4 != 0) follower.step();
    follower.tell();
    if (restarts < 3 && events > all * static_cast<uint64_t>(restarts + 1) / 4) {
      engine.restart();
      // The last is behind something that keeps the connection: its numbers alone tell.
      if (++restarts < 3) follower.connection_lost();
    }
    if (events < next_look) continue;
    next_look += all / 20;
    ++looks;
    follower.settle();
    ASSERT_EQ(follower.known, engine.truth) << events;
    largest = std::max(largest, engine.truth.size());
  }
  follower.settle();
  EXPECT_EQ(follower.known, engine.truth);
  EXPECT_GT(engine.truth.size(), 500u);
  EXPECT_EQ(restarts, 3);
  EXPECT_GE(looks, 19u);
  EXPECT_GE(follower.stats().restarts, 1u);  // the one that nobody announced
  EXPECT_GT(follower.stats().gaps, all / 200);
  RecordProperty("lost", static_cast<int>(follower.messages_lost));
  std::printf(
      "%lu events, %lu messages lost, %lu gaps, %lu batches by replay, %lu forgotten, up to "
      "%zu blocks\n",
      events, follower.messages_lost, follower.stats().gaps, follower.stats().replayed,
      follower.stats().forgotten, largest);
}

// Where the buffer is too short for what is lost, something is missing, and nothing is stale.
TEST(IndexProof, WithAShortBufferNothingIsThereThatIsNot) {
  const uint64_t all = events_to_try() / 2;
  Random random(2);
  FakeEngine engine(random, 300, 8);
  FakeFollower follower(random, engine, 0.3);
  uint64_t events = 0, next_look = 0;
  size_t found = 0;
  for (int looks = 0; events < all;) {
    events += engine.step();
    while (random() % 4 != 0) follower.step();
    if (events < next_look) continue;
    next_look += all / 50;
    // Now and then it is away for long.
    for (int i = 0; ++looks % 3 == 0 && i < 100; ++i) {
      events += engine.step();
      engine.sent.clear();
    }
    follower.settle();
    ASSERT_TRUE(std::includes(engine.truth.begin(), engine.truth.end(), follower.known.begin(),
                              follower.known.end()))
        << events;
    found += follower.known.size();
  }
  EXPECT_GT(follower.stats().forgotten, 10u);
  EXPECT_GT(found, 100u);
}

}  // namespace
}  // namespace baton::engine::kv_events
