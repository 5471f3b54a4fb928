// Loading or computing: the quicker one, by times that were measured.
#include "engine/serve/cache/load_choice.h"
#include "tests/test.h"

namespace baton::engine::serve {
namespace {

Time of_seconds(double seconds) {
  return std::chrono::duration_cast<Time>(std::chrono::duration<double>(seconds));
}

// A machine that takes so long, with noise of a fifth.
struct TimedMachine {
  double step, token, attention;      // computing
  double latency, block;              // loading
  double question = 0, of_block = 0;  // asking what there is
  std::mt19937_64 random{3};

  double noise() { return std::uniform_real_distribution<double>(0.8, 1.2)(random); }
  // Besides a step, which is needed in any case.
  double compute(double first, double n) const { return n * (token + attention * (first + n / 2)); }
  double load(double blocks) const { return latency + block * blocks; }
  double ask(double blocks) const { return question + of_block * blocks; }
  double get(double blocks) const { return ask(blocks) + load(blocks); }
};

// An engine with one prompt after the other, all of which are in the place.
struct Prompts {
  explicit Prompts(const TimedMachine& its_machine) : machine(its_machine) {
    for (size_t tokens = 100; tokens < 600; tokens += 100) compute(0, tokens);
  }

  void compute(size_t first, size_t tokens) {
    const auto n = static_cast<double>(tokens);
    choice.computed(first, tokens,
                    of_seconds((machine.step + machine.compute(static_cast<double>(first), n)) *
                               machine.noise()));
  }
  // One of so many blocks; whether it was loaded.
  bool run(size_t blocks) {
    const auto n = static_cast<double>(blocks);
    if (machine.question > 0) {
      if (!choice.is_worth_asking({.first = 0, .blocks = blocks}, place)) {
        compute(0, 16 * blocks);
        return false;
      }
      ++asked;
      choice.asked(blocks, of_seconds(machine.ask(n) * machine.noise()));
    }
    if (!choice.load_is_quicker(0, 16 * blocks, blocks, place)) {
      compute(0, 16 * blocks);
      return false;
    }
    ++loaded;
    choice.loaded(blocks, place, of_seconds(machine.load(n) * machine.noise()));
    compute(16 * blocks, 1);
    return true;
  }

  TimedMachine machine;
  LoadChoice choice;
  LoadPlace place = LoadPlace::kPeer;
  size_t asked = 0, loaded = 0;
};

const TimedMachine kMachines[] = {
    {2e-3, 1e-3, 1e-7, 5e-3, 2e-3},               // a fast disk: a long prompt pays
    {1e-3, 1e-4, 1e-8, 2e-2, 1e-3},               // only a very long one does
    {1e-3, 2e-5, 1e-9, 1e-2, 1e-3},               // none does
    {1e-2, 5e-4, 1e-6, 1e-4, 1e-4},               // all do
    {3e-4, 6e-5, 2e-8, 5e-5, 1e-5, 4e-3, 5e-6},   // asking takes longer than computing some
    {3e-4, 1e-6, 1e-9, 1e-4, 5e-6, 1e-1, 1e-5},   // and longer than any
    {2e-3, 1e-4, 1e-8, 1e-3, 8e-4, 1e-3, 4e-4}};  // and so much for each block

// Promise(tiers): Of loading and computing the quicker is picked in 19 of 20 lengths | both are
//   measured
TEST(LoadChoice, PicksTheQuickerOneInNineteenOfTwenty) {
  for (const TimedMachine& machine : kMachines) {
    Prompts prompts(machine);
    for (int i = 0; i < 60; ++i) {
      prompts.run(1 + prompts.machine.random() % 250);
      prompts.compute(prompts.machine.random() % 2000, 16 + prompts.machine.random() % 500);
    }
    int right = 0;
    int all = 0;
    for (int round = 0; round < 4; ++round) {
      for (size_t blocks = 1; blocks <= 250; ++blocks, ++all) {
        const double get = machine.get(static_cast<double>(blocks));
        const double compute = machine.compute(0, 16.0 * static_cast<double>(blocks));
        const bool alike = std::max(get, compute) < 1.05 * std::min(get, compute);
        right += prompts.run(blocks) == (get <= compute) || alike;
      }
    }
    EXPECT_GE(right, all * 95 / 100)
        << machine.token << " " << machine.latency << " " << machine.question;
  }
}

TEST(LoadChoice, WhatIsNotKnownIsTried) {
  LoadChoice choice;
  const auto is_tried = [&](LoadPlace place) { return choice.load_is_quicker(0, 160, 10, place); };
  EXPECT_TRUE(is_tried(LoadPlace::kDisk));
  choice.computed(0, 160, of_seconds(1e-3));
  EXPECT_TRUE(is_tried(LoadPlace::kDisk));
  for (int i = 0; i < 2; ++i) choice.loaded(10, LoadPlace::kDisk, of_seconds(1));
  EXPECT_TRUE(is_tried(LoadPlace::kDisk));  // both may have been accidents
  choice.loaded(10, LoadPlace::kDisk, of_seconds(1));
  EXPECT_FALSE(is_tried(LoadPlace::kDisk));
  EXPECT_TRUE(is_tried(LoadPlace::kHost));  // nothing is known of it
  EXPECT_TRUE(is_tried(LoadPlace::kPeer));  // nor of that
}

TEST(LoadChoice, OthersAreAskedUntilItIsKnownWhatThatCosts) {
  LoadChoice choice;
  const LoadChoice::Wanted wanted{.blocks = 10};
  const auto is_worth_it = [&] { return choice.is_worth_asking(wanted, LoadPlace::kPeer); };
  choice.computed(0, 160, of_seconds(1e-3));
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(is_worth_it());
    choice.asked(10, of_seconds(1e-2));
  }
  EXPECT_TRUE(is_worth_it());  // what a load costs is not known
  for (int i = 0; i < 3; ++i) choice.loaded(10, LoadPlace::kPeer, of_seconds(1e-5));
  EXPECT_FALSE(is_worth_it());
  choice.computed(0, 4096, of_seconds(1));
  EXPECT_TRUE(choice.is_worth_asking({.blocks = 256}, LoadPlace::kPeer));
}

// What asking is worth is what it may save, and that is not what is here.
TEST(LoadChoice, AShortMissingTailIsComputedLocally) {
  LoadChoice choice;
  choice.computed(0, 1600, of_seconds(1.6));
  for (int i = 0; i < 3; ++i) {
    choice.loaded(100, LoadPlace::kPeer, of_seconds(1e-2));
    choice.loaded(100, LoadPlace::kHost, of_seconds(1e-2));
    choice.asked(100, of_seconds(2e-2));
  }
  LoadChoice::Wanted wanted{.blocks = 100};
  EXPECT_TRUE(choice.is_worth_asking(wanted, LoadPlace::kPeer));
  wanted.near = 50;
  EXPECT_TRUE(choice.is_worth_asking(wanted, LoadPlace::kPeer));
  wanted.near = 99;  // a block is computed in 16 ms
  EXPECT_FALSE(choice.is_worth_asking(wanted, LoadPlace::kPeer));
  // A disk from which nobody would load is as good as none.
  for (int i = 0; i < 3; ++i) choice.loaded(100, LoadPlace::kDisk, of_seconds(10));
  wanted.near_place = LoadPlace::kDisk;
  EXPECT_TRUE(choice.is_worth_asking(wanted, LoadPlace::kPeer));
}

// And others that are better stay as they are.
TEST(LoadChoice, APlaceThatHasBecomeQuickerIsFoundOut) {
  Prompts prompts({1e-3, 1e-4, 1e-8, 1, 1e-4});
  for (int i = 0; i < 200; ++i) prompts.run(10);
  EXPECT_LE(prompts.loaded, 6u);  // three to know it, then one of 64
  prompts.machine.latency = 1e-4;
  prompts.loaded = 0;
  for (int i = 0; i < 200; ++i) prompts.run(10);
  EXPECT_GE(prompts.loaded, 130u);
}

TEST(LoadChoice, OthersThatHaveBecomeQuickerToAskAreFoundOut) {
  Prompts prompts({1e-3, 1e-4, 1e-8, 1e-4, 1e-5, 1});
  for (int i = 0; i < 200; ++i) prompts.run(10);
  EXPECT_LE(prompts.asked, 6u);
  prompts.machine.question = 1e-4;
  prompts.asked = 0;
  for (int i = 0; i < 200; ++i) prompts.run(10);
  EXPECT_GE(prompts.asked, 130u);
}

// Also where prompts of other lengths are loaded all the time.
TEST(LoadChoice, WhatIsRefusedForShortPromptsAloneIsTriedToo) {
  Prompts prompts({1e-3, 1e-4, 1e-8, 5e-2, 1e-5});
  for (int i = 0; i < 50; ++i) prompts.run(200);
  size_t loaded = 0;
  for (int i = 0; i < 300; ++i) {
    loaded += prompts.run(10);
    prompts.run(200);
  }
  EXPECT_GE(loaded, 4u);
  EXPECT_LE(loaded, 6u);
}

TEST(LoadChoice, AMomentInWhichTheMachineIsBusyIsNoNews) {
  Prompts prompts({1e-3, 1e-4, 1e-8, 1e-3, 1e-5, 1e-3});
  for (int i = 0; i < 50; ++i) prompts.run(10);
  prompts.choice.loaded(10, LoadPlace::kPeer, of_seconds(10));
  prompts.choice.asked(10, of_seconds(10));
  EXPECT_TRUE(prompts.run(10));
  // Twice is no moment.
  for (int i = 0; i < 2; ++i) prompts.choice.asked(10, of_seconds(10));
  EXPECT_FALSE(prompts.run(10));
}

TEST(LoadChoice, DecodingSaysNothingOfPrompts) {
  LoadChoice choice;
  choice.computed(0, 1, of_seconds(1));
  EXPECT_EQ(choice.compute_seconds(0, 100), 0);
  Prompts prompts({1e-2, 1e-4, 1e-8, 1, 1});
  for (int i = 0; i < 30; ++i) prompts.compute(0, 400 + prompts.machine.random() % 200);
  for (int i = 0; i < 1000; ++i) prompts.compute(500, 1);
  EXPECT_NEAR(prompts.choice.compute_seconds(0, 480) / prompts.machine.compute(0, 480), 1, 0.1);
}

TEST(CostFit, ALineIsFoundAgain) {
  CostFit<2> fit;
  for (double x : {1.0, 5.0, 9.0, 40.0}) fit.add(static_cast<size_t>(x), {1, x}, 3 + 2 * x);
  EXPECT_NEAR(fit.at({1, 0}), 3, 1e-6);
  EXPECT_NEAR(fit.at({1, 100}), 203, 1e-6);
  EXPECT_EQ(fit.points(), 4u);
}

TEST(CostFit, CostsAreNeverNegative) {
  CostFit<2> fit;
  fit.add(10, {1, 10}, 1);
  fit.add(20, {1, 20}, 100);  // steeper than through the origin
  fit.add(20, {1, 20}, 100);
  EXPECT_GE(fit.at({1, 0}), 0);
  CostFit<2> falling;
  falling.add(10, {1, 10}, 5);
  falling.add(20, {1, 20}, 1);
  EXPECT_GE(falling.at({1, 1000}), 1);
}

// What cannot be told apart is the first part's.
TEST(CostFit, PointsThatAreAllTheSameHaveOnePart) {
  CostFit<3> fit;
  for (int i = 0; i < 20; ++i) fit.add(500, {500, 125000, 1}, i % 2 == 0 ? 0.9 : 1.1);
  EXPECT_NEAR(fit.at({500, 0, 0}), 1, 0.05);
}

// A point of another size is not far because nothing was known of that.
TEST(CostFit, WhatIsSmallIsKnownBesideWhatIsLarge) {
  std::mt19937_64 random{5};
  CostFit<2> fit;
  for (int i = 0; i < 200; ++i) {
    const double x = i % 4 == 0 ? 1 : 10000;
    fit.add(static_cast<size_t>(x), {1, x},
            (1 + x) * std::uniform_real_distribution<double>(0.8, 1.2)(random));
  }
  EXPECT_NEAR(fit.at({1, 1}), 2, 0.4);
  EXPECT_NEAR(fit.at({1, 10000}), 10001, 1000);
}

}  // namespace
}  // namespace baton::engine::serve
