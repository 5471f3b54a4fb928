// What happens to text before it is cut into words.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace baton::engine {

struct TokenizerSpec;

// What the file's normalizer does.
std::string normalize(const TokenizerSpec& spec, std::string_view text);

// Unicode's normalization form C. Bytes that are not UTF-8 stay as they are.
std::string compose(std::string_view text);

// Every space as U+2581.
std::string spaces_as_metaspaces(std::string_view text);

// \\w: a letter, mark, decimal number or connector.
bool is_word_character(uint32_t code);

}  // namespace baton::engine
