// Which worker a request goes to: by what workers hold, by what they were given, by load.
#include "engine/router/worker_picker.h"

#include "tests/test.h"

namespace baton::engine::router {
namespace {

std::shared_ptr<const PromptKey> text(size_t bytes, char letter) {
  return std::make_shared<PromptKey>(text_key(std::string(bytes, letter)));
}
std::shared_ptr<const PromptKey> none() { return std::make_shared<PromptKey>(); }

// A prompt of `tokens` tokens; those with the same `kind` begin alike.
std::shared_ptr<const PromptKey> prompt(size_t tokens, int32_t kind) {
  return std::make_shared<PromptKey>(token_key(std::vector<int32_t>(tokens, kind)));
}

// The first `blocks` blocks of a prompt's.
serve::CacheNews snapshot(const PromptKey& key, size_t blocks) {
  return {.snapshot = true,
          .changes = 1,
          .removed = {},
          .stored = {key.chain.begin(), key.chain.begin() + static_cast<ptrdiff_t>(blocks)}};
}

TEST(WorkerPicker, TakesTheLeastLoaded) {
  WorkerPicker picker(3);
  EXPECT_EQ(picker.pick(none())->worker, 0u);
  const auto second = picker.pick(none());
  EXPECT_EQ(second->worker, 1u);
  EXPECT_EQ(picker.pick(none())->worker, 2u);
  picker.release(second->id);
  picker.release(second->id);  // once is enough
  EXPECT_EQ(picker.pick(none())->worker, 1u);
  EXPECT_FALSE(WorkerPicker(0).pick(none()).has_value());
}

TEST(WorkerPicker, IdleWorkersTakeTurns) {
  WorkerPicker picker(3);
  std::set<size_t> seen;
  for (char letter : {'a', 'b', 'c'}) {
    const auto pick = picker.pick(text(1000, letter));
    seen.insert(pick->worker);
    picker.release(pick->id);
  }
  EXPECT_EQ(seen.size(), 3u);
}

TEST(WorkerPicker, PrefersWorkersThatAreUpAndNotAvoided) {
  WorkerPicker picker(3);
  picker.set_up(0, false);
  EXPECT_EQ(picker.pick(none())->worker, 1u);
  const std::vector<size_t> avoid = {2};
  EXPECT_EQ(picker.pick(none(), avoid)->worker, 1u);
  picker.set_up(1, false);
  EXPECT_EQ(picker.pick(none(), avoid)->worker, 2u);  // better avoided than down
  picker.set_up(2, false);
  EXPECT_TRUE(picker.pick(none()).has_value());  // all are down: one may have come back
  EXPECT_FALSE(picker.has_other({}));
  picker.set_up(0, true);
  EXPECT_TRUE(picker.has_other(avoid));
  EXPECT_FALSE(picker.has_other(std::vector<size_t>{0}));
}

TEST(WorkerPicker, SaysWhatItsWorkerLacks) {
  WorkerPicker picker(1);
  EXPECT_EQ(picker.pick(prompt(160, 1))->missing, 160u);
  EXPECT_EQ(picker.pick(prompt(320, 2))->missing, 320u);
  // A text of 1,000 bytes has three pieces and a rest.
  EXPECT_EQ(WorkerPicker(1).pick(text(1000, 'a'))->missing, 4u * 64);
}

TEST(WorkerPicker, NeverTakesOneThatIsGone) {
  WorkerPicker picker(2);
  picker.set_up(1, false);
  picker.set_gone(0, true);
  EXPECT_EQ(picker.pick(none())->worker, 1u);  // down is better than gone
  picker.set_gone(1, true);
  EXPECT_FALSE(picker.pick(none()).has_value());
  EXPECT_EQ(picker.add(), 2u);
  EXPECT_EQ(picker.pick(none())->worker, 2u);
  picker.set_gone(0, false);
  EXPECT_EQ(picker.pick(none())->worker, 0u);
}

TEST(WorkerPicker, FollowsThePrefixUntilThatWorkerIsBusy) {
  WorkerPicker picker(2);
  const auto verse = text(1000, 'v');
  const auto longer = text(2000, 'v');
  ASSERT_EQ(verse->chain.size(), 3u);
  ASSERT_EQ(longer->chain.size(), 7u);
  EXPECT_EQ(picker.pick(none())->worker, 0u);
  EXPECT_EQ(picker.pick(verse)->worker, 1u);
  EXPECT_EQ(picker.pick(longer)->worker, 1u);  // in spite of the load
  EXPECT_EQ(picker.pick(verse)->worker, 1u);
  EXPECT_EQ(picker.pick(verse)->worker, 1u);
  EXPECT_EQ(picker.stats(1).in_flight, 4u);
  EXPECT_EQ(picker.pick(verse)->worker, 0u);  // too busy by now
}

TEST(WorkerPicker, KeysAreOfWhatCanBeShared) {
  EXPECT_EQ(prompt(16, 1)->chain.size(), 0u);  // the last token is computed in any case
  EXPECT_EQ(prompt(17, 1)->chain.size(), 1u);
  EXPECT_EQ(prompt(17, 1)->tokens, 17u);
  std::vector<serve::BlockHash> chain;
  serve::extend_chain(std::vector<int32_t>(32, 1), 16, {}, &chain);
  EXPECT_EQ(prompt(33, 1)->chain, chain);
  EXPECT_EQ(token_key({}).chain.size(), 0u);
}

TEST(WorkerPicker, NeverMixesModels) {
  WorkerPicker picker(3);
  const serve::BlockHash one = serve::model_root("one"), other = serve::model_root("other");
  const std::vector<serve::BlockHash> both = {one, other};
  const std::vector<int32_t> tokens(1000, 1);
  const auto key = std::make_shared<PromptKey>(token_key(tokens, both));
  // Each by the names of its own model; of the third nothing is known.
  serve::CacheNews news{.snapshot = true, .stored = key->under(other)};
  news.root = one;
  EXPECT_TRUE(picker.tell(0, news));
  news.root = other;
  EXPECT_TRUE(picker.tell(1, news));
  EXPECT_EQ(picker.models(), both);
  EXPECT_EQ(picker.pick(key)->worker, 1u);
  EXPECT_EQ(picker.stats(1).hit_tokens, 62u * 16);
  // Who must have one of them has it, or has not said.
  for (int i = 0; i < 8; ++i) EXPECT_NE(picker.pick(key, {}, one)->worker, 1u);
  EXPECT_FALSE(picker.has_other(std::vector<size_t>{0, 2}, one));
  EXPECT_TRUE(picker.has_other(std::vector<size_t>{0, 2}, other));
  picker.set_model(2, other);
  picker.set_gone(0, true);
  EXPECT_FALSE(picker.pick(key, {}, one).has_value());
  // A worker that comes back with another model has nothing; what is under way ends all the same.
  WorkerPicker again(1);
  again.set_model(0, other);
  const auto pick = again.pick(key);
  news.root = one;
  EXPECT_TRUE(again.tell(0, news));
  EXPECT_EQ(again.stats(0).cached_blocks, 62u);
  again.set_model(0, other);
  EXPECT_FALSE(again.stats(0).cache_known);
  again.release(pick->id);
  EXPECT_EQ(again.stats(0).in_flight, 0u);
  // Of a model that was not known when the key was made, nothing is expected.
  again.set_model(0, serve::model_root("a third"));
  EXPECT_EQ(again.pick(key)->missing, 1000u);
}

TEST(WorkerPicker, AStartedAnswerGoesOnlyToAWorkerThatCanContinueIt) {
  WorkerPicker picker(2);
  picker.set_resumes(0, false);
  EXPECT_EQ(picker.pick(none())->worker, 0u);
  EXPECT_EQ(picker.pick(none(), {}, std::nullopt, true)->worker, 1u);
  EXPECT_EQ(picker.pick(none(), {}, std::nullopt, true)->worker, 1u);
  picker.set_gone(1, true);
  EXPECT_FALSE(picker.pick(none(), {}, std::nullopt, true).has_value());
}

TEST(WorkerPicker, GoesWhereTheBlocksAre) {
  WorkerPicker picker(3);
  const auto key = prompt(1000, 1);
  EXPECT_TRUE(picker.tell(1, snapshot(*key, 2)));
  EXPECT_TRUE(picker.tell(2, snapshot(*key, 40)));
  auto pick = picker.pick(key);
  EXPECT_EQ(pick->worker, 2u);  // the longest
  EXPECT_EQ(picker.stats(2).hit_tokens, 640u);
  EXPECT_EQ(picker.stats(2).prompt_tokens, 1000u);
  EXPECT_EQ(picker.stats(2).computing, 360u);
  picker.computed(pick->id);
  EXPECT_EQ(picker.stats(2).computing, 0u);
  picker.computed(pick->id);
  picker.release(pick->id);
  EXPECT_EQ(picker.stats(2).computing, 0u);
  EXPECT_EQ(picker.stats(2).in_flight, 0u);
  // A block that is missing ends what can be used.
  EXPECT_TRUE(picker.tell(2, {.changes = 2, .removed = {key->chain[1]}}));
  EXPECT_EQ(picker.stats(2).cached_blocks, 39u);
  pick = picker.pick(key);
  EXPECT_EQ(pick->worker, 1u);
  picker.release(pick->id);
  EXPECT_TRUE(picker.tell(2, {.changes = 3, .stored = {key->chain[1]}}));
  EXPECT_EQ(picker.pick(key)->worker, 2u);
}

TEST(WorkerPicker, WeighsWhatIsThereAgainstWhatIsToDo) {
  WorkerPicker picker(2);
  const auto key = prompt(200, 1);
  const auto other = prompt(500, 2);
  EXPECT_TRUE(picker.tell(0, snapshot(*key, 12)));
  EXPECT_TRUE(picker.tell(1, snapshot(*other, 31)));
  EXPECT_EQ(picker.pick(other)->worker, 1u);
  // 8 tokens there, and 64 for each in flight, against 200, one in flight, and a fifth of what is
  // kept there and not here.
  std::vector<WorkerPicker::Pick> picks;
  for (int i = 0; i < 5; ++i) {
    picks.push_back(*picker.pick(key));
    EXPECT_EQ(picks.back().worker, 0u) << i;
  }
  EXPECT_EQ(picker.pick(key)->worker, 1u);
  // What waits to be computed counts until it is.
  for (const auto& pick : picks) picker.release(pick.id);
  const auto strange = picker.pick(prompt(600, 3));
  EXPECT_EQ(strange->worker, 0u);
  EXPECT_EQ(picker.pick(key)->worker, 1u);  // 600 are too many to wait for
  picker.computed(strange->id);
  EXPECT_EQ(picker.pick(key)->worker, 0u);
}

// What was asked for again is kept. Where there is more of it, other prompts do not go, however
// little that worker was given; until it has gone, or was never there.
TEST(WorkerPicker, AnUnknownPromptGoesToTheEmptierCache) {
  WorkerPicker picker(2);
  const auto key = prompt(1000, 1);
  const auto serve = [&](const std::shared_ptr<const PromptKey>& some) {
    const auto pick = picker.pick(some);
    picker.release(pick->id);
    return pick->worker;
  };
  EXPECT_TRUE(picker.tell(0, snapshot(*key, 62)));
  EXPECT_TRUE(picker.tell(1, {.snapshot = true}));
  int32_t kind = 1;
  EXPECT_EQ(serve(prompt(100, ++kind)), 0u);  // nothing was asked for again yet
  EXPECT_EQ(serve(key), 0u);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(serve(prompt(1000, ++kind)), 1u) << i;
  EXPECT_EQ(serve(key), 0u);
  // A fifth of 992 tokens is what it costs.
  const auto busy = picker.pick(prompt(200, ++kind));
  EXPECT_EQ(busy->worker, 1u);
  EXPECT_EQ(serve(prompt(100, ++kind)), 0u);
  picker.release(busy->id);
  EXPECT_TRUE(picker.tell(0, {.changes = 2, .removed = key->chain}));
  EXPECT_EQ(serve(prompt(1000, ++kind)), 0u);  // it was given less
}

TEST(WorkerPicker, WhatIsUnderWayIsAsGoodAsThere) {
  WorkerPicker picker(2);
  EXPECT_TRUE(picker.tell(0, {.snapshot = true}));
  EXPECT_TRUE(picker.tell(1, {.snapshot = true}));
  const auto key = prompt(1000, 1);
  const auto first = picker.pick(key);
  picker.computed(first->id);  // its worker has not told of it yet
  const auto second = picker.pick(key);
  EXPECT_EQ(second->worker, first->worker);
  picker.release(first->id);
  EXPECT_EQ(picker.pick(key)->worker, first->worker);
}

TEST(WorkerPicker, ForgetsWhatItCannotKnow) {
  WorkerPicker picker(2);
  const auto key = prompt(1000, 1);
  EXPECT_FALSE(picker.tell(1, {.changes = 1, .stored = key->chain}));  // changes of what?
  EXPECT_FALSE(picker.stats(1).cache_known);
  EXPECT_TRUE(picker.tell(0, {.snapshot = true}));
  EXPECT_TRUE(picker.tell(1, {.snapshot = true, .changes = 9, .stored = key->chain}));
  auto pick = picker.pick(key);
  EXPECT_EQ(pick->worker, 1u);
  picker.release(pick->id);
  picker.forget_cache(1);
  EXPECT_EQ(picker.stats(1).cached_blocks, 0u);
  pick = picker.pick(key);
  EXPECT_EQ(pick->worker, 0u);  // which had less to do
  picker.release(pick->id);
  EXPECT_TRUE(picker.tell(1, {.snapshot = true, .changes = 9, .stored = key->chain}));
  EXPECT_FALSE(picker.tell(1, {.changes = 8}));  // time goes forward
  EXPECT_FALSE(picker.stats(1).cache_known);
  serve::CacheNews huge{.snapshot = true};
  huge.stored.resize(WorkerPicker::kMaxBlocks + 1);
  EXPECT_FALSE(picker.tell(1, huge));
  EXPECT_FALSE(picker.stats(1).cache_known);
}

// It was given nothing while it was away, and is not given all that comes until it has caught up.
TEST(WorkerPicker, AReturningWorkerGetsItsFairShare) {
  WorkerPicker picker(2);
  EXPECT_TRUE(picker.tell(0, {.snapshot = true}));
  EXPECT_TRUE(picker.tell(1, {.snapshot = true}));
  int32_t kind = 0;
  const auto serve = [&] {
    const auto pick = picker.pick(prompt(1000, ++kind));
    picker.release(pick->id);
    return pick->worker;
  };
  picker.set_up(1, false);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(serve(), 0u);
  picker.set_up(1, true);
  std::vector<size_t> shares(2);
  for (int i = 0; i < 4; ++i) ++shares[serve()];
  EXPECT_EQ(shares, (std::vector<size_t>{2, 2}));
}

TEST(WorkerPicker, EstimatesWithoutReports) {
  WorkerPicker picker(2);
  const auto key = prompt(1000, 1);
  EXPECT_EQ(picker.pick(prompt(50, 2))->worker, 0u);
  EXPECT_EQ(picker.pick(key)->worker, 1u);
  EXPECT_EQ(picker.pick(key)->worker, 1u);
  EXPECT_EQ(picker.stats(1).cache_known, false);
}

}  // namespace
}  // namespace baton::engine::router
