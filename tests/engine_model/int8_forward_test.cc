// What weights in int8 alone have: what fp32 gives where nothing is rounded, half the bytes, and
// no number where the checkpoint has none. What they share with other arithmetics is in
// arithmetic_forward_test.cc.
#include <span>

#include "tests/engine_model/model_rig.h"
#include "tests/test.h"

namespace baton::engine {
namespace {

// With weights that int8 holds as they are: the values of an output are multiples of a power of
// two, -127 to 127 of it, and neighbours and experts have others. Routers, which are not rounded,
// stay what they were.
Checkpoint exact_checkpoint(const ModelConfig& config) {
  Checkpoint checkpoint = make_test_checkpoint(config, 5);
  for (size_t number = 0; number < checkpoint.weights.size(); ++number) {
    Weight& weight = checkpoint.weights[number];
    bool rounded = !weight.is_vector;
    for (int l = 0; l < config.num_layers; ++l) {
      if (config.has_experts(l)) rounded &= &weight != &checkpoint.layer(l, kRouter);
    }
    const size_t columns = size_t(weight.cols);
    for (size_t row = 0; rounded && row < size_t(weight.rows); ++row) {
      const std::span<uint16_t> values(weight.data.data() + row * columns, columns);
      std::vector<float> was;
      for (const uint16_t value : values) was.push_back(float_from_bf16(value));
      const auto largest = std::max_element(
          was.begin(), was.end(), [](float a, float b) { return std::fabs(a) < std::fabs(b); });
      const float step = std::exp2(std::ceil(std::log2(std::fabs(*largest) / 127)));
      const float now = std::ldexp(step, -int((row + number) % 4));
      for (size_t i = 0; i < columns; ++i) {
        values[i] = bf16_from_float(std::nearbyint(was[i] / step) * now);
      }
      values[size_t(largest - was.begin())] = bf16_from_float(127 * now);
    }
  }
  return checkpoint;
}

// But for the order in which two sums are made. What a wrong scale or a rounded router does is ten
// times as much and more.
TEST(Int8Forward, WeightsThatNeedNoRoundingGiveWhatFp32Gives) {
  std::vector<ModelConfig> configs = family_configs();
  configs.push_back(odd_config());
  for (const ModelConfig& config : configs) {
    const Checkpoint checkpoint = exact_checkpoint(config);
    const Tokens tokens = random_tokens(40, config.vocab_size, 2);
    Rig fp32(checkpoint), int8(checkpoint, 1, 80, Arithmetic::kInt8);
    const Logits expected = fp32.prompt(tokens, fp32.take(40), 13);
    const Logits actual = int8.prompt(tokens, int8.take(40), 13);
    float largest = 0, off = 0;
    for (const float value : expected) largest = std::max(largest, std::fabs(value));
    for (size_t i = 0; i < expected.size(); ++i) {
      off = std::max(off, std::fabs(actual[i] - expected[i]));
    }
    EXPECT_LT(off, 1e-4f * largest) << config.num_experts << " experts";
  }
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
    Rig rig(checkpoint, 1, 80, Arithmetic::kInt8);
    const Tokens tokens = random_tokens(5, checkpoint.config.vocab_size, 2);
    EXPECT_TRUE(std::isnan(rig.prompt(tokens, rig.take(5), 5)[0]));
  }
}

}  // namespace
}  // namespace baton::engine
