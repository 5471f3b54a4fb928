// Which worker a request goes to: by what workers were given before, and how busy they are.
#include "engine/router/workers.h"

#include "tests/test.h"

namespace baton::engine::router {
namespace {

WorkerGroup group_of(size_t workers) {
  return {"decode", std::vector<http::HttpUrl>(workers, {.host = "h"})};
}
PromptKey text(size_t bytes, char letter) { return prompt_key(std::string(bytes, letter)); }
const PromptKey kNone;

TEST(WorkerGroup, TakesTheLeastBusy) {
  WorkerGroup group = group_of(3);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(group.pick(kNone), i);
  group.release(1);
  EXPECT_EQ(group.pick(kNone), 1u);
  EXPECT_FALSE(group_of(0).pick(kNone).has_value());
}

TEST(WorkerGroup, IdleWorkersTakeTurns) {
  WorkerGroup group = group_of(3);
  std::set<size_t> seen;
  for (char letter : {'a', 'b', 'c'}) {
    const size_t worker = *group.pick(text(1000, letter));
    seen.insert(worker);
    group.release(worker);
  }
  EXPECT_EQ(seen.size(), 3u);
}

TEST(WorkerGroup, PrefersWorkersThatAreUpAndNotAvoided) {
  WorkerGroup group = group_of(3);
  group[0].up = false;
  EXPECT_EQ(group.pick(kNone), 1u);
  const std::vector<size_t> avoid = {2};
  EXPECT_EQ(group.pick(kNone, avoid), 1u);
  group[1].up = false;
  EXPECT_EQ(group.pick(kNone, avoid), 2u);  // better avoided than down
  group[2].up = false;
  EXPECT_TRUE(group.pick(kNone).has_value());  // all are down: one may have come back
  EXPECT_FALSE(group.has_other({}));
  group[0].up = true;
  EXPECT_TRUE(group.has_other(avoid));
  EXPECT_FALSE(group.has_other(std::vector<size_t>{0}));
}

TEST(WorkerGroup, NeverTakesOneThatIsGone) {
  WorkerGroup group = group_of(2);
  group[1].up = false;
  group[0].gone = true;
  EXPECT_EQ(group.pick(kNone), 1u);  // down is better than gone
  group[1].gone = true;
  EXPECT_FALSE(group.pick(kNone).has_value());
  EXPECT_EQ(group.add({.host = "another"}), 2u);
  EXPECT_EQ(group.pick(kNone), 2u);
  group[0].gone = false;
  EXPECT_EQ(group.pick(kNone), 0u);
}

TEST(WorkerGroup, FollowsThePrefixUntilThatWorkerIsBusy) {
  WorkerGroup group = group_of(2);
  const PromptKey verse = text(1000, 'v'), longer = text(2000, 'v');
  ASSERT_EQ(verse.chain.size(), 3u);
  ASSERT_EQ(longer.chain.size(), 7u);
  EXPECT_EQ(group.pick(kNone), 0u);
  EXPECT_EQ(group.pick(verse), 1u);
  EXPECT_EQ(group.pick(longer), 1u);  // in spite of the load
  EXPECT_EQ(group.pick(verse), 1u);
  EXPECT_EQ(group.pick(verse), 1u);
  EXPECT_EQ(group[1].in_flight, 4u);
  EXPECT_EQ(group.pick(verse), 0u);  // too busy by now
}

TEST(WorkerGroup, NeverMixesModels) {
  WorkerGroup group = group_of(3);
  group[0].model = "one";
  group[1].model = "other";
  // A worker that must have one of them has it, or has not said which it has.
  for (int i = 0; i < 8; ++i) EXPECT_NE(group.pick(kNone, {}, "one"), 1u);
  EXPECT_FALSE(group.has_other(std::vector<size_t>{0, 2}, "one"));
  EXPECT_TRUE(group.has_other(std::vector<size_t>{0, 2}, "other"));
  group[2].model = "other";
  group[0].gone = true;
  EXPECT_FALSE(group.pick(kNone, {}, "one").has_value());
}

TEST(WorkerGroup, AStartedAnswerGoesOnlyToAWorkerThatCanContinueIt) {
  WorkerGroup group = group_of(2);
  group[0].resumes = false;
  EXPECT_EQ(group.pick(kNone), 0u);
  EXPECT_EQ(group.pick(kNone, {}, "", true), 1u);
  EXPECT_EQ(group.pick(kNone, {}, "", true), 1u);
  group[1].gone = true;
  EXPECT_FALSE(group.pick(kNone, {}, "", true).has_value());
}

// It was given nothing while it was away, and is not given all that comes until it has caught up.
TEST(WorkerGroup, AReturningWorkerGetsItsFairShare) {
  Workers workers({}, std::vector<http::HttpUrl>(2, {.host = "h"}));
  char letter = 'a';
  const auto serve = [&] {
    const size_t worker = *workers.decode.pick(text(1000, letter++));
    workers.decode.release(worker);
    return worker;
  };
  workers.set_down(workers.decode, 1, "it does not answer");
  for (int i = 0; i < 10; ++i) EXPECT_EQ(serve(), 0u);
  workers.set_up(workers.decode, 1);
  std::vector<size_t> shares(2);
  for (int i = 0; i < 4; ++i) ++shares[serve()];
  EXPECT_EQ(shares, (std::vector<size_t>{2, 2}));
}

}  // namespace
}  // namespace baton::engine::router
