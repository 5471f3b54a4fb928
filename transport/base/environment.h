// The environment variables that Baton reads: BATON_*, one table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace baton::base {

struct EnvironmentVariable {
  std::string_view name;
  std::string_view standard;  // what holds where it is not set
  std::string_view meaning;
};

// The variables of all of Baton, also of parts that this program does not link: a launcher sets
// some for its children.
absl::Span<const EnvironmentVariable> known_environment();

// The whole number of a variable, `standard` where it is not set or empty. InvalidArgument, naming
// the variable and the range: the value is not a whole number from `least` to `most`.
absl::StatusOr<int64_t> number_from_environment(const char* name, int64_t standard, int64_t least,
                                                int64_t most);

// BATON_SLAB_KIB in bytes, read once; 64 MiB where it is not set, or wrong. Any thread.
size_t most_slab_bytes();

// Problems in this process's environment, one line each: BATON_* variables that Baton does not
// read, with the nearest that it does, and values of BATON_LOG and of numbers that it cannot use.
// Variables that an orchestrator sets beside a service called baton or baton-* are left out:
// BATON_SERVICE_HOST, BATON_PORT=tcp://... and the like (environment.cc lists them). The `baton`
// command refuses to run then; a worker writes them into the log.
std::vector<std::string> wrong_environment();

}  // namespace baton::base
