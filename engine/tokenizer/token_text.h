// How tokenizer.json writes tokens and patterns.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/container/flat_hash_map.h"

namespace baton::engine {

inline constexpr std::string_view kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
inline constexpr std::string_view kQwen2Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

// SentencePiece's character for a space: U+2581.
inline constexpr std::string_view kMetaspace = "\xe2\x96\x81";

// Byte-level files write every byte as a printable character: itself, or one from U+0100 on.
class ByteAlphabet {
 public:
  static const ByteAlphabet& get();
  std::string write(std::string_view bytes) const;
  // False where a character stands for no byte.
  bool read(std::string_view text, std::string& bytes) const;

 private:
  ByteAlphabet();
  std::array<uint32_t, 256> of_byte_{};
  absl::flat_hash_map<uint32_t, uint8_t> to_byte_;
};

std::string replace_all(std::string_view text, std::string_view from, std::string_view to);

// The byte of "<0x0A>", or -1.
int byte_of_token(std::string_view token);

}  // namespace baton::engine
