// What is wrong with a command line: flags that do not exist, files that cannot be written, sizes.
#include "engine/command_line/command_line.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "transport/base/nearest_name.h"

namespace baton::engine::command_line {

std::string did_you_mean_flag(const CLI::App& app, const std::string& flag) {
  // A letter is as near to any other as to the one that was meant.
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
  if (error.get_exit_code() != static_cast<int>(CLI::ExitCodes::ExtrasError)) return error.what();
  const std::vector<std::string> unknown = app.remaining();
  for (const std::string& argument : unknown) {
    if (argument.size() < 2 || argument[0] != '-') continue;
    return absl::StrCat("there is no flag ", argument, did_you_mean_flag(app, argument));
  }
  return unknown.empty() ? error.what()
                         : absl::StrCat("too many arguments: \"", unknown.front(), "\"");
}

CLI::Validator writable_file() {
  return {[](const std::string& path) -> std::string {
            std::error_code ignored;
            const bool is_folder = std::filesystem::is_directory(path, ignored);
            const bool exists = std::filesystem::exists(path, ignored);
            const std::string folder = std::filesystem::path(path).parent_path().string();
            const std::string asked = exists ? path : folder.empty() ? "." : folder;
            errno = is_folder ? EISDIR : 0;
            if (!is_folder && access(asked.c_str(), exists ? W_OK : W_OK | X_OK) == 0) return "";
            return absl::StrCat("cannot write ", path, " (", strerror(errno),
                                "): name a file that can be written");
          },
          ""};
}

CLI::Validator byte_size() {
  return {[](std::string& text) -> std::string {
            const std::string given = text;
            try {
              const std::string wrong = CLI::AsSizeValue(false)(text);
              if (wrong.empty()) return "";
            } catch (const CLI::ValidationError&) {
            }
            return absl::StrCat("\"", given,
                                "\" is not a size: give a number of bytes, or one with K, M or G");
          },
          ""};
}

int parse(CLI::App& app, const std::string& name, int argc, const char* const* argv) {
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

}  // namespace baton::engine::command_line
