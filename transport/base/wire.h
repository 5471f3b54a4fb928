// Bounded reading and writing of little-endian bytes. A reader that runs past its end stays failed
// and yields zeros, so a parser checks once, at the end.
//
// A message names its members once, in their order on the wire:
//
//   template <typename Wire, typename T>  // T: Note or const Note
//   void members(Wire& wire, T& note) {
//     wire(note.rail, note.lost);
//     wire.text(note.why, kMaxText);
//   }
//   WireWriter(out) and WireReader(bytes) are such wires.
//
// Members are numbers, enums, bools (0 or 1: another byte fails) and arrays and structs of numbers
// without padding; missing bytes change nothing. An enum's values are the caller's to check.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

namespace baton::base {

class WireReader {
 public:
  explicit WireReader(std::string_view bytes) : bytes_(bytes) {}

  template <typename... T>
  void operator()(T&... members) {
    (one(members), ...);
  }
  template <typename Text>
  void text(Text& to, size_t limit) {
    to = text(limit);
  }

  template <typename T>
  T number() {
    static_assert(std::is_integral_v<T>);
    T value{};
    std::string_view raw = take(sizeof(T));
    if (!raw.empty()) std::memcpy(&value, raw.data(), sizeof(T));
    return value;
  }
  // Exactly n bytes, or an empty view and failure.
  std::string_view take(size_t n) {
    if (failed_ || n > bytes_.size()) {
      failed_ = true;
      return {};
    }
    std::string_view out = bytes_.substr(0, n);
    bytes_.remove_prefix(n);
    return out;
  }
  // A 16-bit length and that many bytes, at most `limit`.
  std::string_view text(size_t limit) {
    const size_t n = number<uint16_t>();
    if (n > limit) failed_ = true;
    return take(n);
  }
  bool failed() const { return failed_; }
  // Everything was read, nothing was missing.
  bool finished() const { return !failed_ && bytes_.empty(); }

 private:
  template <typename T>
  void one(T& member) {
    static_assert(std::has_unique_object_representations_v<T>);
    const std::string_view raw = take(sizeof(T));
    if constexpr (std::is_same_v<T, bool>) {
      failed_ = failed_ || static_cast<uint8_t>(raw[0]) > 1;  // not read once `failed_`
      member = !failed_ && raw[0] == 1;
    } else if (!raw.empty()) {
      std::memcpy(&member, raw.data(), sizeof(T));
    }
  }

  std::string_view bytes_;
  bool failed_ = false;
};

template <typename T>
void put_number(std::string& out, T value) {
  static_assert(std::is_integral_v<T>);
  out.append(reinterpret_cast<const char*>(&value), sizeof(T));
}
inline void put_text(std::string& out, std::string_view text) {
  put_number(out, static_cast<uint16_t>(text.size()));
  out.append(text);
}

class WireWriter {
 public:
  explicit WireWriter(std::string& out) : out_(out) {}  // appends
  template <typename... T>
  void operator()(const T&... members) {
    (one(members), ...);
  }
  void text(std::string_view text, size_t limit) { put_text(out_, text.substr(0, limit)); }

 private:
  template <typename T>
  void one(const T& member) {
    static_assert(std::has_unique_object_representations_v<T>);
    out_.append(reinterpret_cast<const char*>(&member), sizeof(T));
  }
  std::string& out_;
};

}  // namespace baton::base
