// Error texts for a command line as a whole: unknown flags, too many arguments.
#include "engine/command_line/command_line.h"

#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "transport/base/nearest_name.h"
#include "transport/net/endpoint.h"

namespace baton::engine::command_line {

std::string did_you_mean_flag(const CLI::App& app, const std::string& flag) {
  // A single letter is equally near to all others, so it suggests nothing.
  if (flag.size() <= 2) return "";
  std::vector<std::string> known = {"--help"};
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_group().empty()) continue;  // hidden
    for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
  }
  return base::did_you_mean(flag.substr(0, flag.find('=')), known);
}

std::string complaint(const CLI::App& app, const CLI::ParseError& error) {
  constexpr std::string_view kUnread = "Could not convert: ";
  const std::string what = error.what();
  if (const size_t sign = what.find(" = "); what.starts_with(kUnread) && sign != what.npos) {
    return absl::StrCat(what.substr(kUnread.size(), sign - kUnread.size()), ": \"",
                        what.substr(sign + 3), "\" is not a number it can take");
  }
  constexpr std::string_view kOverride = " was given a disallowed flag override";
  if (what.ends_with(kOverride)) {
    const std::string name = what.substr(0, what.size() - kOverride.size());
    return absl::StrCat(name.size() > 1 ? "--" : "-", name, " takes no value");
  }
  if (const size_t missing = what.find(": 1 required "); missing != what.npos) {
    return absl::StrCat(what.substr(0, missing), " needs a value");
  }
  if (error.get_exit_code() != static_cast<int>(CLI::ExitCodes::ExtrasError)) return what;
  const std::vector<std::string> unknown = app.remaining();
  for (const std::string& argument : unknown) {
    if (argument.size() < 2 || argument[0] != '-') continue;
    return absl::StrCat("there is no flag ", argument, did_you_mean_flag(app, argument));
  }
  return unknown.empty() ? error.what()
                         : absl::StrCat("too many arguments: \"", unknown.front(), "\"");
}

void prepare(CLI::App& app, const std::string& name) {
  app.name(name);
  app.formatter(std::make_shared<HelpText>());
  for (CLI::Option* option : app.get_options([](const CLI::Option*) { return true; })) {
    if (option->get_items_expected_max() == 0) option->disable_flag_override();
    // The last of repeated flags holds, as in perftest, nccl-tests and getopt.
    if (option->get_items_expected_max() == 1 && option->get_expected_max() == 1) {
      option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    }
  }
  // Hidden: for scripts/make_manual.
  app.add_flag_callback("--help-table",
                        [&app] {
                          std::cout << option_table(app) << std::flush;
                          throw CLI::Success();
                        })
      ->group("");
}

int parse(CLI::App& app, const std::string& name, int argc, const char* const* argv) {
  prepare(app, name);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) {
      return app.exit(error, std::cout, std::cerr);
    }
    std::cerr << name << ": " << complaint(app, error) << " (see " << name << " --help)\n";
    return kUsage;
  }
  return -1;
}

namespace {

namespace fs = std::filesystem;

// `says` gives what is wrong with a value, or "". `range` stands in the help: "{a,b}", "1..9".
CLI::Validator validator(std::function<std::string(const std::string&)> says,
                         std::string range = "") {
  return {[says = std::move(says)](std::string& text) { return says(text); }, std::move(range)};
}

template <typename T>
bool reads(const std::string& text, T& value) {
  const char* end = text.data() + text.size();
  const auto read = std::from_chars(text.data(), end, value);
  return read.ec == std::errc() && read.ptr == end;
}

bool whole_number_in(const std::string& text, int64_t least, uint64_t most) {
  int64_t negative = 0;
  if (text.starts_with('-')) return reads(text, negative) && negative >= least;
  uint64_t value = 0;
  return reads(text, value) && value <= most && (least <= 0 || value >= uint64_t(least));
}

bool real_number_in(const std::string& text, double least, double most) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  return !text.empty() && end == text.c_str() + text.size() && std::isfinite(value) &&
         value >= least && value <= most;
}

// Why a file at `path` cannot be written: an errno; 0: it can.
int why_not_written(const std::string& path) {
  if (path.empty()) return ENOENT;
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) return EISDIR;
  if (fs::exists(path, ignored)) return access(path.c_str(), W_OK) == 0 ? 0 : errno;
  if (fs::is_symlink(path, ignored)) {  // to a file that is not there yet
    const fs::path to = fs::read_symlink(path, ignored);
    return why_not_written((fs::path(path).parent_path() / to).string());
  }
  const std::string folder = fs::path(path).parent_path().string();
  return access(folder.empty() ? "." : folder.c_str(), W_OK | X_OK) == 0 ? 0 : errno;
}

// The same of files in the folder `path`, which may be missing, and folders above it.
int why_no_folder(const std::string& path) {
  if (path.empty()) return ENOENT;
  std::error_code ignored;
  fs::path there = fs::absolute(path, ignored);
  while (!fs::exists(there, ignored) && there != there.root_path()) there = there.parent_path();
  if (!fs::is_directory(there, ignored)) return ENOTDIR;
  return access(there.c_str(), W_OK | X_OK) == 0 ? 0 : errno;
}

int why_not_read(const std::string& path) {
  if (path.empty()) return ENOENT;
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) return EISDIR;
  return access(path.c_str(), R_OK) == 0 ? 0 : errno;
}

int why_no_folder_to_read(const std::string& path) {
  if (path.empty() || access(path.c_str(), R_OK | X_OK) != 0) return path.empty() ? ENOENT : errno;
  std::error_code ignored;
  return fs::is_directory(path, ignored) ? 0 : ENOTDIR;
}

// A check of paths by one of these.
CLI::Validator path_check(int (*why_not)(const std::string&), const char* verb,
                          const char* instead) {
  return validator([=](const std::string& path) -> std::string {
    const int error = why_not(path);
    if (error == 0) return "";
    return absl::StrCat("cannot ", verb, " ", path.empty() ? "\"\"" : path, " (", strerror(error),
                        "): ", instead);
  });
}

}  // namespace

CLI::Validator whole_number(int64_t least, uint64_t most) {
  const bool any = most >= (uint64_t{1} << 30);
  const std::string range = any ? absl::StrCat(least, "..") : absl::StrCat(least, "..", most);
  return validator(
      [=](const std::string& text) -> std::string {
        if (whole_number_in(text, least, most)) return "";
        return absl::StrCat("\"", text, "\" is not a whole number from ", least, " to ", most);
      },
      range);
}

CLI::Validator real_number(double least, double most) {
  return validator(
      [=](const std::string& text) -> std::string {
        if (real_number_in(text, least, most)) return "";
        return absl::StrCat("\"", text, "\" is not a number from ", least, " to ", most);
      },
      absl::StrCat(least, "..", most));
}

CLI::Validator port() { return whole_number(0, 65535); }

CLI::Validator host() {
  return validator([](const std::string& name) -> std::string {
    if (name.empty()) return "\"\" is not a host: give a name or an address";
    if (name == "*") return "";
    const bool v6 = name.find(':') != std::string::npos && name.front() != '[';
    return std::string(
        net::resolve(v6 ? absl::StrCat("[", name, "]:1") : name + ":1").status().message());
  });
}

CLI::Validator one_of(std::vector<std::string> words) {
  const std::string all = absl::StrJoin(words, ",");
  return validator(
      [words = std::move(words)](const std::string& text) -> std::string {
        if (std::find(words.begin(), words.end(), text) != words.end()) return "";
        return absl::StrCat("\"", text, "\" is not one of ", absl::StrJoin(words, ", "),
                            base::did_you_mean(text, words));
      },
      absl::StrCat("{", all, "}"));
}

CLI::Validator byte_size() {
  return {[](std::string& text) -> std::string {
            const std::string given = text;
            try {
              const bool digit = !text.empty() && text.front() >= '0' && text.front() <= '9';
              if (digit && CLI::AsSizeValue(false)(text).empty() &&
                  whole_number_in(text, 0, uint64_t{1} << 62)) {
                return "";
              }
            } catch (const CLI::ValidationError&) {
            }
            return absl::StrCat("\"", given,
                                "\" is not a size: give a number of bytes, or one with K, M or G");
          },
          ""};
}

CLI::Validator writable_file() {
  const CLI::Validator path =
      path_check(why_not_written, "write", "name a file that can be written");
  return validator([path](std::string name) -> std::string {
    if (name == "-")
      return "\"-\" does not mean stdout here: name a file (./- for a file of that name)";
    return path(name);
  });
}

CLI::Validator writable_folder() {
  return path_check(why_no_folder, "write into", "name a folder that can be written to");
}

CLI::Validator readable_file() {
  return path_check(why_not_read, "read", "name a file that can be read");
}

CLI::Validator readable_folder() {
  return path_check(why_no_folder_to_read, "read", "name a folder that can be read");
}

CLI::Validator not_empty() {
  return validator([](const std::string& text) -> std::string {
    return text.empty() ? "is empty: give it a value, or leave it out" : "";
  });
}

}  // namespace baton::engine::command_line
