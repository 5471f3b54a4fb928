// Byte-level BPE: ids as the reference gives them, any bytes back again, streams of valid UTF-8.
#include "engine/tokenizer/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "engine/files/json_fields.h"
#include "engine/model/test_model.h"
#include "engine/tokenizer/pre_tokenizer.h"
#include "engine/tokenizer/unicode_classes.h"

namespace baton::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> words(std::string_view text, PreTokenizer pattern) {
  std::vector<std::string> out;
  while (!text.empty()) {
    const size_t length = next_word(text, pattern);
    EXPECT_GT(length, 0u);
    EXPECT_LE(length, text.size());
    if (length == 0 || length > text.size()) break;
    out.emplace_back(text.substr(0, length));
    text.remove_prefix(length);
  }
  return out;
}

TEST(PreTokenizer, CutsAsGpt2Does) {
  const auto cut = [](std::string_view text) { return words(text, PreTokenizer::kGpt2); };
  EXPECT_THAT(cut("Hello world's  end, 2024!"),
              ElementsAre("Hello", " world", "'s", " ", " end", ",", " 2024", "!"));
  EXPECT_THAT(cut("  1 In"), ElementsAre(" ", " 1", " In"));
  EXPECT_THAT(cut("a\n\n b"), ElementsAre("a", "\n\n", " b"));
  EXPECT_THAT(cut("we'll I'VE"), ElementsAre("we", "'ll", " I", "'", "VE"));
  EXPECT_THAT(cut("end   "), ElementsAre("end", "   "));
  EXPECT_THAT(cut("\xc3\xa9t\xc3\xa9 \xe6\x97\xa5\xe6\x9c\xac"),
              ElementsAre("\xc3\xa9t\xc3\xa9", " \xe6\x97\xa5\xe6\x9c\xac"));
}

TEST(PreTokenizer, CutsAsLlama3AndQwen2Do) {
  const auto cut = [](std::string_view text) { return words(text, PreTokenizer::kLlama3); };
  EXPECT_THAT(cut("I'VE 12345 (see) x\n\n  y"),
              ElementsAre("I", "'VE", " ", "123", "45", " (", "see", ")", " x", "\n\n", " ", " y"));
  EXPECT_THAT(cut("a !\n\nb"), ElementsAre("a", " !\n\n", "b"));
  EXPECT_THAT(words("123", PreTokenizer::kQwen2), ElementsAre("1", "2", "3"));
}

TEST(UnicodeClasses, KnowsLettersNumbersAndSpaces) {
  EXPECT_TRUE(is_letter('a') && is_letter(0xe9) && is_letter(0x65e5) && is_letter(0x10400));
  EXPECT_FALSE(is_letter('1') || is_letter(' ') || is_letter(0x301) || is_letter(0x1f600));
  EXPECT_TRUE(is_number('7') && is_number(0xbd) && is_number(0x660));
  EXPECT_FALSE(is_number('x'));
  EXPECT_TRUE(is_space('\t') && is_space(0xa0) && is_space(0x2003) && is_space(0x3000));
  EXPECT_FALSE(is_space(0x200b));
}

TEST(Tokenizer, MergesByRank) {
  const Tokenizer tokenizer = make_test_tokenizer();
  // th = 257, the = 258, in = 259, an = 260, " a" = 261.
  EXPECT_THAT(tokenizer.encode("then"), ElementsAre(258, 'n'));
  EXPECT_THAT(tokenizer.encode("in an"), ElementsAre(259, ' ', 260));
  EXPECT_THAT(tokenizer.encode(" a"), ElementsAre(261));
  EXPECT_THAT(tokenizer.encode(""), ElementsAre());
}

TEST(Tokenizer, AnyBytesComeBack) {
  const Tokenizer tokenizer = make_test_tokenizer();
  std::mt19937 random(1);
  for (int repeat = 0; repeat < 300; ++repeat) {
    std::string text;
    for (uint32_t n = random() % 60; n > 0; --n) {
      text += random() % 3 == 0 ? static_cast<char>(random()) : "the an\n1 "[random() % 9];
    }
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  }
}

TEST(Tokenizer, LongWordsTakeNoQuadraticTime) {
  const Tokenizer tokenizer = make_test_tokenizer();
  const std::string text(2'000'000, 't');  // an n^2 method would take hours
  EXPECT_EQ(tokenizer.encode(text).size(), text.size());
  std::string merging;
  for (int i = 0; i < 300'000; ++i) merging += "th";
  EXPECT_EQ(tokenizer.encode(merging).size(), 300'000u);
}

TEST(Tokenizer, SpecialTokensAreMatchedOnlyWhenAsked) {
  const Tokenizer tokenizer = make_test_tokenizer();
  EXPECT_THAT(tokenizer.encode("a<|endoftext|>b"), ElementsAre('a', 256, 'b'));
  const auto plain =
      tokenizer.encode("<|endoftext|>", {.add_prefix = true, .parse_special = false});
  EXPECT_GT(plain.size(), 1u);
  EXPECT_THAT(plain, ::testing::Not(::testing::Contains(256)));
  EXPECT_EQ(tokenizer.decode({'a', 256, 'b'}), "ab");
  EXPECT_EQ(tokenizer.special_id("<|endoftext|>"), 256);
  EXPECT_EQ(tokenizer.special_id("<|nothing|>"), -1);
  EXPECT_TRUE(tokenizer.is_special(256));
  EXPECT_FALSE(tokenizer.is_special(-1) || tokenizer.is_special(1 << 30));
  EXPECT_EQ(tokenizer.token_bytes(-1), "");
  EXPECT_EQ(tokenizer.token_bytes(1 << 30), "");
}

TEST(Tokenizer, RoundTripsThroughItsFile) {
  for (const auto pattern : {PreTokenizer::kGpt2, PreTokenizer::kLlama3, PreTokenizer::kQwen2}) {
    TokenizerSpec spec = make_test_tokenizer().spec();
    spec.pre_tokenizer = pattern;
    spec.prepend_id = pattern == PreTokenizer::kLlama3 ? 256 : -1;
    spec.ignore_merges = pattern == PreTokenizer::kLlama3;
    while (spec.tokens.back().empty()) spec.tokens.pop_back();
    const Tokenizer original = *Tokenizer::create(spec);
    auto read = Tokenizer::parse(original.to_json());
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->spec().tokens, spec.tokens);
    EXPECT_EQ(read->spec().merges, spec.merges);
    EXPECT_EQ(read->spec().special_ids, spec.special_ids);
    EXPECT_EQ(read->spec().pre_tokenizer, pattern);
    EXPECT_EQ(read->spec().prepend_id, spec.prepend_id);
    EXPECT_EQ(read->spec().ignore_merges, spec.ignore_merges);
    EXPECT_EQ(read->to_json(), original.to_json());
    const std::string text = "the <|endoftext|>\n 123456 \xff an' all";
    EXPECT_EQ(read->encode(text), original.encode(text));
  }
}

TEST(Tokenizer, ReadsMergesWrittenAsPairs) {
  auto json = *parse_json(make_test_tokenizer().to_json(), "test");
  for (auto& merge : json["model"]["merges"]) {
    const std::string text = merge.get<std::string>();
    merge = {text.substr(0, text.find(' ')), text.substr(text.find(' ') + 1)};
  }
  auto read = Tokenizer::parse(json.dump());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_THAT(read->encode("then"), ElementsAre(258, 'n'));
}

TEST(Tokenizer, RefusesWhatItWouldEncodeWrong) {
  const auto json = *parse_json(make_test_tokenizer().to_json(), "test");
  const auto error = [&](auto&& change) {
    auto copy = json;
    change(copy);
    auto read = Tokenizer::parse(copy.dump());
    EXPECT_FALSE(read.ok());
    return read.ok() ? std::string() : std::string(read.status().message());
  };
  using Json = nlohmann::json;
  EXPECT_THAT(error([](Json& j) { j["model"]["type"] = "WordPiece"; }), HasSubstr("WordPiece"));
  EXPECT_THAT(error([](Json& j) { j["model"] = 3; }), HasSubstr("model"));
  EXPECT_THAT(error([](Json& j) { j["normalizer"] = {{"type", "NFC"}}; }), HasSubstr("normalizer"));
  EXPECT_THAT(error([](Json& j) { j["model"]["vocab"] = Json::array(); }), HasSubstr("vocab"));
  EXPECT_THAT(error([](Json& j) { j["model"]["vocab"]["a"] = -1; }), HasSubstr("\"a\""));
  EXPECT_THAT(error([](Json& j) { j["model"]["vocab"]["a"] = 1u << 31; }), HasSubstr("\"a\""));
  EXPECT_THAT(error([](Json& j) { j["model"]["vocab"]["a"] = 'b'; }), HasSubstr("two tokens"));
  EXPECT_THAT(error([](Json& j) { j["model"]["vocab"].erase("a"); }), HasSubstr("\"a\""));
  EXPECT_THAT(error([](Json& j) { j["model"]["merges"][0] = "t"; }), HasSubstr("merge 0"));
  EXPECT_THAT(error([](Json& j) { j["model"]["merges"][0] = 5; }), HasSubstr("merge 0"));
  EXPECT_THAT(error([](Json& j) { j["model"]["merges"][0] = "a b"; }), HasSubstr("no token"));
  EXPECT_THAT(error([](Json& j) { j["pre_tokenizer"]["type"] = "Whitespace"; }),
              HasSubstr("Whitespace"));
  EXPECT_THAT(error([](Json& j) { j["pre_tokenizer"]["use_regex"] = false; }),
              HasSubstr("pre-tokenizer"));
  EXPECT_THAT(error([](Json& j) {
                j["post_processor"] = {{"type", "BertProcessing"}};
              }),
              HasSubstr("BertProcessing"));
  EXPECT_THAT(error([](Json& j) { j["added_tokens"][0]["lstrip"] = true; }), HasSubstr("lstrip"));
  EXPECT_THAT(error([](Json& j) { j["added_tokens"][0].erase("id"); }), HasSubstr("added"));
}

TEST(Tokenizer, TruncatedFilesAreErrors) {
  const std::string whole = make_test_tokenizer().to_json();
  for (size_t cut = 0; cut + 2 < whole.size(); cut += 13) {
    EXPECT_FALSE(Tokenizer::parse(whole.substr(0, cut)).ok()) << cut;
  }
  EXPECT_FALSE(Tokenizer::parse(std::string(5000, '{')).ok());
  EXPECT_TRUE(absl::IsNotFound(Tokenizer::load("/does/not/exist").status()));
}

TEST(Tokenizer, CreateChecksItsSpec) {
  TokenizerSpec spec = make_test_tokenizer().spec();
  spec.merges.emplace_back(0, 100000);
  EXPECT_FALSE(Tokenizer::create(spec).ok());
  spec.merges.back() = {'q', 'x'};
  EXPECT_FALSE(Tokenizer::create(spec).ok());
  spec.merges.pop_back();
  spec.special_ids.push_back(-4);
  EXPECT_FALSE(Tokenizer::create(spec).ok());
  spec.special_ids.pop_back();
  spec.prepend_id = 100000;
  EXPECT_FALSE(Tokenizer::create(spec).ok());
  spec.prepend_id = -1;
  EXPECT_TRUE(Tokenizer::create(spec).ok());
  spec.tokens[7].clear();
  EXPECT_FALSE(Tokenizer::create(spec).ok());
}

TEST(StreamDecoder, HoldsBackUnfinishedCharacters) {
  const Tokenizer tokenizer = make_test_tokenizer();
  const std::string text = "a\xe6\x97\xa5\xf0\x9f\x98\x80z";
  StreamDecoder decoder(tokenizer);
  std::vector<std::string> pieces;
  for (const char c : text) pieces.push_back(decoder.push(static_cast<uint8_t>(c)));
  EXPECT_THAT(pieces,
              ElementsAre("a", "", "", "\xe6\x97\xa5", "", "", "", "\xf0\x9f\x98\x80", "z"));
  EXPECT_EQ(decoder.finish(), "");
}

TEST(StreamDecoder, ReplacesWhatIsNoCharacter) {
  const Tokenizer tokenizer = make_test_tokenizer();
  StreamDecoder decoder(tokenizer);
  const std::string replacement = "\xef\xbf\xbd";
  EXPECT_EQ(decoder.push(0xff), replacement);
  EXPECT_EQ(decoder.push(0xe6), "");
  EXPECT_EQ(decoder.push('a'), replacement + "a");
  EXPECT_EQ(decoder.push(256), "") << "special tokens are not text";
  EXPECT_EQ(decoder.push(0xf0), "");
  EXPECT_EQ(decoder.push(0x9f), "");
  EXPECT_EQ(decoder.finish(), replacement);
  EXPECT_EQ(decoder.finish(), "");
}

}  // namespace
}  // namespace baton::engine
