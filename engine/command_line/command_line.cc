// Error texts for a command line as a whole: unknown flags, too many arguments.
#include "engine/command_line/command_line.h"

#include <iostream>
#include <memory>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "transport/base/nearest_name.h"

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

}  // namespace baton::engine::command_line
