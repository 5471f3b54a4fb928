// Mixed traces over workers with small caches: how much of the prompts is found in a cache when
// requests go by hashes of their beginnings, by what was sent where, and by what workers tell.
#include "tests/routing/routing_fixture.h"
#include "tests/sanitized.h"
#include "tests/test.h"

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

// One of them, by their weights.
size_t pick_one(std::mt19937& random, const std::vector<uint32_t>& weights) {
  uint32_t left = random() % std::accumulate(weights.begin(), weights.end(), 0u);
  size_t i = 0;
  while (left >= weights[i]) left -= weights[i++];
  return i;
}

// As services with several customers have it: 60 of 100 prompts are of one of three tenants, who
// ask in the ratio 100 : 44 : 27, and are the tenant's instruction (256 bytes), one of its 16
// documents (1,000 bytes), the first of them four times as often as the last, and a question (24
// bytes); the others are like nothing else.
std::vector<std::string> tenants_trace(size_t count) {
  std::mt19937 random(11);
  const std::vector<uint32_t> tenants = {100, 44, 27};
  std::vector<uint32_t> documents;
  for (int i = 1; i <= 16; ++i) documents.push_back(static_cast<uint32_t>(100 / std::sqrt(i)));
  std::vector<std::vector<std::string>> shared;
  for (size_t tenant = 0; tenant < tenants.size(); ++tenant) {
    const std::string instruction = words(random, 256);
    shared.emplace_back();
    for (size_t i = 0; i < documents.size(); ++i) {
      shared.back().push_back(instruction + words(random, 1000));
    }
  }
  std::vector<std::string> prompts;
  for (size_t i = 0; i < count; ++i) {
    std::string prompt;
    if (random() % 100 < 60) {
      const size_t tenant = pick_one(random, tenants);
      prompt = shared[tenant][pick_one(random, documents)] + words(random, 24);
    } else {
      prompt = words(random, 1280);
    }
    prompts.push_back(std::move(prompt));
  }
  return prompts;
}

double hit_rate(bool follows, const std::vector<std::string>& prompts, size_t workers = 3,
                uint32_t blocks = 512) {
  Fleet fleet(workers, blocks, follows, {}, "", patient_model());
  for (const std::string& prompt : prompts) {
    fleet.ask({{"prompt", prompt}, {"max_tokens", 1}, {"temperature", 0}});
  }
  return static_cast<double>(fleet.cached_tokens) / static_cast<double>(fleet.prompt_tokens);
}

TEST(RoutingTrace, WhatWorkersTellFindsMoreThanGuessing) {
  if (kSanitized) GTEST_SKIP() << "a figure, which is the same for all builds";
  const std::vector<std::string> prompts = mixed_trace(200);
  const double guess = hit_rate(false, prompts);
  const double cache = hit_rate(true, prompts);
  // One worker that never has to forget: no choice among three finds more.
  const double most = hit_rate(true, prompts, 1, 1 << 15);
  std::printf("prompt tokens found in a cache: by guess %.3f, by cache %.3f, at most %.3f\n", guess,
              cache, most);
  EXPECT_GE(cache, 1.05 * guess);
  EXPECT_GE(cache, 0.95 * most);
}

// A tenant's beginning is everybody's of that tenant: all of them on one worker would leave others
// with room to spare.
TEST(RoutingTrace, OfTenantsFindsMostOfWhatOneCacheWould) {
  if (kSanitized) GTEST_SKIP() << "a figure, which is the same for all builds";
  const std::vector<std::string> prompts = tenants_trace(300);
  const double cache = hit_rate(true, prompts, 8, 320);
  const double most = hit_rate(true, prompts, 1, 1 << 15);
  std::printf("of tenants: by cache %.3f, at most %.3f\n", cache, most);
  EXPECT_GE(cache, 0.8 * most);
}

}  // namespace
}  // namespace baton::engine::serve
