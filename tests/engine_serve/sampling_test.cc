// Sampling and the text that comes out of it.
#include "engine/serve/requests/sampling.h"

#include "engine/serve/requests/output_text.h"
#include "tests/engine_model/test_model.h"
#include "tests/test.h"

namespace baton::engine::serve {
namespace {

TEST(Sampling, GreedyTakesTheFirstOfEquals) {
  const std::vector<float> logits = {1, 5, 5, NAN, -INFINITY};
  EXPECT_EQ(Sampler().choose(logits, {}, 0).token, 1);
}

TEST(Sampling, UniformDependsOnSeedAndPositionOnly) {
  EXPECT_EQ(uniform_at(7, 100), uniform_at(7, 100));
  EXPECT_NE(uniform_at(7, 100), uniform_at(8, 100));
  EXPECT_NE(uniform_at(7, 100), uniform_at(7, 101));
  double sum = 0;
  for (int i = 0; i < 10000; ++i) {
    const double value = uniform_at(3, i);
    ASSERT_GE(value, 0);
    ASSERT_LT(value, 1);
    sum += value;
  }
  EXPECT_NEAR(sum / 10000, 0.5, 0.02);
}

TEST(Sampling, TopKAndTopPCutTheTail) {
  const std::vector<float> logits = {0, 3, 1, 2};
  Sampler sampler;
  for (int i = 0; i < 500; ++i) {
    const int by_k = sampler.choose(logits, {.temperature = 5, .top_k = 2, .seed = 1}, i).token;
    EXPECT_TRUE(by_k == 1 || by_k == 3) << by_k;
    // p(1) = 0.64 at temperature 1: with 0.6 it is alone, with 0.7 token 3 joins it.
    EXPECT_EQ(sampler.choose(logits, {.temperature = 1, .top_p = 0.6, .seed = 1}, i).token, 1);
    const int by_p = sampler.choose(logits, {.temperature = 1, .top_p = 0.7, .seed = 1}, i).token;
    EXPECT_TRUE(by_p == 1 || by_p == 3) << by_p;
  }
}

// Sorts everything, as the definition says.
int32_t reference_sample(const std::vector<float>& logits, const SamplingParams& params,
                         uint64_t position) {
  std::vector<std::pair<float, int32_t>> all;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!std::isnan(logits[i])) all.emplace_back(logits[i], static_cast<int32_t>(i));
  }
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
    return a.first > b.first || (a.first == b.first && a.second < b.second);
  });
  if (params.top_k > 0) all.resize(std::min<size_t>(all.size(), params.top_k));
  std::vector<double> weights;
  double total = 0;
  for (const auto& [logit, token] : all) {
    weights.push_back(std::exp((static_cast<double>(logit) - all[0].first) / params.temperature));
    total += weights.back();
  }
  size_t kept = weights.size();
  if (params.top_p < 1) {
    double sum = 0;
    kept = 0;
    while (kept < weights.size() && sum < params.top_p * total) sum += weights[kept++];
    total = sum;
  }
  double left = uniform_at(params.seed, position) * total;
  for (size_t i = 0; i < kept; ++i) {
    if (left < weights[i]) return all[i].second;
    left -= weights[i];
  }
  return all[kept - 1].second;
}

// Promise(engine): Sampling chooses the token that sorting the whole vocabulary would | where
//   rounding could decide, it sorts
TEST(Sampling, WithoutSortingTheSameTokensAsWith) {
  std::mt19937_64 random(7);
  std::normal_distribution<float> normal;
  Sampler sampler;
  size_t draws = 0;
  for (int round = 0; round < 600; ++round) {
    const size_t vocab = 1 + random() % (round % 3 == 0 ? 5000 : 300);
    const float spread = 0.01f * static_cast<float>(1 + random() % 800);
    std::vector<float> logits(vocab);
    for (float& logit : logits) {
      logit = normal(random) * spread;
      if (round % 4 == 0) logit = std::round(logit);  // many are equal
    }
    if (round % 5 == 0) logits[random() % vocab] = NAN;
    if (round % 7 == 0) logits[random() % vocab] = -INFINITY;
    SamplingParams params{.temperature = 0.05 * static_cast<double>(1 + random() % 60),
                          .seed = random()};
    if (random() % 2 == 0) params.top_p = 0.01 * static_cast<double>(1 + random() % 99);
    if (random() % 3 == 0) params.top_k = 1 + static_cast<int>(random() % 400);
    if (std::isnan(logits[0]) && vocab == 1) continue;
    for (uint64_t position = 0; position < 20; ++position, ++draws) {
      ASSERT_EQ(sampler.choose(logits, params, position).token,
                reference_sample(logits, params, position))
          << "round " << round << ", position " << position;
    }
  }
  EXPECT_GT(draws, 10000u);
  EXPECT_LT(sampler.full_sorts(), draws / 100);
}

TEST(Sampling, PenaltiesBiasesAndLimits) {
  const std::vector<float> logits = {3, 2.5, 2, -1};
  Sampler sampler;
  const std::vector<int32_t> said = {1, 0, 0};  // the first is the prompt
  const std::vector<int32_t> end = {0};
  const SampleHistory history{said, 1, end};
  const auto greedy = [&](const SamplingParams& params) {
    return sampler.choose(logits, params, 3, history).token;
  };
  EXPECT_EQ(greedy({}), 0);
  EXPECT_EQ(greedy({.presence_penalty = 0.4}), 0);
  EXPECT_EQ(greedy({.presence_penalty = 0.6}), 1);   // 3 - 0.6: token 1 is of the prompt
  EXPECT_EQ(greedy({.frequency_penalty = 0.2}), 0);  // 3 - 2 * 0.2
  EXPECT_EQ(greedy({.frequency_penalty = 0.3}), 1);
  EXPECT_EQ(greedy({.repetition_penalty = 1.4}), 0);  // 3 / 1.4 = 2.14, 2.5 / 1.4 = 1.79
  EXPECT_EQ(greedy({.repetition_penalty = 1.6}), 2);  // 1.88, 1.56, 2
  EXPECT_EQ(greedy({.logit_bias = {{3, 100}}}), 3);
  EXPECT_EQ(greedy({.logit_bias = {{0, -100}, {1, -100}}}), 2);
  EXPECT_EQ(greedy({.min_tokens = 2}), 0);  // two are there
  EXPECT_EQ(greedy({.min_tokens = 3}), 1);  // 0 would end the output
  EXPECT_EQ(greedy({.stop_token_ids = {1}, .min_tokens = 3}), 2);
  // Log probabilities are the model's own.
  const TokenChoice choice = sampler.choose(logits, {.logit_bias = {{3, 100}}, .logprobs = 1}, 3);
  EXPECT_EQ(choice.top[0].first, 0);
  // Of min_p, by the likeliest: 1, 0.61, 0.37, 0.02.
  std::map<int, int> counts;
  for (int i = 0; i < 300; ++i) {
    ++counts[sampler.choose(logits, {.temperature = 1, .seed = 1, .min_p = 0.5}, i).token];
  }
  EXPECT_EQ(counts.size(), 2u);
  EXPECT_EQ(counts[2] + counts[3], 0);
}

TEST(Sampling, ExtremeValuesAreHarmless) {
  const float infinity = std::numeric_limits<float>::infinity();
  Sampler sampler;
  const SamplingParams params{.temperature = 1e-9, .top_k = 3, .top_p = 1e-9, .logprobs = 5};
  for (const std::vector<float>& logits :
       {std::vector<float>{-infinity, -infinity}, {NAN, NAN}, {1e38f, -1e38f}, {NAN, 1}}) {
    const int32_t token = sampler.choose(logits, params, 0).token;
    EXPECT_GE(token, 0);
    EXPECT_LT(token, 2);
  }
}

TEST(Sampling, LogProbabilities) {
  const std::vector<float> logits = {std::log(0.5f), std::log(0.3f), std::log(0.2f)};
  const TokenChoice choice = Sampler().choose(logits, {.logprobs = 2}, 0);
  EXPECT_EQ(choice.token, 0);
  EXPECT_NEAR(choice.logprob, std::log(0.5), 1e-6);
  ASSERT_EQ(choice.top.size(), 2u);
  EXPECT_EQ(choice.top[1].first, 1);
  EXPECT_NEAR(choice.top[1].second, std::log(0.3), 1e-6);
}

TEST(Sampling, ParametersAreChecked) {
  EXPECT_TRUE(SamplingParams().validate().ok());
  for (const SamplingParams& bad :
       {SamplingParams{.temperature = -1}, SamplingParams{.temperature = NAN},
        SamplingParams{.top_k = -1}, SamplingParams{.top_p = 0}, SamplingParams{.top_p = 1.5},
        SamplingParams{.max_tokens = -1}, SamplingParams{.stop = {""}}, SamplingParams{.min_p = 2},
        SamplingParams{.presence_penalty = 3}, SamplingParams{.repetition_penalty = 0},
        SamplingParams{.logit_bias = {{1, 101}}}, SamplingParams{.min_tokens = 17},
        SamplingParams{.stop = {"x"}, .min_tokens = 1}, SamplingParams{.logprobs = 21}}) {
    EXPECT_EQ(bad.validate().code(), absl::StatusCode::kInvalidArgument);
  }
}

// Feeds `text` byte by byte (the test tokenizer has a token per byte) and collects what comes out.
std::string stream(const std::string& text, std::vector<std::string> stop, bool* stopped = nullptr,
                   size_t* at = nullptr) {
  const Tokenizer tokenizer = make_test_tokenizer();
  OutputText output(tokenizer, std::move(stop));
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const std::vector<int32_t> ids = tokenizer.encode(text.substr(i, 1));
    EXPECT_EQ(ids.size(), 1u);
    out += output.push(ids[0]);
    if (output.stopped()) {
      if (at != nullptr) *at = i + 1;
      break;
    }
  }
  if (stopped != nullptr) *stopped = output.stopped();
  return out + output.finish();
}

TEST(OutputText, EndsBeforeAStopString) {
  bool stopped = false;
  size_t at = 0;
  EXPECT_EQ(stream("In the beginning", {"beg", "zzz"}, &stopped, &at), "In the ");
  EXPECT_TRUE(stopped);
  EXPECT_EQ(at, 10u);
}

TEST(OutputText, GivesBackWhatLookedLikeAStop) {
  bool stopped = true;
  EXPECT_EQ(stream("aab aaab", {"aaaa"}, &stopped), "aab aaab");
  EXPECT_FALSE(stopped);
  EXPECT_EQ(stream("xaabaac", {"aabaad"}), "xaabaac");
  EXPECT_EQ(stream("xaabaabaad!", {"aabaad"}), "xaab");
}

TEST(OutputText, HoldsBackIncompleteCharacters) {
  const Tokenizer tokenizer = make_test_tokenizer();
  OutputText output(tokenizer, {});
  const std::string text = "\xe2\x82\xac";  // one character of three bytes
  std::vector<std::string> pieces;
  for (char byte : text) {
    for (int32_t id : tokenizer.encode(std::string(1, byte))) pieces.push_back(output.push(id));
  }
  EXPECT_EQ(pieces, (std::vector<std::string>{"", "", text}));
  EXPECT_EQ(output.finish(), "");
}

}  // namespace
}  // namespace baton::engine::serve
