// Dispatch, help and suggestions.
#include "bench/commands.h"

#include <algorithm>
#include <iostream>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace baton::bench {
namespace {

constexpr int kUsage = 2;

// Levenshtein distance, by rows.
size_t edits(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t change = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({change, row[j] + 1, diagonal + 1});
    }
  }
  return row[b.size()];
}

}  // namespace

const Command* nearest(absl::Span<const Command> commands, std::string_view name) {
  const Command* best = nullptr;
  size_t least = std::max<size_t>(2, name.size() / 3) + 1;
  for (const Command& command : commands) {
    const size_t distance = edits(name, command.name);
    if (distance < least) {
      least = distance;
      best = &command;
    }
  }
  return best;
}

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
  for (const Command& command : commands) {
    if (name == command.name) return command.run(argc - 1, argv + 1);
  }
  std::cerr << "baton: there is no command \"" << name << "\"";
  if (const Command* near = nearest(commands, name); near != nullptr) {
    std::cerr << "; did you mean \"" << near->name << "\"?\n";
  } else {
    std::cerr << "; `baton --help` lists them\n";
  }
  return kUsage;
}

}  // namespace baton::bench
