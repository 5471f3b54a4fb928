// Text before BPE: normalized, and cut into the words that BPE merges within.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "engine/files/utf8.h"
#include "engine/tokenizer/tokenizer.h"

namespace baton::engine {

// Length in bytes of the first word of `text` (not empty), as the pattern of the field matches it.
size_t next_word(std::string_view text, PreTokenizer pattern);

// Applies the normalizer of the tokenizer file.
std::string normalize(const TokenizerSpec& spec, std::string_view text);

// Unicode's normalization form C. Bytes that are not UTF-8 stay as they are.
std::string compose(std::string_view text);

// Every space as U+2581.
std::string spaces_as_metaspaces(std::string_view text);

// \\w: a letter, mark, decimal number or connector.
bool is_word_character(uint32_t code);

// The Unicode classes that text is cut by.
bool is_letter(uint32_t code);  // \p{L}
bool is_number(uint32_t code);  // \p{N}
bool is_space(uint32_t code);   // \s

}  // namespace baton::engine
