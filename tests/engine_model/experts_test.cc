// The forward pass with experts: the same bits whatever is beside a token, and nobody is asked in
// vain. Configs, files and ranks of such models are in the tests of these.
#include "tests/engine_model/model_rig.h"
#include "tests/test.h"

namespace baton::engine {
namespace {

// More of both than the tiny ones have: an odd number of experts, and most of them without a token
// in a small step.
std::vector<ModelConfig> expert_configs() {
  ModelConfig many = odd_config();
  many.family = ModelFamily::kQwen3Moe;
  many.num_experts = 37;
  many.experts_per_token = 5;
  many.expert_size = 112;
  many.norm_topk_prob = true;
  many.dense_layers = {false, true, false};
  return {tiny_qwen3_moe_config(), tiny_mixtral_config(), many};
}

TEST(Experts, TheBatchDoesNotChangeABit) {
  for (const ModelConfig& config : expert_configs()) {
    for (const Arithmetic arithmetic : {Arithmetic::kFp32, Arithmetic::kBf16}) {
      const Checkpoint checkpoint = make_test_checkpoint(config, 9);
      const size_t vocab = size_t(config.vocab_size);
      const Tokens a = random_tokens(90, config.vocab_size, 3);
      const Tokens b = random_tokens(33, config.vocab_size, 4);
      const Tokens c = random_tokens(20, config.vocab_size, 5);
      Rig alone(checkpoint, 1, 80, arithmetic);
      const Logits a_alone = alone.prompt(a, alone.take(90), 1);
      const Logits b_alone = alone.prompt(b, alone.take(33), 33);
      const Logits c_alone = alone.prompt(c, alone.take(20), 7);

      Rig rig(checkpoint, 3, 80, arithmetic);
      const auto ta = rig.take(90), tb = rig.take(33), tc = rig.take(20);
      const std::span<const int32_t> sa(a), sb(b), sc(c);
      rig.run({{sa.first(50), 0, ta, false}, {sb.first(32), 0, tb, false}});
      const Logits mixed = rig.run(
          {{sb.subspan(32), 32, tb, true}, {sa.subspan(50), 50, ta, true}, {sc, 0, tc, true}});
      EXPECT_TRUE(same_bits(std::span(mixed).first(vocab), b_alone));
      EXPECT_TRUE(same_bits(std::span(mixed).subspan(vocab, vocab), a_alone));
      EXPECT_TRUE(same_bits(std::span(mixed).subspan(2 * vocab, vocab), c_alone));
    }
  }
}

TEST(Experts, TheKvThatIsStoredDoesNotDependOnChunks) {
  for (const ModelConfig& config : expert_configs()) {
    const Checkpoint checkpoint = make_test_checkpoint(config, 7);
    const Tokens tokens = random_tokens(100, config.vocab_size, 2);
    Rig whole(checkpoint, 2), single(checkpoint);
    whole.prompt(tokens, whole.take(tokens.size()), 100);
    single.prompt(tokens, single.take(tokens.size()), 1);
    EXPECT_EQ(std::memcmp(whole.memory.data(), single.memory.data(), whole.memory.size() * 2), 0);
  }
}

// Weights that are NaN are seen wherever they are multiplied with anything, zero included.
TEST(Experts, ATokenRunsOnlyItsChosenExperts) {
  for (ModelConfig config : expert_configs()) {
    config.dense_layers.clear();
    config.num_layers = 1;
    const Checkpoint checkpoint = make_test_checkpoint(config, 3);
    const Tokens tokens = {7};
    Rig rig(checkpoint);
    const Logits before = rig.prompt(tokens, rig.take(1), 1);
    int asked = 0;
    for (int e = 0; e < config.num_experts; ++e) {
      Checkpoint broken = checkpoint;
      for (const Weight& weight :
           checkpoint.experts(0).subspan(size_t(e) * kPerExpert, kPerExpert)) {
        auto& data = broken.weights[size_t(&weight - checkpoint.weights.data())].data;
        std::fill(data.begin(), data.end(), uint16_t{0x7fc0});
      }
      Rig other(broken);
      asked += same_bits(other.prompt(tokens, other.take(1), 1), before) ? 0 : 1;
    }
    EXPECT_EQ(asked, config.experts_per_token);
  }
}

TEST(Experts, WeightsThatSumToOneAreAnotherModel) {
  Checkpoint checkpoint = make_test_checkpoint(tiny_qwen3_moe_config(), 3);
  const Tokens tokens = random_tokens(20, 272, 2);
  Rig rig(checkpoint);
  const Logits before = rig.prompt(tokens, rig.take(20), 20);
  checkpoint.config.norm_topk_prob = true;
  Rig other(checkpoint);
  EXPECT_FALSE(same_bits(other.prompt(tokens, other.take(20), 20), before));
}

}  // namespace
}  // namespace baton::engine
