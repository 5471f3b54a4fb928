// Reading a provider's settings, the "key=value" texts of its context.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "transport/provider.h"

namespace baton {

// The value of a setting, or `fallback`.
std::string_view setting(const ProviderContext& context, std::string_view key,
                         std::string_view fallback);

// Reads one setting per call into a variable that holds its default, which stays where the setting
// is missing, empty or wrong. status() is the first error, InvalidArgument: it names the setting,
// its value and what would be accepted.
class SettingsReader {
 public:
  explicit SettingsReader(const ProviderContext& context) : context_(context) {}

  template <typename T>
  void number(std::string_view key, T& value, int64_t least, int64_t most) {
    int64_t parsed = 0;
    if (read(key, parsed, least, most)) value = static_cast<T>(parsed);
  }
  // In the setting KiB, here bytes.
  void kib(std::string_view key, size_t& bytes, int64_t least, int64_t most);
  // Milliseconds, at most an hour.
  void ms(std::string_view key, Time& time, int64_t least = 1);
  void text(std::string_view key, std::string& value);
  void choice(std::string_view key, std::string& value,
              std::initializer_list<std::string_view> choices);
  void on_off(std::string_view key, bool& value);

  const absl::Status& status() const { return status_; }

 private:
  bool read(std::string_view key, int64_t& value, int64_t least, int64_t most);
  void wrong(std::string_view key, std::string_view value, const std::string& give);

  const ProviderContext& context_;
  absl::Status status_;
};

}  // namespace baton
