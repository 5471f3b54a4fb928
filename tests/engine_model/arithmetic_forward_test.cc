// The forward pass in every arithmetic: the same bits however work is cut up and whatever computes;
// that of bf16 is near fp32, and under a name of its own.
#include "engine/kernels/bf16_gemm.h"
#include "tests/engine_model/model_rig.h"
#include "tests/engine_model/vector_widths.h"
#include "tests/test.h"

namespace baton::engine {
namespace {

// Sizes that are no multiples of anything, and experts: most of them without a token in a small
// step.
std::vector<ModelConfig> odd_configs() { return {odd_config(), many_experts_config()}; }

class ArithmeticForward : public testing::TestWithParam<Arithmetic> {
 protected:
  // What may compute.
  static std::vector<Bf16Unit> units() {
    std::vector<Bf16Unit> units = {Bf16Unit::kVectors};
    for (const Bf16Unit unit : {Bf16Unit::kTiles, Bf16Unit::kDots}) {
      if (GetParam() == Arithmetic::kBf16 && usable(unit)) units.push_back(unit);
    }
    return units;
  }
  static Rig make_rig(const Checkpoint& checkpoint, Bf16Unit unit, int threads = 1) {
    return Rig(checkpoint, threads, 80, GetParam(), unit);
  }
};

TEST_P(ArithmeticForward, ChunksThreadsUnitsAndVectorWidthsDoNotChangeABit) {
  std::vector<ModelConfig> configs = family_configs();
  configs.insert(configs.end(), {tiny_model_config(), odd_config()});
  for (const ModelConfig& config : configs) {
    const Checkpoint checkpoint = make_test_checkpoint(config, 7);
    const Tokens tokens = random_tokens(150, config.vocab_size, 2);
    Logits first;
    for_every_width([&] {
      for (const Bf16Unit unit : units()) {
        for (const int threads : {1, 3}) {
          for (const size_t piece : {size_t{150}, size_t{64}, size_t{16}, size_t{7}, size_t{1}}) {
            Rig rig = make_rig(checkpoint, unit, threads);
            const Logits logits = rig.prompt(tokens, rig.take(tokens.size()), piece);
            if (first.empty()) first = logits;
            ASSERT_TRUE(same_bits(logits, first)) << threads << " threads, pieces of " << piece;
            ASSERT_FALSE(std::isnan(logits[0]));
          }
        }
      }
    });
  }
}

TEST_P(ArithmeticForward, TheBatchDoesNotChangeABit) {
  for (const ModelConfig& config : odd_configs()) {
    const Checkpoint checkpoint = make_test_checkpoint(config, 9);
    const size_t vocab = size_t(config.vocab_size);
    const Tokens a = random_tokens(90, config.vocab_size, 3);
    const Tokens b = random_tokens(33, config.vocab_size, 4);
    const Tokens c = random_tokens(20, config.vocab_size, 5);
    for (const Bf16Unit unit : units()) {
      Rig alone = make_rig(checkpoint, unit);
      const Logits a_alone = alone.prompt(a, alone.take(90), 1);
      const Logits b_alone = alone.prompt(b, alone.take(33), 33);
      const Logits c_alone = alone.prompt(c, alone.take(20), 7);
      Rig rig = make_rig(checkpoint, unit, 3);
      const auto ta = rig.take(90), tb = rig.take(33), tc = rig.take(20);
      const std::span<const int32_t> sa(a), sb(b), sc(c);
      rig.run(
          {{sa.first(50), 0, ta, false}, {sb.first(32), 0, tb, false}, {sc.first(1), 0, tc, true}});
      const Logits mixed = rig.run({{sb.subspan(32), 32, tb, true},
                                    {sa.subspan(50), 50, ta, true},
                                    {sc.subspan(1), 1, tc, true}});
      EXPECT_TRUE(same_bits(std::span(mixed).first(vocab), b_alone));
      EXPECT_TRUE(same_bits(std::span(mixed).subspan(vocab, vocab), a_alone));
      EXPECT_TRUE(same_bits(std::span(mixed).subspan(2 * vocab, vocab), c_alone));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(In, ArithmeticForward,
                         testing::Values(Arithmetic::kFp32, Arithmetic::kBf16),
                         [](const auto& test) { return arithmetic_name(test.param); });

// --- bf16 ----------------------------------------------------------------------------------------

TEST(Bf16Forward, IsNearFp32AndNotTheSame) {
  for (const ModelConfig& config : {odd_config(), tiny_qwen3_moe_config(), tiny_mixtral_config()}) {
    const Checkpoint checkpoint = make_test_checkpoint(config, 11);
    const Tokens tokens = random_tokens(61, config.vocab_size, 6);
    Rig exact(checkpoint), rig(checkpoint, 1, 80, Arithmetic::kBf16, best_bf16_unit());
    const Logits expected = exact.prompt(tokens, exact.take(61), 61);
    const Logits actual = rig.prompt(tokens, rig.take(61), 61);
    EXPECT_FALSE(same_bits(actual, expected));
    float largest = 0;
    for (const float value : expected) largest = std::max(largest, std::fabs(value));
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_NEAR(actual[i], expected[i], 0.05f * largest)
          << "logit " << i << ", " << config.num_experts << " experts";
    }
  }
}

TEST(Bf16Forward, IsPartOfTheModelsName) {
  const Checkpoint checkpoint = make_test_checkpoint(tiny_model_config(), 1);
  EXPECT_EQ(Model::create(checkpoint)->fingerprint(), fingerprint(checkpoint));
  const Model model = *Model::create(checkpoint, Arithmetic::kBf16);
  EXPECT_EQ(model.fingerprint(), fingerprint(checkpoint) + "+bf16");
  EXPECT_EQ(model.arithmetic(), Arithmetic::kBf16);
}

TEST(Bf16Forward, WeightsArePackedOnce) {
  // Padding of k to 32 and of n to 32 is all that may differ: here neither needs any.
  ModelConfig config = tiny_model_config();
  config.hidden_size = 128;
  config.intermediate_size = 256;
  config.vocab_size = 320;
  const Checkpoint checkpoint = make_test_checkpoint(config, 1);
  EXPECT_EQ(Model::create(checkpoint, Arithmetic::kBf16)->weight_bytes(),
            Model::create(checkpoint)->weight_bytes());
}

}  // namespace
}  // namespace baton::engine
