// What Python's strings do, on UTF-8: a character is a code point, and what a space or a capital is
// Unicode says.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace baton::engine::jinja {

std::u32string wide(std::string_view text);
std::string narrow(std::u32string_view text);
int64_t count_characters(std::string_view text);

bool is_space(char32_t c);      // str.isspace() of a character
bool is_printable(char32_t c);  // str.isprintable()
bool is_word(char32_t c);       // \w

// str.strip() and its siblings; without `characters`, of spaces.
std::string strip(std::string_view text, const std::string* characters, bool left, bool right);
std::vector<std::string> split_lines(std::string_view text, bool keep_ends);
// `most` pieces are cut off at most, from the right with `from_right`; negative: all. Without a
// separator at runs of spaces. The separator is not empty.
std::vector<std::string> split(std::string_view text, const std::string* separator, int64_t most,
                               bool from_right);
std::string replace(std::string_view text, std::string_view from, std::string_view to,
                    int64_t most);

std::string upper(std::string_view text);
std::string lower(std::string_view text);
std::string casefold(std::string_view text);
std::string capitalize(std::string_view text);
std::string title(std::string_view text);  // str.title(), not the filter
std::string swapcase(std::string_view text);
// The one of "islower", "isupper", "istitle", "isalpha", "isdigit", "isdecimal", "isnumeric",
// "isalnum", "isspace", "isprintable", "isascii" that is named; nothing for other names.
std::optional<bool> ask(std::string_view name, std::string_view text);

std::string repr_of(std::string_view text);
std::string escape_html(std::string_view text);
// Fills up to `width` characters: '<', '>', 'c' and 'z' as str.ljust(), rjust(), center() and
// zfill() do, '^' and '=' as format() does.
std::string pad(std::string_view text, int64_t width, char32_t fill, char where);

}  // namespace baton::engine::jinja
