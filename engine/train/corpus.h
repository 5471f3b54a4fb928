// The text to train on: the King James Bible of Debian's bible-kjv packages, or a file.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/tokenizer/tokenizer.h"

namespace baton::engine::train {

// The whole text that the `bible` program prints. NotFound with the packages to install where the
// program is missing.
absl::StatusOr<std::string> read_king_james();

// Text split in two and tokenized. The last twentieth of the text is held out, cut at a line end.
struct Corpus {
  std::vector<int32_t> train;
  std::vector<int32_t> held_out;
  size_t held_out_bytes = 0;

  // The training text alone: vocabularies are learned from it, not from what is held out.
  static std::string_view training_text(std::string_view text);
  static Corpus make(std::string_view text, const Tokenizer& tokenizer);

  // Window `index` of `step`: length + 1 tokens at a place that depends on the seed, the step and
  // the index alone, so any number of workers can share a step between them.
  std::span<const int32_t> sample(uint64_t seed, int step, int index, int length) const;
};

// Learns a byte-level BPE vocabulary from text (Sennrich, Haddow and Birch, 2016).

// 256 bytes, "<|endoftext|>" with id 256, then merges until `vocab_size` tokens. The most frequent
// pair is merged first; of equally frequent ones the pair of lowest ids, so the result is the same
// everywhere. Words are cut as GPT-2 does.
absl::StatusOr<Tokenizer> train_bpe(std::string_view text, int vocab_size);

}  // namespace baton::engine::train
