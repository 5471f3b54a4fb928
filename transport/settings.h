// The settings: one table that declares them all, what is wrong with given ones, and how a provider
// reads its own. `baton info --settings` prints the table, and so does docs/settings.md.
//
// A setting is written KEY=VALUE: `--set tcp.sockets=4` on a command line, or
// WorkerOptions::settings = {{"tcp.sockets", "4"}}. Providers declare theirs where they register
// themselves, so the table of a program is the union of what it links.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "transport/clock.h"

namespace baton {

struct ProviderContext;

// One row. A table is an array of them that lives as long as the program.
struct Setting {
  enum class Kind : uint8_t { kNumber, kChoice, kText };

  std::string_view name;  // "tcp.slice_kib": the provider's, a dot, its own
  Kind kind = Kind::kNumber;
  std::string_view unit;      // of a number: "KiB", "ms", "bytes", or nothing
  std::string_view standard;  // the default, as one would give it; "": `meaning` says what happens
  int64_t least = 0;          // of a number
  int64_t most = 0;
  std::string_view choices;  // of a choice, separated by single blanks
  std::string_view meaning;  // for people: a line
  bool patience = false;     // how long others are waited for: the default is times BATON_PATIENCE

  static constexpr Setting number(std::string_view name, std::string_view unit,
                                  std::string_view standard, int64_t least, int64_t most,
                                  std::string_view meaning, bool patience = false) {
    return {name, Kind::kNumber, unit, standard, least, most, "", meaning, patience};
  }
  static constexpr Setting choice(std::string_view name, std::string_view standard,
                                  std::string_view choices, std::string_view meaning) {
    return {name, Kind::kChoice, "", standard, 0, 0, choices, meaning};
  }
  static constexpr Setting text(std::string_view name, std::string_view standard,
                                std::string_view meaning) {
    return {name, Kind::kText, "", standard, 0, 0, "", meaning};
  }

  // "4 to 1048576", "auto, yes or no"; "" for a text.
  std::string range() const;
  // InvalidArgument: the value is not allowed; the text names the setting, the value and what is
  // allowed.
  absl::Status check(std::string_view value) const;
};

// The names and values that the user gave, in this order. If a name occurs twice the first one
// counts. An empty value means the default.
using SettingValues = std::vector<std::pair<std::string, std::string>>;

// Adds a table to the program's. For providers: ProviderRegistration does it.
void declare_settings(absl::Span<const Setting> table);

// The settings that every worker has, whatever its providers: always declared.
absl::Span<const Setting> peer_settings();

// All that are declared in this program, by name.
std::vector<Setting> known_settings();

// InvalidArgument for a name that no provider declared, with the nearest that a provider did, and
// for a value that its setting does not take. Worker::create() asks; a command does before it
// starts.
absl::Status check_settings(const SettingValues& given);

// Appends "KEY=VALUE" as it stands on a command line. InvalidArgument: it is no such pair.
absl::Status add_setting(std::string_view text, SettingValues& to);

// The value of a setting, or `fallback`.
std::string_view setting(const ProviderContext& context, std::string_view key,
                         std::string_view fallback);

// Reads one setting per call into a variable: what was given, else the declared default. Where that
// is "", and where the value is wrong, the variable stays as it is. Everything declared must be
// read, and nothing else: finish() says so, so that no row of the table can be untrue.
class SettingsReader {
 public:
  SettingsReader(const ProviderContext& context, absl::Span<const Setting> declared)
      : context_(context), declared_(declared) {}

  template <typename T>
  void number(std::string_view key, T& value) {
    int64_t parsed = 0;
    if (read_number(key, parsed)) value = static_cast<T>(parsed);
  }
  // The setting's unit is KiB, the variable's bytes.
  void kib(std::string_view key, size_t& bytes);
  // The setting's unit is ms. A default that is patience is longer by BATON_PATIENCE
  // (clock.h), unless time is simulated.
  void ms(std::string_view key, Time& time);
  void text(std::string_view key, std::string& value);  // also a choice
  void on_off(std::string_view key, bool& value);       // of a choice between on and off

  // To be called once, after all. InvalidArgument: the first wrong value. Internal: the table and
  // the code that reads it differ.
  absl::Status finish();

 private:
  // The setting's row, or null and an error.
  const Setting* row(std::string_view key);
  // The value to take, checked; "": leave the variable alone.
  std::string_view value(const Setting& row);
  bool read_number(std::string_view key, int64_t& value, std::string_view unit = "");

  const ProviderContext& context_;
  const absl::Span<const Setting> declared_;
  std::vector<std::string_view> read_;
  absl::Status status_;
};

}  // namespace baton
