// Sampling: the token that the engine's Sampler chooses, or the word that it has to be asked.
#include "engine/serve/requests/sampling.h"
#include "tests/gpudirect/kernels/emulated_memory.h"
#include "tests/test.h"

namespace baton::gpudirect::kernels {
namespace {

using engine::serve::Sampler;
using engine::serve::SamplingParams;

struct Draws {
  std::vector<std::vector<float>> logits;
  std::vector<SamplingParams> params;
  std::vector<uint64_t> positions;
};

std::vector<int32_t> draw(const Draws& draws, uint64_t seed) {
  const auto vocabulary = static_cast<uint32_t>(draws.logits[0].size());
  std::vector<float> logits;
  std::vector<SampleRow> rows;
  for (size_t i = 0; i < draws.logits.size(); ++i) {
    logits.insert(logits.end(), draws.logits[i].begin(), draws.logits[i].end());
    const SamplingParams& params = draws.params[i];
    rows.push_back({params.temperature, params.top_p,
                    engine::serve::uniform_at(params.seed, draws.positions[i]),
                    static_cast<uint32_t>(params.top_k)});
  }
  std::vector<int32_t> tokens(rows.size(), -7);
  EmulatedMemory memory;
  const Sample arguments{memory.read(logits), memory.read(rows), memory.write(tokens),
                         static_cast<uint32_t>(rows.size()), vocabulary};
  EXPECT_EQ(run_kernel("baton_sample", arguments, 3, memory, seed), std::nullopt);
  return tokens;
}

SamplingParams some_params(std::mt19937_64& random) {
  SamplingParams params;
  params.temperature = random() % 4 == 0 ? 0 : 0.3 + static_cast<double>(random() % 20) / 10;
  params.top_k = random() % 2 == 0 ? 0 : static_cast<int>(random() % 300);
  params.top_p = random() % 2 == 0 ? 1 : 0.05 + static_cast<double>(random() % 90) / 100;
  params.seed = random();
  return params;
}

TEST(Sample, IsTheSamplersToken) {
  Sampler sampler;
  size_t undecided = 0;
  for (uint64_t seed = 0; seed < 30; ++seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal(0, 3);
    Draws draws;
    for (int i = 0; i < 8; ++i) {
      std::vector<float> logits(257 + seed % 3 * 500);
      for (float& logit : logits) {
        logit = normal(random);
        if (random() % 50 == 0) logit = std::numeric_limits<float>::quiet_NaN();
        if (random() % 50 == 0) logit = -std::numeric_limits<float>::infinity();
      }
      draws.logits.push_back(std::move(logits));
      draws.params.push_back(some_params(random));
      draws.positions.push_back(random() % 1000);
    }
    const std::vector<int32_t> tokens = draw(draws, seed);
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (tokens[i] == kUndecided) {
        ++undecided;
        continue;
      }
      EXPECT_EQ(tokens[i],
                sampler.choose(draws.logits[i], draws.params[i], draws.positions[i]).token)
          << seed << " " << i;
    }
  }
  EXPECT_EQ(undecided, 0u);
}

// Equal logits: the lower token comes first, and sums fall on borders, where the Sampler is asked.
TEST(Sample, TiesGoInTheOrderOfTheTokens) {
  Sampler sampler;
  size_t undecided = 0;
  constexpr size_t kDraws = 240;
  Draws draws;
  std::mt19937_64 random(5);
  for (size_t i = 0; i < kDraws; ++i) {
    std::vector<float> logits(300);
    for (float& logit : logits) logit = static_cast<float>(random() % 4);
    draws.logits.push_back(std::move(logits));
    draws.params.push_back(some_params(random));
    draws.positions.push_back(i);
  }
  const std::vector<int32_t> tokens = draw(draws, 1);
  for (size_t i = 0; i < kDraws; ++i) {
    if (tokens[i] == kUndecided) {
      ++undecided;
      continue;
    }
    EXPECT_EQ(tokens[i], sampler.choose(draws.logits[i], draws.params[i], i).token) << i;
  }
  EXPECT_LT(undecided, kDraws / 20);
}

TEST(Sample, WithoutAFiniteLogit) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  Sampler sampler;
  Draws draws;
  for (const double temperature : {0.0, 1.0}) {
    for (const auto& logits : {std::vector<float>{kNan, kNan, kNan},
                               {kNan, -kInfinity, -kInfinity},
                               {0, kInfinity, kInfinity},
                               {-0.0f, 0.0f, kNan}}) {
      draws.logits.push_back(logits);
      draws.params.push_back({.temperature = temperature});
      draws.positions.push_back(3);
    }
  }
  const std::vector<int32_t> tokens = draw(draws, 2);
  for (size_t i = 0; i < tokens.size(); ++i) {
    EXPECT_EQ(tokens[i], sampler.choose(draws.logits[i], draws.params[i], 3).token) << i;
  }
}

}  // namespace
}  // namespace baton::gpudirect::kernels
