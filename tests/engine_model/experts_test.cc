// The forward pass with experts: nobody is asked in vain. That work may be cut up is
// arithmetic_forward_test's; configs, files and ranks of such models are in the tests of these.
#include "tests/engine_model/model_rig.h"
#include "tests/test.h"

namespace baton::engine {
namespace {

std::vector<ModelConfig> expert_configs() {
  return {tiny_qwen3_moe_config(), tiny_mixtral_config(), many_experts_config()};
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

}  // namespace
}  // namespace baton::engine
