// The environment variables that Baton reads: BATON_*, one table.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace baton::base {

struct EnvironmentVariable {
  std::string_view name;
  std::string_view standard;  // what holds where it is not set
  std::string_view meaning;
};

// Those of all of Baton, whatever of it a program links: a launcher sets some for others.
absl::Span<const EnvironmentVariable> known_environment();

// What is wrong with this process's environment, one line each: BATON_* that nobody reads, with the
// nearest that somebody does, and a BATON_LOG or BATON_PATIENCE that is none. The `baton` command
// refuses to run then; a worker writes them into the log.
std::vector<std::string> wrong_environment();

}  // namespace baton::base
