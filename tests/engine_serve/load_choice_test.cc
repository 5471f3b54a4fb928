// Loading or computing: the quicker one, by rates that were measured.
#include "engine/serve/cache/load_choice.h"

#include <gtest/gtest.h>

#include <chrono>
#include <random>

namespace baton::engine::serve {
namespace {

Time of_seconds(double seconds) {
  return std::chrono::duration_cast<Time>(std::chrono::duration<double>(seconds));
}

// A machine whose computing and loading cost this much, with noise of a fifth.
struct Machine {
  double token, attention, latency, block;
  std::mt19937_64 random{3};

  double noise() { return std::uniform_real_distribution<double>(0.8, 1.2)(random); }
  double compute(double first, double n) const { return n * (token + attention * (first + n / 2)); }
  double load(double blocks) const { return latency + block * blocks; }
};

TEST(LoadChoice, PicksTheQuickerOneInNineteenOfTwenty) {
  const Machine machines[] = {{1e-3, 1e-7, 5e-3, 2e-3},   // a fast disk: a long prompt pays
                              {1e-4, 1e-8, 2e-2, 1e-3},   // only a very long one does
                              {2e-5, 1e-9, 1e-2, 1e-3},   // none does
                              {5e-4, 1e-6, 1e-4, 1e-4}};  // all do
  for (Machine machine : machines) {
    LoadChoice choice;
    for (int i = 0; i < 40; ++i) {
      const double first = static_cast<double>(machine.random() % 2000);
      const double n = 16 + static_cast<double>(machine.random() % 500);
      choice.computed(static_cast<size_t>(first), static_cast<size_t>(n),
                      of_seconds(machine.compute(first, n) * machine.noise()));
      const double blocks = 1 + static_cast<double>(machine.random() % 120);
      choice.loaded(static_cast<size_t>(blocks), LoadPlace::kDisk,
                    of_seconds(machine.load(blocks) * machine.noise()));
    }
    int right = 0;
    int all = 0;
    for (size_t blocks = 1; blocks <= 250; ++blocks, ++all) {
      const bool load =
          choice.load_seconds(blocks, LoadPlace::kDisk) <= choice.compute_seconds(0, blocks * 16);
      const double n = static_cast<double>(blocks);
      right += load == (machine.load(n) <= machine.compute(0, n * 16));
    }
    EXPECT_GE(right, all * 95 / 100) << machine.token << " " << machine.latency;
  }
}

TEST(LoadChoice, WhatIsNotKnownIsTried) {
  LoadChoice choice;
  EXPECT_TRUE(choice.load_is_quicker(0, 160, 10, LoadPlace::kDisk));
  choice.computed(0, 160, of_seconds(1e-3));
  EXPECT_TRUE(choice.load_is_quicker(0, 160, 10, LoadPlace::kDisk));
  choice.loaded(10, LoadPlace::kDisk, of_seconds(1));
  EXPECT_FALSE(choice.load_is_quicker(0, 160, 10, LoadPlace::kDisk));
  EXPECT_TRUE(choice.load_is_quicker(0, 160, 10, LoadPlace::kHost));  // nothing is known of it
  EXPECT_TRUE(choice.load_is_quicker(0, 160, 10, LoadPlace::kPeer));  // nor of that
}

TEST(LoadChoice, APlaceThatHasBecomeQuickerIsFoundOut) {
  LoadChoice choice;
  choice.computed(0, 160, of_seconds(1e-2));
  choice.loaded(10, LoadPlace::kDisk, of_seconds(1));
  int tried = 0;
  for (int i = 0; i < 2000; ++i) {
    if (!choice.load_is_quicker(0, 160, 10, LoadPlace::kDisk)) continue;
    ++tried;
    choice.loaded(10, LoadPlace::kDisk, of_seconds(1e-3));
  }
  EXPECT_GT(tried, 20);
  EXPECT_FALSE(choice.load_seconds(10, LoadPlace::kDisk) > 1);
}

TEST(LoadChoice, DecodingSaysNothingOfPrompts) {
  LoadChoice choice;
  choice.computed(0, 1, of_seconds(1));
  EXPECT_EQ(choice.compute_seconds(0, 100), 0);
}

TEST(LinearFit, ALineIsFoundAgain) {
  LinearFit fit;
  for (double x : {1.0, 5.0, 9.0, 40.0}) fit.add(x, 3 + 2 * x);
  EXPECT_NEAR(fit.at(0), 3, 1e-6);
  EXPECT_NEAR(fit.at(100), 203, 1e-6);
}

TEST(LinearFit, CostsAreNeverNegative) {
  LinearFit fit;
  fit.add(10, 1);
  fit.add(20, 100);  // steeper than through the origin
  EXPECT_GE(fit.at(0), 0);
  LinearFit falling;
  falling.add(10, 5);
  falling.add(20, 1);
  EXPECT_GE(falling.at(1000), 1);
}

}  // namespace
}  // namespace baton::engine::serve
