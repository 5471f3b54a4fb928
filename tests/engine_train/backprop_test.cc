// The backward pass against finite differences; trainer_test has its independence of threads.
#include "engine/train/backward/backprop.h"

#include "tests/engine_model/test_model.h"
#include "tests/test.h"

namespace baton::engine::train {
namespace {

constexpr int kSequences = 2, kLength = 32;

std::vector<int32_t> random_tokens(int vocab) {
  std::mt19937 random(5);
  std::vector<int32_t> tokens(kSequences * (kLength + 1));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % vocab);
  return tokens;
}

ModelConfig model(bool tied) {
  ModelConfig config = tiny_model_config();
  config.num_heads = 4;  // two query heads per KV head
  config.num_kv_heads = 2;
  config.tie_word_embeddings = tied;
  return config;
}

class Gradients : public ::testing::TestWithParam<bool> {};

// Moves each range along a random direction: the loss must change as the gradient says.
TEST_P(Gradients, MatchFiniteDifferences) {
  const ParameterMap map(model(GetParam()));
  ComputePool pool(1);
  Backprop backprop(map, kSequences * kLength, kLength, pool);
  std::vector<float> parameters(map.size), gradients(map.size);
  initialize_parameters(map, 3, parameters.data());
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (float& value : parameters) value += 0.1f * normal(random);  // away from symmetry
  const std::vector<int32_t> tokens = random_tokens(map.config.vocab_size);
  size_t ready = 0;
  backprop.loss_and_gradients(parameters.data(), tokens, kSequences, kLength, gradients.data(),
                              [&](size_t begin, size_t end) {
                                EXPECT_EQ(begin, ready);
                                ready = end;
                              });
  EXPECT_EQ(ready, map.size);
  for (const ParameterRange& range : map.ranges()) {
    // Along the gradient itself, where the change is largest against rounding.
    double square = 0;
    for (size_t i = range.offset; i < range.end(); ++i) {
      square += static_cast<double>(gradients[i]) * gradients[i];
    }
    ASSERT_GT(square, 0) << "range at " << range.offset;
    const double reach = 0.02 / std::sqrt(square);
    const auto loss_at = [&](double way) {
      std::vector<float> moved = parameters;
      for (size_t i = range.offset; i < range.end(); ++i) {
        moved[i] += static_cast<float>(way * reach * gradients[i]);
      }
      return static_cast<double>(backprop.loss(moved.data(), tokens, kSequences, kLength));
    };
    const double measured = (loss_at(1) - loss_at(-1)) / (2 * reach);
    EXPECT_NEAR(measured / square, 1.0, 0.03)
        << "range at " << range.offset << ", " << range.rows << " x " << range.cols;
  }
}

INSTANTIATE_TEST_SUITE_P(Embeddings, Gradients, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "Tied" : "Untied"; });

}  // namespace
}  // namespace baton::engine::train
