// The commands of the `baton` tool: finding one by name, and the help that lists them.
#pragma once

#include <string>
#include <string_view>

#include "absl/types/span.h"

namespace baton::bench {

struct Command {
  const char* name = "";
  const char* summary = "";                     // one line; "": the line of another names it
  int (*run)(int argc, char** argv) = nullptr;  // argv[0] is the command's name
};

// Runs what `argv` asks for and returns its exit status; 2, with a suggestion, for a command that
// does not exist.
int run_command(absl::Span<const Command> commands, int argc, char** argv);

// One screen: usage, one line per command.
std::string help(absl::Span<const Command> commands);

}  // namespace baton::bench
