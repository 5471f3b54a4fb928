// The forward pass against a plain transformer; that work may be cut up is
// arithmetic_forward_test's.
#include "engine/kernels/elementwise.h"
#include "engine/model/rope.h"
#include "engine/tokenizer/tokenizer.h"
#include "tests/engine_model/model_rig.h"
#include "tests/test.h"

namespace baton::engine {
namespace {

// A transformer as one would write it on a blackboard, in double, over the whole sequence.
class Blackboard {
 public:
  explicit Blackboard(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  std::vector<double> logits(const Tokens& tokens) const {
    const ModelConfig& c = checkpoint_.config;
    Matrix x;
    for (const int32_t token : tokens) {
      std::vector<double> row;
      for (int i = 0; i < c.hidden_size; ++i) row.push_back(at(checkpoint_.embedding(), token, i));
      x.push_back(row);
    }
    for (int l = 0; l < c.num_layers; ++l) {
      attention(x, l);
      for (auto& row : x) {
        const auto h = norm(row, checkpoint_.layer(l, kPostNorm));
        if (c.has_experts(l)) {
          add(row, experts(h, l));
          continue;
        }
        auto gate = times(checkpoint_.layer(l, kGate), h);
        auto up = times(checkpoint_.layer(l, kUp), h);
        bias(gate, l, kGateBias);
        bias(up, l, kUpBias);
        add(row, times(checkpoint_.layer(l, kDown), gated(gate, up)));
        bias(row, l, kDownBias);
      }
    }
    return times(checkpoint_.lm_head(), norm(x.back(), checkpoint_.final_norm()));
  }

 private:
  using Matrix = std::vector<std::vector<double>>;
  static double at(const Weight& w, int row, int col) {
    return float_from_bf16(w.data[size_t(row) * size_t(w.cols) + size_t(col)]);
  }
  static void add(std::vector<double>& a, const std::vector<double>& b) {
    for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  }
  void bias(std::vector<double>& y, int l, LayerWeight kind) const {
    if (!has_weight(checkpoint_.config, l, kind)) return;
    for (size_t i = 0; i < y.size(); ++i) y[i] += at(checkpoint_.layer(l, kind), 0, int(i));
  }
  static std::vector<double> gated(std::vector<double> gate, const std::vector<double>& up) {
    for (size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
    return gate;
  }
  // Every expert is asked, and those that are not chosen have the weight zero.
  std::vector<double> experts(const std::vector<double>& h, int l) const {
    const ModelConfig& c = checkpoint_.config;
    std::vector<double> odds = times(checkpoint_.layer(l, kRouter), h);
    double sum = 0, kept = 0;
    for (double& odd : odds) sum += odd = std::exp(odd);
    std::vector<double> sorted = odds;
    std::sort(sorted.rbegin(), sorted.rend());
    const double least = sorted[size_t(c.experts_per_token) - 1];
    for (double& odd : odds) kept += odd = odd < least ? 0 : odd / sum;
    std::vector<double> y(h.size(), 0.0);
    for (size_t e = 0; e < odds.size(); ++e) {
      const Weight* expert = &checkpoint_.experts(l)[e * kPerExpert];
      const auto says = times(expert[kExpertDown],
                              gated(times(expert[kExpertGate], h), times(expert[kExpertUp], h)));
      const double weight = odds[e] / (c.norm_topk_prob ? kept : 1);
      for (size_t i = 0; i < y.size(); ++i) y[i] += weight * says[i];
    }
    return y;
  }
  // Each head by itself.
  void norm_heads(std::vector<double>& x, int l, LayerWeight kind) const {
    if (!has_weight(checkpoint_.config, l, kind)) return;
    const int dims = checkpoint_.config.head_dim;
    for (auto head = x.begin(); head < x.end(); head += dims) {
      const auto y = norm({head, head + dims}, checkpoint_.layer(l, kind));
      std::copy(y.begin(), y.end(), head);
    }
  }
  static std::vector<double> times(const Weight& w, const std::vector<double>& x) {
    std::vector<double> y(size_t(w.rows), 0.0);
    for (int r = 0; r < w.rows; ++r) {
      for (int i = 0; i < w.cols; ++i) y[size_t(r)] += at(w, r, i) * x[size_t(i)];
    }
    return y;
  }
  std::vector<double> norm(const std::vector<double>& x, const Weight& w) const {
    double squares = 0;
    for (const double v : x) squares += v * v;
    const double f = 1 / std::sqrt(squares / double(x.size()) + checkpoint_.config.rms_norm_eps);
    std::vector<double> y;
    for (size_t i = 0; i < x.size(); ++i) y.push_back(x[i] * f * at(w, 0, int(i)));
    return y;
  }
  void rotate(std::vector<double>& x, size_t position) const {
    const int dims = checkpoint_.config.head_dim;
    const std::vector<double> frequencies = rope_frequencies(checkpoint_.config);
    for (size_t head = 0; head < x.size(); head += size_t(dims)) {
      for (int i = 0; i < dims / 2; ++i) {
        const double angle = double(position) * frequencies[size_t(i)];
        double& a = x[head + size_t(i)];
        double& b = x[head + size_t(i + dims / 2)];
        a *= checkpoint_.config.rope_scaling.attention_factor;
        b *= checkpoint_.config.rope_scaling.attention_factor;
        const double rotated = a * std::cos(angle) - b * std::sin(angle);
        b = b * std::cos(angle) + a * std::sin(angle);
        a = rotated;
      }
    }
  }
  void attention(Matrix& x, int l) const {
    const ModelConfig& c = checkpoint_.config;
    Matrix q, k, v;
    for (size_t t = 0; t < x.size(); ++t) {
      const auto h = norm(x[t], checkpoint_.layer(l, kInputNorm));
      q.push_back(times(checkpoint_.layer(l, kQuery), h));
      k.push_back(times(checkpoint_.layer(l, kKey), h));
      v.push_back(times(checkpoint_.layer(l, kValue), h));
      bias(q.back(), l, kQueryBias);
      bias(k.back(), l, kKeyBias);
      bias(v.back(), l, kValueBias);
      norm_heads(q.back(), l, kQueryNorm);
      norm_heads(k.back(), l, kKeyNorm);
      rotate(q.back(), t);
      rotate(k.back(), t);
    }
    for (size_t t = 0; t < x.size(); ++t) {
      std::vector<double> mixed(q[t].size());
      for (int head = 0; head < c.num_heads; ++head) {
        const size_t qo = size_t(head) * size_t(c.head_dim);
        const size_t ko = size_t(head / (c.num_heads / c.num_kv_heads)) * size_t(c.head_dim);
        std::vector<double> p;
        double sum = 0;
        for (size_t s = 0; s <= t; ++s) {
          double dot = c.window(l) > 0 && s + size_t(c.window(l)) <= t ? -1e9 : 0;
          for (size_t i = 0; i < size_t(c.head_dim); ++i) dot += q[t][qo + i] * k[s][ko + i];
          p.push_back(std::exp(dot / std::sqrt(double(c.head_dim))));
          sum += p.back();
        }
        for (size_t s = 0; s <= t; ++s) {
          for (size_t i = 0; i < size_t(c.head_dim); ++i)
            mixed[qo + i] += p[s] / sum * v[s][ko + i];
        }
      }
      add(x[t], times(checkpoint_.layer(l, kOutput), mixed));
      bias(x[t], l, kOutputBias);
    }
  }

  const Checkpoint& checkpoint_;
};

std::vector<ModelConfig> all_configs() {
  std::vector<ModelConfig> all = family_configs();
  all.insert(all.end(), {tiny_model_config(), odd_config()});
  return all;
}

// Promise(engine): Supported checkpoints give the logits of transformers over bf16 KV | one forward
//   pass; unknown settings are refused by name
TEST(Forward, MatchesAPlainTransformer) {
  for (const ModelConfig& config : all_configs()) {
    // Small weights: bf16 KV is then the only rounding that counts.
    Checkpoint checkpoint = make_test_checkpoint(config, 5);
    for (Weight& weight : checkpoint.weights) {
      if (weight.is_vector) continue;
      for (uint16_t& bits : weight.data) bits = bf16_from_float(float_from_bf16(bits) * 0.5f);
    }
    Rig rig(checkpoint);
    const Tokens tokens = random_tokens(37, config.vocab_size, 1);
    const auto table = rig.take(tokens.size());
    const Logits actual = rig.prompt(tokens, table, tokens.size());
    const std::vector<double> expected = Blackboard(checkpoint).logits(tokens);
    double largest = 0;
    for (const double value : expected) largest = std::max(largest, std::fabs(value));
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_NEAR(actual[i], expected[i], 0.02 * largest) << "logit " << i;
    }
  }
}

TEST(Forward, AWindowHidesWhatLiesBeforeIt) {
  ModelConfig config = tiny_model_config();
  config.family = ModelFamily::kMistral;
  config.sliding_window = 24;  // two layers: the last of 100 tokens sees 47 of them
  const Checkpoint checkpoint = make_test_checkpoint(config, 13);
  Tokens tokens = random_tokens(100, 272, 7);
  Rig rig(checkpoint, 1, 200);
  const Logits before = rig.prompt(tokens, rig.take(100), 33);
  for (const auto& [changed, seen] : {std::pair{52, false}, std::pair{53, true}}) {
    Tokens other = tokens;
    other[size_t(changed)] = (other[size_t(changed)] + 1) % 272;
    EXPECT_EQ(same_bits(rig.prompt(other, rig.take(100), 33), before), !seen) << changed;
  }
}

TEST(CommittedModel, LoadsIsSmallAndContinuesScripture) {
  const std::string directory = BATON_MODELS "/kjv-1.8m";
  EXPECT_LT(std::filesystem::file_size(directory + "/model.safetensors"), 4'000'000u);
  auto checkpoint = must(load_checkpoint(directory));
  auto tokenizer = must(Tokenizer::load(directory + "/tokenizer.json"));
  EXPECT_EQ(tokenizer.vocab_size(), checkpoint.config.vocab_size);
  Rig rig(checkpoint);
  Tokens tokens = tokenizer.encode("  3 And God said, Let there be light: and there was");
  const auto table = rig.take(tokens.size() + 1);
  const Logits logits = rig.prompt(tokens, table, tokens.size());
  const auto best = std::max_element(logits.begin(), logits.end()) - logits.begin();
  EXPECT_FALSE(tokenizer.token_bytes(int32_t(best)).empty());
  // Far more likely than chance: the words of the text cost less than 3 nats each on average.
  double nats = 0;
  for (size_t i = 8; i + 1 < tokens.size(); ++i) {
    const Logits row = rig.prompt({tokens.begin(), tokens.begin() + long(i)}, table, 64);
    double sum = 0;
    for (const float value : row) sum += std::exp(double(value));
    nats += std::log(sum) - row[size_t(tokens[i])];
  }
  EXPECT_LT(nats / double(tokens.size() - 9), 3.0);
}

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
