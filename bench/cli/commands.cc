// Finds a command of the `baton` tool by name, prints help, suggests what may have been meant.
#include "bench/cli/commands.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
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

// Gives each closed standard stream a descriptor, because otherwise the next file or connection
// would get its number. Writing to that descriptor fails, as it would on the closed stream.
void open_closed_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(stream, F_GETFD) >= 0) continue;
    const int null = open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY);
    if (null != stream && null >= 0) close(null);
  }
}

// The exit status of a command: what could not be printed is a failure.
int printed(const std::string& name, int status) {
  std::cout.flush();
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0 && std::cout.good()) return status;
  std::cerr << "baton " << name
            << ": standard output could not be written: is its disk full, or is it closed?\n";
  return status == 0 ? 1 : status;
}

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

namespace {

int run_named(absl::Span<const Command> commands, int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  if (name == "--help" || name == "-h" || name == "help") {
    std::cout << help(commands);
    return 0;
  }
  if (name == "--help-table") {  // for scripts/make_manual
    for (const Command& command : commands) {
      std::cout << "command\t" << command.name << "\t" << command.summary << "\n";
    }
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

}  // namespace

int run_command(absl::Span<const Command> commands, int argc, char** argv) {
  open_closed_streams();
  return printed(argc > 1 ? argv[1] : "", run_named(commands, argc, argv));
}

}  // namespace baton::bench
