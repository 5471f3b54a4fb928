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

// True if a required check failed.
bool failed(absl::Span<const Check> checks);

std::string doctor_text(absl::Span<const Check> checks);
Json doctor_json(absl::Span<const Check> checks);

int doctor_main(int argc, char** argv);

// The checks of `baton doctor`, by what they look at. Each appends to the list.
void check_rdma(const Json& info, std::vector<Check>& out);    // devices, ports, GIDs, access
void check_limits(const Json& info, std::vector<Check>& out);  // locked memory, cgroups, files
void check_memory(const Json& info, std::vector<Check>& out);  // huge pages
void check_kernel(const Json& info, std::vector<Check>& out);  // CMA, TCP
void check_gpus(const Json& info, std::vector<Check>& out);    // driver, peermem, dma-buf

}  // namespace baton::bench
