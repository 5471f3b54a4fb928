// The trainer learns, repeats itself bit for bit, and saves what the engine loads.
#include "engine/train/trainer.h"

#include "engine/model/model.h"
#include "engine/train/corpus.h"
#include "tests/engine_model/test_model.h"
#include "tests/engine_train/train_fixture.h"
#include "tests/test.h"

namespace baton::engine::train {
namespace {

TEST(Trainer, LearnsRegularTextAndRepeatsItself) {
  const std::string text = verses();
  auto tokenizer = must(train_bpe(Corpus::training_text(text), 272));
  const Corpus corpus = Corpus::make(text, tokenizer);
  TrainerOptions options = tiny_options(40);
  options.length = 64;
  options.long_length = 128;
  std::vector<uint16_t> first;
  for (int threads : {1, 2}) {
    ComputePool pool(threads);
    auto trainer = must(Trainer::create(options, corpus, pool));
    const double before = trainer->held_out_bits_per_byte(4, false).value();
    run_steps(*trainer, 0, 40);
    EXPECT_LT(trainer->held_out_bits_per_byte(4, true).value(), 0.5 * before);
    const Checkpoint checkpoint = trainer->checkpoint();
    if (threads == 1) {
      first = checkpoint.embedding().data;
    } else {
      EXPECT_EQ(first, checkpoint.embedding().data);
    }
    EXPECT_TRUE(Model::create(checkpoint).ok());
  }
}

TEST(Trainer, RefusesTextThatIsTooShort) {
  const Corpus corpus = Corpus::make("In the beginning.\n", make_test_tokenizer());
  ComputePool pool(1);
  auto trainer = Trainer::create(tiny_options(40), corpus, pool);
  EXPECT_EQ(trainer.status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(Trainer, RefusesModelsItHasNoGradientsFor) {
  ComputePool pool(1);
  const auto error = [&](auto&& change) {
    TrainerOptions options = tiny_options(40);
    change(options.model);
    return std::string(Trainer::create(options, TinyText::get().corpus, pool).status().message());
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(error([](ModelConfig& c) { c.family = ModelFamily::kQwen2; }),
              HasSubstr("attention biases"));
  EXPECT_THAT(error([](ModelConfig& c) { c.family = ModelFamily::kQwen3; }), HasSubstr("norms"));
  EXPECT_THAT(error([](ModelConfig& c) { c.mlp_bias = true; }), HasSubstr("feed-forward"));
  for (const ModelConfig& experts : {tiny_qwen3_moe_config(), tiny_mixtral_config()}) {
    EXPECT_THAT(error([&](ModelConfig& c) { c = experts; }),
                HasSubstr("a model with experts cannot be trained"));
  }
  EXPECT_THAT(error([](ModelConfig& c) { c.sliding_window = 8; }), HasSubstr("window"));
}

// A twentieth is held out wherever lines end, or do not end at all.
TEST(Corpus, SplitsAtALineAWordOrACharacter) {
  const auto repeated = [](const std::string& piece) {
    std::string text;
    while (text.size() < 20'000) text += piece;
    return text;
  };
  const Tokenizer tokenizer = make_test_tokenizer();
  const struct {
    std::string text;
    std::string last;  // of what is learned
  } cases[] = {{repeated("a line of text\n"), "text\n"},
               {repeated("one long line of words "), " "},
               {repeated("one long line with an end ") + "\n", " "},
               {repeated("two lines ") + "\n" + repeated("the second much longer"), " "},
               {repeated("noblanks"), ""},
               {repeated("\u20ac\u00fc"), ""}};
  for (const auto& [text, last] : cases) {
    const std::string_view training = Corpus::training_text(text);
    EXPECT_TRUE(training.ends_with(last)) << training.substr(training.size() - 20);
    const Corpus corpus = Corpus::make(text, tokenizer);
    EXPECT_EQ(corpus.held_out_bytes, text.size() - training.size());
    EXPECT_LE(corpus.held_out_bytes, text.size() / 20);
    EXPECT_GE(corpus.held_out_bytes, text.size() / 20 / 2 - 1) << last;
    EXPECT_EQ(tokenizer.decode(corpus.train), training);  // whole characters
    EXPECT_FALSE(corpus.held_out.empty());
  }
}

TEST(Corpus, SamplesDependOnSeedStepAndIndexAlone) {
  const auto at = [](uint64_t seed, int step, int index) {
    return TinyText::get().corpus.sample(seed, step, index, 64).data();
  };
  EXPECT_EQ(at(1, 2, 3), at(1, 2, 3));
  EXPECT_NE(at(1, 2, 3), at(2, 2, 3));
  EXPECT_NE(at(1, 2, 3), at(1, 3, 3));
  EXPECT_NE(at(1, 2, 3), at(1, 2, 4));
}

TEST(Bpe, MergesTheMostFrequentPairFirst) {
  auto tokenizer = must(train_bpe("aaab aaab aaab bc bc", 259));
  EXPECT_EQ(tokenizer.token_bytes(257), "aa");
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("aaab bc")), "aaab bc");
  EXPECT_FALSE(train_bpe("ab", 300).ok());
  EXPECT_FALSE(train_bpe("ab", 100).ok());
}

}  // namespace
}  // namespace baton::engine::train
