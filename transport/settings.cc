// Settings, and what is wrong with them.
#include "transport/settings.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace baton {

std::string_view setting(const ProviderContext& context, std::string_view key,
                         std::string_view fallback) {
  for (const auto& [name, value] : context.settings) {
    if (name == key) return value;
  }
  return fallback;
}

void SettingsReader::wrong(std::string_view key, std::string_view value, const std::string& give) {
  status_.Update(absl::InvalidArgumentError(
      absl::StrCat("setting ", std::string(key), "=", std::string(value), ": give ", give)));
}

bool SettingsReader::read(std::string_view key, int64_t& value, int64_t least, int64_t most) {
  const std::string text(setting(context_, key, ""));
  if (text.empty()) return false;
  int64_t parsed = 0;
  if (!absl::SimpleAtoi(text, &parsed) || parsed < least || parsed > most) {
    wrong(key, text, absl::StrCat("a number from ", least, " to ", most));
    return false;
  }
  value = parsed;
  return true;
}

void SettingsReader::kib(std::string_view key, size_t& bytes, int64_t least, int64_t most) {
  int64_t value = 0;
  if (read(key, value, least, most)) bytes = static_cast<size_t>(value) << 10;
}

void SettingsReader::ms(std::string_view key, Time& time, int64_t least) {
  int64_t value = 0;
  if (read(key, value, least, 3'600'000)) time = std::chrono::milliseconds(value);
}

void SettingsReader::text(std::string_view key, std::string& value) {
  const std::string_view given = setting(context_, key, "");
  if (!given.empty()) value = std::string(given);
}

void SettingsReader::choice(std::string_view key, std::string& value,
                            std::initializer_list<std::string_view> choices) {
  std::string given = value;
  text(key, given);
  if (std::find(choices.begin(), choices.end(), given) != choices.end()) {
    value = std::move(given);
    return;
  }
  wrong(key, given, absl::StrJoin(choices, " or ", [](std::string* out, std::string_view one) {
          out->append(one.data(), one.size());
        }));
}

void SettingsReader::on_off(std::string_view key, bool& value) {
  std::string text = value ? "on" : "off";
  choice(key, text, {"on", "off"});
  value = text == "on";
}

}  // namespace baton
