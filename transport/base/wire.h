// Bounded reading and writing of little-endian bytes. A reader that runs past its end stays failed
// and yields zeros, so a parser checks once, at the end.
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

}  // namespace baton::base
