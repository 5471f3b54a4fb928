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
#include <iterator>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
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

namespace {

constexpr size_t kColumn = 34;  // where descriptions begin
constexpr size_t kWidth = 100;

// The placeholder of the value: the range or the words that a check allows, which CLI11 puts behind
// the name of the type and a colon, or that name where it says more.
std::string type_of(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  constexpr std::string_view kPlain[] = {"INT", "UINT", "FLOAT", "TEXT"};
  const size_t colon = type.find(':');
  const std::string name = type.substr(0, colon);
  const bool plain =
      name.size() == 1 || std::find(std::begin(kPlain), std::end(kPlain), name) != std::end(kPlain);
  const bool range = colon != std::string::npos && colon + 1 < type.size() &&
                     (type[colon + 1] == '{' || absl::ascii_isdigit(type[colon + 1]));
  if (range) return plain ? type.substr(colon + 1) : name;
  return plain && name != "TEXT" ? "N" : type;
}

std::string names_of(const std::set<CLI::Option*>& options) {
  return absl::StrJoin(options, ", ", [](std::string* out, const CLI::Option* option) {
    out->append(option->get_name());
  });
}

// Words from `text` in lines of at most `width`.
std::string wrapped(const std::string& text, size_t width) {
  std::string out;
  size_t column = 0;
  for (const auto word : absl::StrSplit(text, ' ')) {
    if (column > 0 && column + 1 + word.size() > width) {
      out += '\n';
      column = 0;
    } else if (column > 0) {
      out += ' ';
      ++column;
    }
    absl::StrAppend(&out, word);
    column += word.size();
  }
  return out;
}

// The description, the default and what the option goes with.
std::string description_of(const CLI::Option& option) {
  std::string text = option.get_description();
  if (!option.get_default_str().empty()) {
    absl::StrAppend(&text, " [", option.get_default_str(), "]");
  }
  if (!option.get_needs().empty()) {
    absl::StrAppend(&text, " (with ", names_of(option.get_needs()), ")");
  }
  if (!option.get_excludes().empty()) {
    absl::StrAppend(&text, " (not with ", names_of(option.get_excludes()), ")");
  }
  return text;
}

}  // namespace

HelpText::HelpText() { column_width(kColumn); }

std::string HelpText::make_option_name(const CLI::Option* option, bool is_positional) const {
  if (is_positional) return option->get_name(true, false);
  std::vector<std::string> names;
  for (const std::string& name : option->get_snames()) names.push_back("-" + name);
  for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  return absl::StrJoin(names, ", ");
}

std::string HelpText::make_option_opts(const CLI::Option* option) const {
  if (option->get_items_expected_max() == 0) return "";  // a flag
  const bool many = option->get_expected_max() == CLI::detail::expected_max_vector_size &&
                    option->get_allow_extra_args();
  return absl::StrCat(" ", type_of(*option), many ? " ..." : "");
}

std::string HelpText::make_option_desc(const CLI::Option* option) const {
  return wrapped(description_of(*option), kWidth - kColumn);
}

std::string option_table(const CLI::App& app) {
  const HelpText help;
  const auto field = [](const std::string& text) {
    return absl::StrReplaceAll(text, {{"\n", "\\n"}, {"\t", " "}});
  };
  std::string out = absl::StrCat("about\t", field(app.get_description()), "\n");
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_group().empty()) continue;  // hidden
    const bool positional = option->get_positional();
    absl::StrAppend(&out, positional ? "argument\t" : "option\t",
                    help.make_option_name(option, positional), "\t",
                    absl::StripAsciiWhitespace(help.make_option_opts(option)), "\t",
                    field(description_of(*option)), "\n");
  }
  if (!app.get_footer().empty()) absl::StrAppend(&out, "footer\t", field(app.get_footer()), "\n");
  return out;
}

}  // namespace baton::engine::command_line
