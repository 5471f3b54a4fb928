// BPE of bytes (GPT-2, Llama 3, Qwen, SmolLM) or of characters that falls back to bytes (Llama 2,
// Mistral: SentencePiece's), read from and written as Hugging Face tokenizer.json.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace baton::engine {

// How text is cut into words before merging; the patterns found in the field.
enum class PreTokenizer {
  kGpt2,    // "ByteLevel" with use_regex
  kLlama3,  // "Split" with the Llama 3 pattern (digits in runs of 1 to 3)
  kQwen2,   // the same with single digits
  kSpaces,  // "Metaspace" with split: before every space
  kNone,    // one word
};

// Where the tokenizer puts a space in front of text: SentencePiece's tokens begin words with one.
enum class SpacePrefix {
  kNone,
  kEvery,    // of every piece between added tokens (the normalizer "Prepend")
  kMissing,  // the same, unless it begins with one ("Metaspace", always)
  kFirst,    // of the text alone, unless it begins with one ("Metaspace", first)
};

// A token that is matched whole in text and never merged.
struct AddedToken {
  int32_t id = 0;
  bool special = true;       // a control token: no text in output
  bool normalized = false;   // looked for in normalized text
  bool single_word = false;  // only where no letter, digit or underscore is beside it
  bool lstrip = false;       // takes the spaces before it
  bool rstrip = false;       // and behind it
  std::string text;          // empty: that of its id in TokenizerSpec::tokens
};

struct TokenizerSpec {
  // Tokens by id: bytes (real ones, not the printable stand-ins of tokenizer.json), or with
  // byte_fallback the text of the file, "\u2581" for spaces and "<0x0A>" for bytes. Unused ids are
  // empty strings. An added token may be one of them, or stand at an id that is unused here, or
  // hide the token that has its id: in files whose numbering has holes the `tokenizers` library
  // gives it that of the last word.
  std::vector<std::string> tokens;
  // Pairs of ids in order of rank; the merged token is their concatenation.
  std::vector<std::pair<int32_t, int32_t>> merges;
  std::vector<AddedToken> added_tokens;
  PreTokenizer pre_tokenizer = PreTokenizer::kGpt2;
  bool single_digits = false;  // every digit is a word, before the pattern cuts the rest
  bool nfc = false;            // text is composed (Unicode's NFC) first
  bool ignore_merges = false;  // a word that is a token is taken whole (Llama 3)
  int32_t prepend_id = -1;     // put in front of every text by the post-processor (BOS); -1: none
  bool byte_fallback = false;  // characters, and bytes for those that have no token
  // With byte_fallback alone:
  SpacePrefix space_prefix = SpacePrefix::kNone;
  bool strip_space = false;  // decode() leaves out a space at the start
  int32_t unknown_id = -1;   // of what has no bytes either; -1: left out
  bool fuse_unknown = false;
};

// Immutable after creation; any number of threads may use one.
class Tokenizer {
 public:
  // InvalidArgument if ids are out of range, most bytes have no token, or a merge makes no token.
  static absl::StatusOr<Tokenizer> create(TokenizerSpec spec);
  // Parses tokenizer.json. Anything that would change the ids it produces and is not understood
  // (another model type, another normalizer, an unknown split pattern) is an error that names it.
  // `more` are added tokens that the file may lack: those that it has are left as they are. Ids of
  // added tokens are given as the `tokenizers` library gives them: that of the vocabulary, or else
  // the next one; the file's are not looked at.
  static absl::StatusOr<Tokenizer> parse(std::string_view json,
                                         const std::vector<AddedToken>& more = {});
  // A file, with the added tokens that are named beside it (tokenizer/special_tokens.h).
  static absl::StatusOr<Tokenizer> load(const std::string& path);

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  struct EncodeOptions {
    bool add_prefix = true;     // prepend_id, if there is one
    bool parse_special = true;  // "<|endoftext|>" in the text becomes its id
  };
  // Any bytes are accepted, invalid UTF-8 too. With byte-level tokens and without a normalizer,
  // decode(encode(x)) == x. Bytes that have no token are left out.
  std::vector<int32_t> encode(std::string_view text, const EncodeOptions& options) const;
  std::vector<int32_t> encode(std::string_view text) const { return encode(text, EncodeOptions{}); }

  // Concatenated bytes; ids out of range and special tokens give nothing.
  std::string decode(const std::vector<int32_t>& ids) const;
  // Bytes of one token as text (empty if out of range); special tokens give their name.
  std::string_view token_bytes(int32_t id) const;
  bool is_special(int32_t id) const;
  // Id of an added token by its text, or -1.
  int32_t special_id(std::string_view text) const;

  int vocab_size() const;
  const TokenizerSpec& spec() const;
  // tokenizer.json that the `tokenizers` library loads.
  std::string to_json() const;

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Turns a stream of tokens into pieces that are valid UTF-8: bytes of a character that is not
// complete yet are held back. One per sequence; cheap to copy. The tokenizer must outlive it.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer) : tokenizer_(&tokenizer) {}
  // The text that `id` completes; may be empty. Invalid bytes come out as U+FFFD.
  std::string push(int32_t id);
  // The bytes held back at the end of the stream, as U+FFFD if they are not a character.
  std::string finish();

 private:
  const Tokenizer* tokenizer_;
  std::string pending_;
};

}  // namespace baton::engine
