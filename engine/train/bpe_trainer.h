// Learns a byte-level BPE vocabulary from text (Sennrich, Haddow and Birch, 2016).
#pragma once

#include <string_view>

#include "absl/status/statusor.h"
#include "engine/tokenizer/tokenizer.h"

namespace baton::engine::train {

// 256 bytes, "<|endoftext|>" with id 256, then merges until `vocab_size` tokens. The most frequent
// pair is merged first; of equally frequent ones the pair of lowest ids, so the result is the same
// everywhere. Words are cut as GPT-2 does.
absl::StatusOr<Tokenizer> train_bpe(std::string_view text, int vocab_size);

}  // namespace baton::engine::train
