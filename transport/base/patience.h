// Reads BATON_PATIENCE; transport/clock.h describes its effect.
#pragma once

#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace baton::base {

// "" is 1. InvalidArgument: no whole number from 1 to 1,000.
absl::StatusOr<int> parse_patience(std::string_view text);

// The environment's, read once; 1 where it is wrong. Any thread. transport/clock.h, which users
// have and this header they have not, declares it too.
int patience_factor();

// InvalidArgument where it is wrong.
absl::Status patience_status();

}  // namespace baton::base
