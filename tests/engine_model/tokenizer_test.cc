// Byte-level BPE: ids as the reference gives them, any bytes back again, streams of valid UTF-8.
#include "engine/tokenizer/tokenizer.h"

#include "engine/files/files.h"
#include "engine/files/json_fields.h"
#include "engine/tokenizer/pre_tokenizer.h"
#include "tests/engine_model/test_model.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"

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

// Without the ids behind the last token.
TokenizerSpec trimmed_spec() {
  TokenizerSpec spec = make_test_tokenizer().spec();
  while (spec.tokens.back().empty()) spec.tokens.pop_back();
  return spec;
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
    TokenizerSpec spec = trimmed_spec();
    spec.pre_tokenizer = pattern;
    spec.prepend_id = pattern == PreTokenizer::kLlama3 ? 256 : -1;
    spec.ignore_merges = pattern == PreTokenizer::kLlama3;
    const Tokenizer original = *Tokenizer::create(spec);
    auto read = must(Tokenizer::parse(original.to_json()));
    EXPECT_EQ(read.spec().tokens, spec.tokens);
    EXPECT_EQ(read.spec().merges, spec.merges);
    ASSERT_EQ(read.spec().added_tokens.size(), 1u);
    EXPECT_EQ(read.spec().added_tokens[0].id, 256);
    EXPECT_EQ(read.spec().pre_tokenizer, pattern);
    EXPECT_EQ(read.spec().prepend_id, spec.prepend_id);
    EXPECT_EQ(read.spec().ignore_merges, spec.ignore_merges);
    EXPECT_EQ(read.to_json(), original.to_json());
    const std::string text = "the <|endoftext|>\n 123456 \xff an' all";
    EXPECT_EQ(read.encode(text), original.encode(text));
  }
}

TEST(Tokenizer, ReadsMergesWrittenAsPairs) {
  auto json = *parse_json(make_test_tokenizer().to_json(), "test");
  for (auto& merge : json["model"]["merges"]) {
    const std::string text = merge.get<std::string>();
    merge = {text.substr(0, text.find(' ')), text.substr(text.find(' ') + 1)};
  }
  auto read = must(Tokenizer::parse(json.dump()));
  EXPECT_THAT(read.encode("then"), ElementsAre(258, 'n'));
}

// Promise(engine): A tokenizer file that Baton would encode differently from Hugging Face's library
//   is refused by name | the file's steps are known or refused
TEST(Tokenizer, RefusesWhatItWouldEncodeWrong) {
  const auto json = *parse_json(make_test_tokenizer().to_json(), "test");
  const struct {
    const char* patch;  // null takes a field away
    const char* says;
  } cases[] = {
      {R"({"model": {"type": "WordPiece"}})", "WordPiece"},
      {R"({"model": 3})", "model"},
      {R"({"normalizer": {"type": "Lowercase"}})", "Lowercase"},
      {R"({"model": {"vocab": []}})", "vocab"},
      {R"({"model": {"vocab": {"a": -1}}})", "\"a\""},
      {R"({"model": {"vocab": {"a": 2147483648}}})", "\"a\""},
      {R"({"model": {"vocab": {"a": 98}}})", "two tokens"},
      {R"({"model": {"vocab": {"a": null}}})", "\"a\""},
      {R"({"model": {"merges": ["t"]}})", "merge 0"},
      {R"({"model": {"merges": [5]}})", "merge 0"},
      {R"({"model": {"merges": ["a b"]}})", "no token"},
      {R"({"pre_tokenizer": {"type": "Whitespace"}})", "Whitespace"},
      {R"({"pre_tokenizer": {"use_regex": false}})", "pre-tokenizer"},
      {R"({"post_processor": {"type": "BertProcessing"}})", "BertProcessing"},
      {R"({"decoder": {"type": "WordPiece"}})", "WordPiece"},
      {R"({"added_tokens": [{"content": "<|endoftext|>"}]})", "added"},
  };
  for (const auto& [patch, says] : cases) {
    auto copy = json;
    copy.merge_patch(nlohmann::json::parse(patch));
    const auto read = Tokenizer::parse(copy.dump());
    ASSERT_FALSE(read.ok()) << patch;
    EXPECT_THAT(std::string(read.status().message()), HasSubstr(says));
  }
}

// A vocabulary of characters as SentencePiece has it: <unk>, <s>, 256 bytes, then characters.
constexpr char kSpace[] = "\xe2\x96\x81";

TokenizerSpec character_spec() {
  TokenizerSpec spec;
  spec.byte_fallback = true;
  spec.tokens = {"<unk>", "<s>"};
  for (int byte = 0; byte < 256; ++byte) spec.tokens.push_back(absl::StrFormat("<0x%02X>", byte));
  for (const char* token : {kSpace, "a", "b", "\xc3\xa9"}) spec.tokens.emplace_back(token);  // 258
  const auto merge = [&spec](int32_t a, int32_t b) {
    spec.merges.emplace_back(a, b);
    spec.tokens.push_back(spec.tokens[a] + spec.tokens[b]);
  };
  merge(258, 259);  // 262: " a"
  merge(262, 260);  // 263: " ab"
  merge(258, 258);  // 264: "  "
  spec.added_tokens = {{.id = 0}, {.id = 1}};
  spec.pre_tokenizer = PreTokenizer::kNone;
  spec.space_prefix = SpacePrefix::kEvery;
  spec.strip_space = true;
  spec.unknown_id = 0;
  spec.prepend_id = 1;
  return spec;
}

TEST(CharacterTokenizer, PutsSpacesBeforeWordsAndFallsBackToBytes) {
  auto tokenizer = must(Tokenizer::create(character_spec()));
  EXPECT_THAT(tokenizer.encode("ab a"), ElementsAre(1, 263, 262));
  EXPECT_THAT(tokenizer.encode(" a"), ElementsAre(1, 258, 262));
  EXPECT_THAT(tokenizer.encode(""), ElementsAre(1));
  EXPECT_THAT(tokenizer.encode("a\n\xc3\xa9\xc3\xa8"),
              ElementsAre(1, 262, 2 + '\n', 261, 2 + 0xc3, 2 + 0xa8));
  EXPECT_THAT(tokenizer.encode("a<s>b"), ElementsAre(1, 262, 1, 258, 260));
  EXPECT_EQ(tokenizer.token_bytes(263), " ab");
  EXPECT_EQ(tokenizer.token_bytes(2 + '\n'), "\n");
  EXPECT_EQ(tokenizer.decode({1, 263, 262, 2 + 0xc3, 2 + 0xa8}), "ab a\xc3\xa8");
  StreamDecoder stream(tokenizer);
  EXPECT_EQ(stream.push(262), " a") << "an answer goes on behind its prompt";
  EXPECT_EQ(stream.push(2 + 0xc3), "");
  EXPECT_EQ(stream.push(2 + 0xa8), "\xc3\xa8");
}

TEST(CharacterTokenizer, MetaspaceLooksAtWhatIsThere) {
  TokenizerSpec spec = character_spec();
  spec.prepend_id = -1;
  spec.space_prefix = SpacePrefix::kFirst;
  EXPECT_THAT(Tokenizer::create(spec)->encode(" a<s>a"), ElementsAre(262, 1, 259));
  spec.space_prefix = SpacePrefix::kMissing;
  EXPECT_THAT(Tokenizer::create(spec)->encode("a<s> a"), ElementsAre(262, 1, 262));
  EXPECT_THAT(Tokenizer::create(spec)->encode("a   "), ElementsAre(262, 264, 258));
  spec.pre_tokenizer = PreTokenizer::kSpaces;
  EXPECT_THAT(Tokenizer::create(spec)->encode("a   "), ElementsAre(262, 258, 258, 258));
}

TEST(CharacterTokenizer, RoundTripsThroughItsFile) {
  for (const auto prefix : {SpacePrefix::kNone, SpacePrefix::kEvery, SpacePrefix::kFirst}) {
    TokenizerSpec spec = character_spec();
    spec.space_prefix = prefix;
    const Tokenizer original = *Tokenizer::create(spec);
    auto read = must(Tokenizer::parse(original.to_json()));
    EXPECT_EQ(read.to_json(), original.to_json());
    EXPECT_EQ(read.spec().space_prefix, prefix);
    EXPECT_EQ(read.spec().unknown_id, 0);
    EXPECT_TRUE(read.spec().strip_space);
  }
}

TEST(Tokenizer, ComposesWhereTheFileSaysSo) {
  TokenizerSpec spec = make_test_tokenizer().spec();
  spec.nfc = true;
  const Tokenizer tokenizer = *Tokenizer::create(spec);
  EXPECT_THAT(tokenizer.encode("e\xcc\x81\xff"), ElementsAre(0xc3, 0xa9, 0xff));
  EXPECT_EQ(Tokenizer::parse(tokenizer.to_json())->to_json(), tokenizer.to_json());
}

TEST(Tokenizer, CutsDigitsFirst) {
  TokenizerSpec spec = make_test_tokenizer().spec();
  spec.single_digits = true;
  const Tokenizer tokenizer = *Tokenizer::create(spec);
  // Spaces at the end of a piece are one word, so " a" is not made across the digit.
  EXPECT_THAT(tokenizer.encode("in 12 a"), ElementsAre(259, ' ', '1', '2', 261));
  EXPECT_EQ(Tokenizer::parse(tokenizer.to_json())->to_json(), tokenizer.to_json());
}

TEST(Tokenizer, AddedTokensTakeSpacesAndLookBesideThem) {
  TokenizerSpec spec = make_test_tokenizer().spec();
  spec.tokens[262] = "<a>";
  spec.tokens[263] = "<b>";
  spec.tokens[264] = "word";
  spec.added_tokens.push_back({.id = 262, .special = false, .lstrip = true, .rstrip = true});
  spec.added_tokens.push_back({.id = 263});
  spec.added_tokens.push_back({.id = 264, .special = false, .single_word = true});
  const Tokenizer tokenizer = *Tokenizer::create(spec);
  EXPECT_THAT(tokenizer.encode("x \n<a>  y"), ElementsAre('x', 262, 'y'));
  EXPECT_THAT(tokenizer.encode("x <b> y"), ElementsAre('x', ' ', 263, ' ', 'y'));
  EXPECT_THAT(tokenizer.encode("(word)"), ElementsAre('(', 264, ')'));
  EXPECT_THAT(tokenizer.encode("word_"), ElementsAre('w', 'o', 'r', 'd', '_'));
  EXPECT_THAT(tokenizer.encode("<a><b>", {.add_prefix = true, .parse_special = false}),
              ElementsAre(262, '<', 'b', '>'));
  // One that merges make, too, is still made by them.
  spec.added_tokens.push_back({.id = 257, .special = false, .single_word = true});
  EXPECT_THAT(Tokenizer::create(spec)->encode("then"), ElementsAre(258, 'n'));
  EXPECT_EQ(tokenizer.decode({262, 263}), "<a>") << "what is not special is text";
  EXPECT_EQ(Tokenizer::parse(tokenizer.to_json())->to_json(), tokenizer.to_json());
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
  spec.added_tokens.push_back({.id = -4});
  EXPECT_FALSE(Tokenizer::create(spec).ok());
  spec.added_tokens.pop_back();
  spec.prepend_id = 100000;
  EXPECT_FALSE(Tokenizer::create(spec).ok());
  spec.prepend_id = -1;
  EXPECT_TRUE(Tokenizer::create(spec).ok());
  spec.tokens[7].clear();  // as in some published vocabularies: left out of text
  EXPECT_EQ(Tokenizer::create(spec)->encode("a\ab"), (std::vector<int32_t>{'a', 'b'}));
  for (int byte = 128; byte < 256; ++byte) spec.tokens[byte].clear();
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

// The `tokenizers` library numbers added tokens that the vocabulary lacks by the count of its
// words: where the file has them all, each number once and none left out, it reads what was
// written.
void expect_no_holes(const std::string& json) {
  const auto root = nlohmann::json::parse(json);
  std::set<int64_t> ids;
  for (const auto& [text, id] : root["model"]["vocab"].items()) ids.insert(id.get<int64_t>());
  EXPECT_EQ(ids.size(), root["model"]["vocab"].size());
  EXPECT_EQ(*ids.begin(), 0);
  EXPECT_EQ(*ids.rbegin() + 1, static_cast<int64_t>(ids.size()));
  for (const auto& token : root["added_tokens"]) {
    EXPECT_EQ(root["model"]["vocab"].value(token["content"].get<std::string>(), -1),
              token["id"].get<int>());
  }
}

TEST(TokenizerFiles, ListTheirAddedTokensInTheVocabulary) {
  TokenizerSpec spec = trimmed_spec();
  expect_no_holes(Tokenizer::create(spec)->to_json());
  // Also those whose text no byte-level token could be.
  const auto id = static_cast<int32_t>(spec.tokens.size());
  spec.tokens.emplace_back();
  spec.added_tokens.push_back({.id = id, .text = "< \u65e5 >"});
  const std::string json = Tokenizer::create(spec)->to_json();
  expect_no_holes(json);
  EXPECT_EQ(Tokenizer::parse(json)->special_id("< \u65e5 >"), id);
}

TEST(TokenizerFiles, TheShippedModelsHasNoHoles) {
  const auto json = must(read_file(BATON_MODELS "/kjv-1.8m/tokenizer.json", size_t{1} << 20));
  expect_no_holes(json);
  const auto tokenizer = Tokenizer::parse(json);
  EXPECT_EQ(tokenizer->special_id("<|endoftext|>"), 256);
  EXPECT_EQ(tokenizer->to_json(), json);
}

// What the library does with such a file: the end of a text takes the last word's id, and that word
// has no text.
TEST(TokenizerFiles, AForeignFileWithAHoleIsReadAsTheLibraryReadsIt) {
  TokenizerSpec spec = trimmed_spec();
  auto root = nlohmann::json::parse(Tokenizer::create(spec)->to_json());
  const auto words = static_cast<int32_t>(root["model"]["vocab"].size());
  root["model"]["vocab"].erase("<|endoftext|>");
  auto read = Tokenizer::parse(root.dump());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->special_id("<|endoftext|>"), words - 1);
  EXPECT_THAT(read->encode(" a<|endoftext|>"), ElementsAre(words - 1, words - 1));
  EXPECT_EQ(read->decode({'x', words - 1, 'y'}), "xy");
  // A number far away is not kept, either.
  root = nlohmann::json::parse(Tokenizer::create(spec)->to_json());
  root["added_tokens"].push_back({{"id", words + 700}, {"content", "<x>"}, {"special", false}});
  read = Tokenizer::parse(root.dump());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->special_id("<x>"), words);
}

TEST(TokenizerFiles, TokensThatAreNamedBesideTheFileAreAdded) {
  TemporaryFolder folder;
  const auto write = [&](const char* name, const std::string& text) {
    ASSERT_TRUE(write_file_atomically(folder.path(name), text).ok());
  };
  const auto load = [&] { return Tokenizer::load(folder.path("tokenizer.json")); };
  TokenizerSpec spec = trimmed_spec();
  const auto words = static_cast<int32_t>(spec.tokens.size());
  write("tokenizer.json", Tokenizer::create(spec)->to_json());
  write("special_tokens_map.json", R"({"bos_token": "<s>", "additional_special_tokens": ["<x>"]})");
  write("added_tokens.json", R"({"<think>": 90, "<x>": 91, "<|endoftext|>": 256})");
  EXPECT_THAT(load()->encode("a<s><think><x><|endoftext|>"),
              ElementsAre('a', words + 2, words, words + 1, 256));
  EXPECT_EQ(load()->decode({words, words + 1, words + 2}), "<think>");
  write("tokenizer_config.json",
        R"({"eos_token": "<|im_end|>", "additional_special_tokens": ["<y>"], "added_tokens_decoder":
            {"9": {"content": "<|im_start|>", "special": true}, "8": {"content": "<z>", "rstrip": true}}})");
  EXPECT_THAT(load()->encode("<z>  <|im_start|><|im_end|><y>"),
              ElementsAre(words, words + 1, words + 2, words + 3));
  EXPECT_EQ(load()->decode({words, words + 1, words + 2, words + 3}), "<z>");
  EXPECT_EQ(load()->special_id("<x>"), -1);
  for (const char* wrong : {R"({"bos_token": 5})", R"({"additional_special_tokens": [1]})", "[]",
                            R"({"added_tokens_decoder": {"x": {"content": "a"}}})"}) {
    write("tokenizer_config.json", wrong);
    EXPECT_THAT(std::string(load().status().message()), HasSubstr("tokenizer_config.json"))
        << wrong;
  }
}

}  // namespace
}  // namespace baton::engine
