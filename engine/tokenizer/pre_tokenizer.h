// Cutting text into the words that BPE merges within.
#pragma once

#include <cstddef>
#include <string_view>

#include "engine/files/utf8.h"
#include "engine/tokenizer/tokenizer.h"

namespace baton::engine {

// Length in bytes of the first word of `text` (not empty), as the pattern of the field matches it.
size_t next_word(std::string_view text, PreTokenizer pattern);

}  // namespace baton::engine
