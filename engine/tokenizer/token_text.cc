// The printable alphabet of bytes, and the names of byte tokens.
#include "engine/tokenizer/token_text.h"

#include <charconv>

#include "engine/tokenizer/pre_tokenizer.h"

namespace baton::engine {
namespace {

void append_utf8(std::string& out, uint32_t code) {
  if (code < 0x80) {
    out += static_cast<char>(code);
  } else {  // the stand-ins end below 0x800
    out += static_cast<char>(0xc0 | (code >> 6));
    out += static_cast<char>(0x80 | (code & 0x3f));
  }
}

}  // namespace

ByteAlphabet::ByteAlphabet() {
  uint32_t next = 0x100;
  for (uint32_t b = 0; b < 256; ++b) {
    const bool printable = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
    of_byte_[b] = printable ? b : next++;
    to_byte_[of_byte_[b]] = static_cast<uint8_t>(b);
  }
}

const ByteAlphabet& ByteAlphabet::get() {
  static const ByteAlphabet alphabet;
  return alphabet;
}

std::string ByteAlphabet::write(std::string_view bytes) const {
  std::string out;
  for (char c : bytes) append_utf8(out, of_byte_[static_cast<uint8_t>(c)]);
  return out;
}

bool ByteAlphabet::read(std::string_view text, std::string& bytes) const {
  bytes.clear();
  for (size_t at = 0; at < text.size();) {
    const Character c = decode_character(text, at);
    const auto it = c.valid ? to_byte_.find(c.code) : to_byte_.end();
    if (it == to_byte_.end()) return false;
    bytes += static_cast<char>(it->second);
    at += c.bytes;
  }
  return true;
}

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  for (size_t at = text.find(from); at != std::string_view::npos; at = text.find(from)) {
    out.append(text.substr(0, at)).append(to);
    text.remove_prefix(at + from.size());
  }
  return out.append(text);
}

int byte_of_token(std::string_view token) {
  int byte = 0;
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  const auto [end, error] = std::from_chars(token.data() + 3, token.data() + 5, byte, 16);
  return error == std::errc() && end == token.data() + 5 ? byte : -1;
}

}  // namespace baton::engine
