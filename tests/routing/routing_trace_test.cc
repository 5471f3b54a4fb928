// A mixed trace over three workers with small caches: how much of the prompts is found in a cache
// when requests go by hashes of their beginnings, by what was sent where, and by what workers tell.
#include <gtest/gtest.h>

#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "tests/routing/routing_fixture.h"
#include "tests/sanitized.h"

namespace baton::engine::serve {
namespace {

std::string words(std::mt19937& random, size_t bytes) {
  std::string text;
  while (text.size() < bytes) text += static_cast<char>('a' + random() % 26);
  return text;
}

// 60 of 100 prompts are the same instruction (256 bytes), one of 12 documents (1,000 bytes) and a
// question (24 bytes); the others are like nothing else.
std::vector<std::string> mixed_trace(size_t count) {
  std::mt19937 random(7);
  std::vector<std::string> shared;
  const std::string instruction = words(random, 256);
  for (int document = 0; document < 12; ++document) {
    shared.push_back(instruction + words(random, 1000));
  }
  std::vector<std::string> prompts;
  for (size_t i = 0; i < count; ++i) {
    const bool alike = random() % 100 < 60;
    std::string prompt = alike ? shared[random() % shared.size()] : "";
    prompt += words(random, alike ? 24 : 1280);
    prompts.push_back(std::move(prompt));
  }
  return prompts;
}

double hit_rate(router::PickBy pick, const std::vector<std::string>& prompts, size_t workers = 3,
                uint32_t blocks = 512) {
  Fleet fleet(workers, blocks, pick, {}, "", patient_model());
  for (const std::string& prompt : prompts) {
    fleet.ask({{"prompt", prompt}, {"max_tokens", 1}, {"temperature", 0}});
  }
  return static_cast<double>(fleet.cached_tokens) / static_cast<double>(fleet.prompt_tokens);
}

TEST(RoutingTrace, WhatWorkersTellFindsMoreThanHashingAndGuessing) {
  if (kSanitized) GTEST_SKIP() << "a figure, which is the same for all builds";
  const std::vector<std::string> prompts = mixed_trace(200);
  const double hash = hit_rate(router::PickBy::kHash, prompts);
  const double guess = hit_rate(router::PickBy::kGuess, prompts);
  const double cache = hit_rate(router::PickBy::kCache, prompts);
  // One worker that never has to forget: no choice among three finds more.
  const double most = hit_rate(router::PickBy::kCache, prompts, 1, 1 << 15);
  std::printf(
      "prompt tokens found in a cache: by hash %.3f, by guess %.3f, by cache %.3f, at most %.3f\n",
      hash, guess, cache, most);
  EXPECT_GE(cache, 1.3 * hash);
  EXPECT_GE(cache, 1.05 * guess);
  EXPECT_GE(cache, 0.95 * most);
}

}  // namespace
}  // namespace baton::engine::serve
