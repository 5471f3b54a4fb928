// The Unicode classes that pre-tokenizers cut text by.
#pragma once

#include <cstddef>
#include <cstdint>

namespace baton::engine {

bool is_letter(uint32_t code);  // \p{L}
bool is_number(uint32_t code);  // \p{N}
bool is_space(uint32_t code);   // \s

}  // namespace baton::engine
