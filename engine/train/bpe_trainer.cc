// Counts words once, then merges pairs within them, keeping the pair counts up to date.
#include "engine/train/bpe_trainer.h"

#include <map>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "engine/tokenizer/pre_tokenizer.h"

namespace baton::engine::train {
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
