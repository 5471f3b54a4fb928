// Settings and environment variables as JSON, text and Markdown.
#include "bench/doctor/info.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "bench/report/dialogue.h"
#include "transport/base/environment.h"
#include "transport/settings.h"

namespace baton::bench {
namespace {

std::string or_dash(const std::string& text) { return text.empty() ? "-" : text; }

// "1024 KiB", "auto", "-".
std::string with_unit(const Json& row) {
  const std::string value = text_of(row, "default"), unit = text_of(row, "unit");
  return or_dash(value.empty() || unit.empty() ? value : absl::StrCat(value, " ", unit));
}

std::string cell(const std::string& text) { return absl::StrReplaceAll(text, {{"|", "\\|"}}); }

constexpr const char* kMarkdownHead = R"(# Settings and environment variables

Made by `baton info --settings --markdown`; a test fails where this page and the program differ.

A setting is given as `--set NAME=VALUE` to every command that makes workers, or as `WorkerOptions::settings`. One that
does not exist, or a value out of range, is an error that names valid ones. `baton info
--settings` prints the same of the program at hand, `--json` for other programs.
)";

constexpr const char* kMarkdownEnvironment = R"(
## Environment variables

A `BATON_*` variable that is not here is an error to the `baton` command, and a warning in the log of
any other program.

| variable | default | meaning |
|---|---|---|
)";

}  // namespace

Json settings_info() {
  Json settings = Json::array(), environment = Json::array();
  for (const Setting& row : known_settings()) {
    settings.push_back({{"name", std::string(row.name)},
                        {"unit", std::string(row.unit)},
                        {"default", std::string(row.standard)},
                        {"range", row.range()},
                        {"meaning", std::string(row.meaning)}});
  }
  for (const base::EnvironmentVariable& row : base::known_environment()) {
    environment.push_back({{"name", std::string(row.name)},
                           {"default", std::string(row.standard)},
                           {"meaning", std::string(row.meaning)}});
  }
  return {{"settings", std::move(settings)}, {"environment", std::move(environment)}};
}

std::string settings_text(const Json& info) {
  std::string out = "Settings (--set NAME=VALUE; WorkerOptions::settings)\n";
  for (const Json& row : info["settings"]) {
    const std::string range = text_of(row, "range");
    absl::StrAppend(&out, absl::StrFormat("  %-22s %-11s %s%s\n", text_of(row, "name"),
                                          with_unit(row), text_of(row, "meaning"),
                                          range.empty() ? "" : absl::StrCat(" [", range, "]")));
  }
  absl::StrAppend(&out, "\nEnvironment variables\n");
  for (const Json& row : info["environment"]) {
    absl::StrAppend(&out, absl::StrFormat("  %-22s %s (default: %s)\n", text_of(row, "name"),
                                          text_of(row, "meaning"), text_of(row, "default")));
  }
  return out;
}

std::string settings_markdown(const Json& info) {
  std::string out = kMarkdownHead, provider;
  for (const Json& row : info["settings"]) {
    const std::string name = text_of(row, "name");
    if (const std::string of = name.substr(0, name.find('.')); of != provider) {
      provider = of;
      absl::StrAppend(&out, "\n## ", of,
                      "\n\n| setting | default | takes | meaning |\n|---|---|---|---|\n");
    }
    absl::StrAppend(&out, "| `", name, "` | ", with_unit(row), " | ",
                    or_dash(text_of(row, "range")), " | ", cell(text_of(row, "meaning")), " |\n");
  }
  absl::StrAppend(&out, kMarkdownEnvironment);
  for (const Json& row : info["environment"]) {
    absl::StrAppend(&out, "| `", text_of(row, "name"), "` | ", cell(text_of(row, "default")), " | ",
                    cell(text_of(row, "meaning")), " |\n");
  }
  return out;
}

}  // namespace baton::bench
