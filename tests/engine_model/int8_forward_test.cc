// The forward pass over weights in int8: the same bits however work is cut up, near fp32, and under
// a name of its own.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/engine_model/model_rig.h"

namespace baton::engine {
namespace {

Rig make_rig(const Checkpoint& checkpoint, int threads = 1) {
  return Rig(checkpoint, threads, 80, Arithmetic::kInt8);
}

TEST(Int8Forward, ChunksAndThreadsDoNotChangeABit) {
  std::vector<ModelConfig> configs = family_configs();
  configs.push_back(odd_config());
  for (const ModelConfig& config : configs) {
    const Checkpoint checkpoint = make_test_checkpoint(config, 7);
    const Tokens tokens = random_tokens(100, config.vocab_size, 2);
    Logits first;
    for (const int threads : {1, 3}) {
      for (const size_t piece : {size_t{100}, size_t{33}, size_t{16}, size_t{1}}) {
        Rig rig = make_rig(checkpoint, threads);
        const Logits logits = rig.prompt(tokens, rig.take(tokens.size()), piece);
        if (first.empty()) first = logits;
        ASSERT_TRUE(same_bits(logits, first)) << threads << " threads, pieces of " << piece;
        ASSERT_FALSE(std::isnan(logits[0]));
      }
    }
  }
}

TEST(Int8Forward, IsNearFp32AndNotTheSame) {
  const Checkpoint checkpoint = make_test_checkpoint(odd_config(), 11);
  const Tokens tokens = random_tokens(61, 301, 6);
  Rig exact(checkpoint), rig = make_rig(checkpoint);
  const Logits expected = exact.prompt(tokens, exact.take(61), 61);
  const Logits actual = rig.prompt(tokens, rig.take(61), 61);
  EXPECT_FALSE(same_bits(actual, expected));
  float largest = 0;
  for (const float value : expected) largest = std::max(largest, std::fabs(value));
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], 0.05f * largest) << "logit " << i;
  }
}

TEST(Int8Forward, TheArithmeticIsPartOfTheModelsName) {
  const Checkpoint checkpoint = make_test_checkpoint(tiny_model_config(), 1);
  const Model model = *Model::create(checkpoint, Arithmetic::kInt8);
  EXPECT_EQ(model.fingerprint(), fingerprint(checkpoint) + "+int8");
}

TEST(Int8Forward, WeightsTakeHalfTheBytes) {
  ModelConfig config = tiny_model_config();
  config.hidden_size = 384;
  config.intermediate_size = 768;
  config.vocab_size = 320;
  const Checkpoint checkpoint = make_test_checkpoint(config, 1);
  const size_t embedding = size_t(config.vocab_size) * config.hidden_size * 2;  // stays as it is
  const size_t bf16 = Model::create(checkpoint)->weight_bytes() - embedding;
  const size_t int8 = Model::create(checkpoint, Arithmetic::kInt8)->weight_bytes() - embedding;
  EXPECT_GT(int8, bf16 / 2);
  EXPECT_LT(int8, bf16 * 52 / 100) << "and the scales";
}

// As in the other arithmetics, a damaged checkpoint shows, and harms nothing else.
TEST(Int8Forward, AWeightThatIsNotFiniteIsNotMadeANumber) {
  for (const float damage :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    Checkpoint checkpoint = make_test_checkpoint(tiny_model_config(), 1);
    for (Weight& weight : checkpoint.weights) {
      if (&weight == &checkpoint.layer(0, kDown)) weight.data[0] = bf16_from_float(damage);
    }
    Rig rig = make_rig(checkpoint);
    const Tokens tokens = random_tokens(5, checkpoint.config.vocab_size, 2);
    EXPECT_TRUE(std::isnan(rig.prompt(tokens, rig.take(5), 5)[0]));
  }
}

}  // namespace
}  // namespace baton::engine
