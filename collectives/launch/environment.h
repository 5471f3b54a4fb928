// The environment that launch::from_environment() reads; tests replace it.
#pragma once

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "collectives/launch.h"

namespace baton::launch {

struct Surroundings {
  std::function<const char*(const char* name)> variable;  // as getenv
  uid_t user = 0;
  pid_t parent = 0;
};

// from_environment(), as a pure function.
absl::StatusOr<std::optional<Place>> place_in(const Surroundings& surroundings);

// The first host of a Slurm node list: "node03" of "node[03-05,9],gpu1".
absl::StatusOr<std::string> first_host(const std::string& node_list);

}  // namespace baton::launch
