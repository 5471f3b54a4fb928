// Settings, and what is wrong with them.
#include "transport/settings.h"

#include <algorithm>
#include <array>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "transport/base/nearest_name.h"
#include "transport/clock.h"
#include "transport/provider.h"

namespace baton {
namespace {

// A worker's own.
constexpr std::array kPeerSettings = {
    Setting::number(
        "peer.answer_ms", "ms", "15000", 10, 3'600'000,
        "time for a peer to report what arrived over a lost rail; after that the peer is lost",
        true),
    Setting::number("peer.failback_ms", "ms", "1000", 0, 3'600'000,
                    "delay before a better provider than the current one is tried again for a "
                    "peer; doubles each time, up to a minute; 0: never"),
    Setting::number("peer.redial_ms", "ms", "15000", 0, 3'600'000,
                    "how long to reconnect to a lost peer before giving it up; 0: not at all",
                    true),
    Setting::choice("staging.kernels", "on", "on off",
                    "pack small pieces of device memory by a kernel where that is quicker; off: "
                    "copy engines only, for programs whose kernels leave no room for another"),
    Setting::number("staging.ring_mib", "MiB", "64", 16, 4096,
                    "pinned memory for each device with registered memory; routes that move "
                    "bytes by the CPU copy through it"),
    Setting::choice("staging.sums", "auto", "auto cpus kernel",
                    "where collectives on device memory sum; auto: by a kernel of the device or on "
                    "the CPU, whichever measured quicker; kernel: by a kernel wherever one exists"),
};

std::vector<Setting>& table() {
  static std::vector<Setting> all(kPeerSettings.begin(), kPeerSettings.end());
  return all;
}

const Setting* find(absl::Span<const Setting> rows, std::string_view name) {
  const auto at =
      std::find_if(rows.begin(), rows.end(), [&](const Setting& row) { return row.name == name; });
  return at == rows.end() ? nullptr : &*at;
}

std::vector<std::string> split(std::string_view choices) {
  return absl::StrSplit(std::string(choices), ' ');
}

std::string_view after_dot(std::string_view name) { return name.substr(name.find('.') + 1); }

absl::Status unknown_setting(std::string_view name) {
  std::vector<std::string> known;
  std::string hint;
  for (const Setting& row : known_settings()) {
    known.emplace_back(row.name);
    if (name == after_dot(row.name)) hint = "; did you mean " + known.back() + "?";
  }
  if (hint.empty()) hint = base::did_you_mean(name, known);
  if (hint.empty()) {
    std::vector<std::string> providers;
    for (const auto& [provider, factory] : registered_providers()) providers.push_back(provider);
    const std::string of(name.substr(0, name.find('.')));
    if (std::find(providers.begin(), providers.end(), of) == providers.end()) {
      hint = absl::StrCat("; its name would begin with a provider of this program, which has ",
                          providers.empty() ? "none" : absl::StrJoin(providers, ", "));
    }
    absl::StrAppend(&hint, "; `baton info --settings` lists all");
  }
  return absl::InvalidArgumentError(
      absl::StrCat("there is no setting \"", std::string(name), "\"", hint));
}

}  // namespace

absl::Span<const Setting> peer_settings() { return kPeerSettings; }

std::string Setting::range() const {
  if (kind == Kind::kNumber) return absl::StrCat(least, " to ", most);
  if (kind == Kind::kText) return "";
  std::vector<std::string> names = split(choices);
  const std::string last = names.back();
  names.pop_back();
  return absl::StrCat(absl::StrJoin(names, ", "), " or ", last);
}

absl::Status Setting::check(std::string_view value) const {
  if (value.empty() || kind == Kind::kText) return absl::OkStatus();
  if (kind == Kind::kNumber) {
    int64_t parsed = 0;
    if (absl::SimpleAtoi(std::string(value), &parsed) && parsed >= least && parsed <= most) {
      return absl::OkStatus();
    }
  } else {
    const std::vector<std::string> names = split(choices);
    if (std::find(names.begin(), names.end(), value) != names.end()) return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("setting ", std::string(name), "=", std::string(value), ": give ",
                   kind == Kind::kNumber ? "a number from " : "", range(), unit.empty() ? "" : " ",
                   std::string(unit)));
}

void declare_settings(absl::Span<const Setting> rows) {
  table().insert(table().end(), rows.begin(), rows.end());
}

std::vector<Setting> known_settings() {
  std::vector<Setting> sorted = table();
  std::sort(sorted.begin(), sorted.end(),
            [](const Setting& a, const Setting& b) { return a.name < b.name; });
  return sorted;
}

absl::Status check_settings(const SettingValues& given) {
  for (const auto& [name, value] : given) {
    const Setting* row = find(table(), name);
    if (row == nullptr) return unknown_setting(name);
    if (absl::Status status = row->check(value); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status add_setting(std::string_view text, SettingValues& to) {
  const size_t equals = text.find('=');
  if (equals == 0 || equals == std::string_view::npos) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--set ", std::string(text), ": write KEY=VALUE, for example --set tcp.sockets=2"));
  }
  to.emplace_back(text.substr(0, equals), text.substr(equals + 1));
  return absl::OkStatus();
}

std::string_view setting(const ProviderContext& context, std::string_view key,
                         std::string_view fallback) {
  for (const auto& [name, value] : context.settings) {
    if (name == key) return value;
  }
  return fallback;
}

const Setting* SettingsReader::row(std::string_view key) {
  read_.push_back(key);
  const Setting* row = find(declared_, key);
  if (row == nullptr) {
    status_.Update(absl::InternalError(
        absl::StrCat("setting ", std::string(key),
                     " is read but not declared: add it to its provider's table")));
  }
  return row;
}

std::string_view SettingsReader::value(const Setting& row) {
  const std::string_view given = setting(context_, row.name, "");
  const absl::Status status = row.check(given);
  status_.Update(status);
  if (!status.ok()) return "";
  return given.empty() ? row.standard : given;
}

bool SettingsReader::read_number(std::string_view key, int64_t& value_out, std::string_view unit) {
  const Setting* declared = row(key);
  if (declared == nullptr) return false;
  if (declared->kind != Setting::Kind::kNumber || (!unit.empty() && declared->unit != unit)) {
    status_.Update(
        absl::InternalError(absl::StrCat("setting ", std::string(key), " is read as a number of ",
                                         std::string(unit), " and not declared so")));
    return false;
  }
  return absl::SimpleAtoi(std::string(value(*declared)), &value_out);
}

void SettingsReader::kib(std::string_view key, size_t& bytes) {
  int64_t value = 0;
  if (read_number(key, value, "KiB")) bytes = static_cast<size_t>(value) << 10;
}

void SettingsReader::ms(std::string_view key, Time& time) {
  int64_t value = 0;
  if (!read_number(key, value, "ms")) return;
  time = std::chrono::milliseconds(value);
  const bool given = !setting(context_, key, "").empty();
  if (find(declared_, key)->patience && !given && &context_.clock == &Clock::steady()) {
    time = patient(time);
  }
}

void SettingsReader::text(std::string_view key, std::string& out) {
  const Setting* declared = row(key);
  const std::string_view taken = declared == nullptr ? std::string_view() : value(*declared);
  if (!taken.empty()) out = std::string(taken);
}

void SettingsReader::on_off(std::string_view key, bool& out) {
  std::string word;
  text(key, word);
  if (!word.empty()) out = word == "on";
}

absl::Status SettingsReader::finish() {
  for (const Setting& row : declared_) {
    if (std::find(read_.begin(), read_.end(), row.name) != read_.end()) continue;
    status_.Update(absl::InternalError(absl::StrCat(
        "setting ", std::string(row.name), " is declared and never read: remove it or use it")));
  }
  return status_;
}

}  // namespace baton
