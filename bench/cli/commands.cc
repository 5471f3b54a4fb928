// Finds a command of the `baton` tool by name, prints help, suggests what may have been meant.
#include "bench/cli/commands.h"

#include <iostream>
#include <new>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "transport/base/environment.h"
#include "transport/base/nearest_name.h"

namespace baton::bench {
namespace {

constexpr int kUsage = 2;

}  // namespace

std::string help(absl::Span<const Command> commands) {
  std::string out = "usage: baton COMMAND [options]    (baton COMMAND --help tells them)\n\n";
  for (const Command& command : commands) {
    if (*command.summary == '\0') continue;
    absl::StrAppend(&out, absl::StrFormat("  %-19s %s\n", command.name, command.summary));
  }
  absl::StrAppend(&out,
                  "\n  --version           print the version\n  --help              print this\n");
  return out;
}

int run_command(absl::Span<const Command> commands, int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  if (name == "--help" || name == "-h" || name == "help") {
    std::cout << help(commands);
    return 0;
  }
  if (name == "--version") {
    std::cout << "baton " << BATON_VERSION << "\n";
    return 0;
  }
  if (name.empty()) {
    std::cerr << help(commands);
    return kUsage;
  }
  if (const auto wrong = base::wrong_environment(); !wrong.empty()) {
    for (const std::string& line : wrong) std::cerr << "baton: " << line << "\n";
    return kUsage;
  }
  for (const Command& command : commands) {
    if (name != command.name) continue;
    try {
      return command.run(argc - 1, argv + 1);
    } catch (const std::bad_alloc& none) {
      std::cerr << "baton " << name << ": no memory: " << none.what() << "\n";
      return 1;
    }
  }
  std::vector<std::string> known;
  for (const Command& command : commands) known.emplace_back(command.name);
  const std::string hint = base::did_you_mean(name, known);
  std::cerr << "baton: there is no command \"" << name << "\""
            << (hint.empty() ? "; `baton --help` lists them" : hint) << "\n";
  return kUsage;
}

}  // namespace baton::bench
