// `baton doctor`: checks of this machine, each with the command that fixes what is wrong.
#pragma once

#include <string>
#include <vector>

#include "absl/types/span.h"
#include "bench/report/report.h"

namespace baton::bench {

struct Check {
  enum class Grade : uint8_t { kOk, kWarn, kFail };
  Grade grade = Grade::kOk;
  std::string name;      // "memlock"
  std::string provider;  // that it matters for; "": for all
  std::string finding;
  std::string remedy;  // a command, or what else to do; "" where nothing is to be done
};

// Judges what collect_info() returned. With a provider, its being unusable is a failure; without
// one, only that none can be used is.
std::vector<Check> examine(const Json& info, const std::string& provider);

// Whether a check failed that matters.
bool failed(absl::Span<const Check> checks);

std::string doctor_text(absl::Span<const Check> checks);
Json doctor_json(absl::Span<const Check> checks);

int doctor_main(int argc, char** argv);

}  // namespace baton::bench
