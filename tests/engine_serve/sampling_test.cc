// Sampling and the text that comes out of it.
#include "engine/serve/sampling.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "engine/model/test_model.h"
#include "engine/serve/output_text.h"

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

TEST(Sampling, DrawsFromTheDistribution) {
  const std::vector<float> logits = {std::log(0.5f), std::log(0.3f), std::log(0.2f)};
  std::map<int, int> counts;
  Sampler sampler;
  for (int i = 0; i < 20000; ++i) {
    ++counts[sampler.choose(logits, {.temperature = 1, .seed = 5}, i).token];
  }
  EXPECT_NEAR(counts[0], 10000, 400);
  EXPECT_NEAR(counts[1], 6000, 400);
  EXPECT_NEAR(counts[2], 4000, 400);
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
        SamplingParams{.max_tokens = 0}, SamplingParams{.stop = {""}},
        SamplingParams{.logprobs = 21}}) {
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
