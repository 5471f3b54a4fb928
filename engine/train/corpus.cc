// The training text: runs `bible` or reads a file, splits, tokenizes, samples.
#include "engine/train/corpus.h"

#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "engine/tokenizer/pre_tokenizer.h"
#include "transport/base/splitmix.h"

namespace baton::engine::train {
namespace {

// A twentieth is held out, from the next line on. Where there is no line (text8, one long line of
// JSON) or hardly anything would be left behind it, from the next word, else from the next
// character.
size_t split_point(std::string_view text) {
  const size_t held_out = text.size() / 20, at = text.size() - held_out;
  for (const char end : {'\n', ' '}) {
    const size_t found = text.find(end, at);
    if (found != std::string_view::npos && found < at + held_out / 2) return found + 1;
  }
  size_t split = at;
  while (split < text.size() && (text[split] & 0xc0) == 0x80) ++split;  // inside a character
  return split;
}

// splitmix64 of a few numbers.
uint64_t mix(uint64_t seed, uint64_t a, uint64_t b) {
  return base::splitmix_hash(seed + a * base::kSplitmixStep + b * 0xd1342543de82ef95u +
                             0x2545f4914f6cdd1du);
}

}  // namespace

absl::StatusOr<std::string> read_king_james() {
  // Debian installs games and the like outside of root's PATH.
  FILE* pipe = popen("PATH=$PATH:/usr/games bible -l99999 gen1:1-rev22:21 2>/dev/null", "r");
  std::string text;
  if (pipe != nullptr) {
    char buffer[65536];
    for (size_t n; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) text.append(buffer, n);
    pclose(pipe);
  }
  if (text.size() < 4'000'000) {
    return absl::NotFoundError(
        "cannot read the King James text: install it with `apt-get install bible-kjv "
        "bible-kjv-text`, or name a text file with --data");
  }
  return text;
}

std::string_view Corpus::training_text(std::string_view text) {
  return text.substr(0, split_point(text));
}

Corpus Corpus::make(std::string_view text, const Tokenizer& tokenizer) {
  const size_t split = split_point(text);
  Corpus corpus;
  corpus.train = tokenizer.encode(text.substr(0, split));
  corpus.held_out = tokenizer.encode(text.substr(split));
  corpus.held_out_bytes = text.size() - split;
  return corpus;
}

std::span<const int32_t> Corpus::sample(uint64_t seed, int step, int index, int length) const {
  const size_t places = train.size() - static_cast<size_t>(length);
  const size_t at = mix(seed, static_cast<uint64_t>(step), static_cast<uint64_t>(index)) % places;
  return std::span(train).subspan(at, static_cast<size_t>(length) + 1);
}

namespace {

using Pair = std::pair<int32_t, int32_t>;

struct Word {
  std::vector<int32_t> symbols;
  int64_t count = 0;
};

std::vector<Word> count_words(std::string_view text) {
  std::map<std::string_view, int64_t> counts;  // ordered: the same everywhere
  while (!text.empty()) {
    const size_t length = next_word(text, PreTokenizer::kGpt2);
    ++counts[text.substr(0, length)];
    text.remove_prefix(length);
  }
  std::vector<Word> words;
  for (const auto& [word, count] : counts) {
    Word entry;
    entry.count = count;
    for (char c : word) entry.symbols.push_back(static_cast<uint8_t>(c));
    words.push_back(std::move(entry));
  }
  return words;
}

}  // namespace

absl::StatusOr<Tokenizer> train_bpe(std::string_view text, int vocab_size) {
  TokenizerSpec spec;
  for (int byte = 0; byte < 256; ++byte) spec.tokens.emplace_back(1, static_cast<char>(byte));
  spec.tokens.emplace_back("<|endoftext|>");
  spec.added_tokens = {{.id = 256}};
  if (vocab_size < 257) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "a vocabulary of %d is too small for 256 bytes and a special token", vocab_size));
  }
  std::vector<Word> words = count_words(text);
  absl::flat_hash_map<Pair, int64_t> counts;
  const auto add_pairs = [&counts](const Word& word, int64_t times) {
    for (size_t i = 0; i + 1 < word.symbols.size(); ++i) {
      counts[{word.symbols[i], word.symbols[i + 1]}] += times;
    }
  };
  for (const Word& word : words) add_pairs(word, word.count);

  while (static_cast<int>(spec.tokens.size()) < vocab_size) {
    Pair best;
    int64_t most = 0;
    for (const auto& [pair, count] : counts) {
      if (count > most || (count == most && pair < best)) {
        best = pair;
        most = count;
      }
    }
    if (most < 2) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "the text has only %u tokens worth learning, %d were asked for: use more text or a "
          "smaller vocabulary",
          spec.tokens.size(), vocab_size));
    }
    const auto merged = static_cast<int32_t>(spec.tokens.size());
    spec.merges.push_back(best);
    spec.tokens.push_back(spec.tokens[best.first] + spec.tokens[best.second]);
    for (Word& word : words) {
      bool found = false;
      for (size_t i = 0; i + 1 < word.symbols.size() && !found; ++i) {
        found = word.symbols[i] == best.first && word.symbols[i + 1] == best.second;
      }
      if (!found) continue;
      add_pairs(word, -word.count);
      size_t to = 0;
      for (size_t from = 0; from < word.symbols.size(); ++to) {
        const bool here = from + 1 < word.symbols.size() && word.symbols[from] == best.first &&
                          word.symbols[from + 1] == best.second;
        word.symbols[to] = here ? merged : word.symbols[from];
        from += here ? 2 : 1;
      }
      word.symbols.resize(to);
      add_pairs(word, word.count);
    }
    counts.erase(best);
  }
  return Tokenizer::create(std::move(spec));
}

}  // namespace baton::engine::train
