// The training text: runs `bible` or reads a file, splits, tokenizes, samples.
#include "engine/train/corpus.h"

#include <cstdio>

#include "absl/status/status.h"
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

}  // namespace baton::engine::train
