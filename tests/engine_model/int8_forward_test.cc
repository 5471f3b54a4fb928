// What weights in int8 alone have: half the bytes, and no number where the checkpoint has none.
// What they share with other arithmetics is in arithmetic_forward_test.cc.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "tests/engine_model/model_rig.h"

namespace baton::engine {
namespace {

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
    Rig rig(checkpoint, 1, 80, Arithmetic::kInt8);
    const Tokens tokens = random_tokens(5, checkpoint.config.vocab_size, 2);
    EXPECT_TRUE(std::isnan(rig.prompt(tokens, rig.take(5), 5)[0]));
  }
}

}  // namespace
}  // namespace baton::engine
