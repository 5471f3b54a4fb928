// The table, and the process's environment held against it.
#include "transport/base/environment.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "transport/base/log.h"
#include "transport/base/nearest_name.h"
#include "transport/base/patience.h"

namespace baton::base {
namespace {

constexpr std::string_view kPrefix = "BATON_";

constexpr int64_t kSlabKib = 64 << 10;

absl::StatusOr<int64_t> slab_kib() {
  return number_from_environment("BATON_SLAB_KIB", kSlabKib, 4, int64_t{1} << 30);
}

constexpr std::array kVariables = {
    EnvironmentVariable{"BATON_API_KEY", "none", "key that clients of `baton serve` must send"},
    EnvironmentVariable{"BATON_CASES", "some",
                        "all, or the one case, of tests that let each call or byte fail"},
    EnvironmentVariable{"BATON_CATCH_FAULTS", "yes",
                        "no: a transfer that meets memory which was unmapped ends the process, "
                        "and SIGSEGV and SIGBUS are nobody's but the program's"},
    EnvironmentVariable{
        "BATON_CUBLASLT", "libcublasLt.so.13, or .12",
        "the file of the library that multiplies in bf16 on a GPU; none: our own kernel does"},
    EnvironmentVariable{"BATON_CUDA_GRAPHS", "yes",
                        "no: a GPU's steps of decoding are launched kernel by kernel"},
    EnvironmentVariable{"BATON_CI", "what is owed",
                        "full: .ci/run runs every test, whatever a change reaches"},
    EnvironmentVariable{"BATON_FIRST_SEED", "0",
                        "the seed that tests with random faults begin with"},
    EnvironmentVariable{"BATON_FLIGHT_RECORDER", "/tmp/baton-flight-USER-GROUP",
                        "where a failed collective writes its last events: this and .RANK.json; "
                        "none: nowhere"},
    EnvironmentVariable{"BATON_GPU_LIBRARY", "the machine's",
                        "folder of the CUDA driver's library that ./run gpu tests with"},
    EnvironmentVariable{"BATON_GPU_SECONDS", "465", "for all steps of ./run gpu together"},
    EnvironmentVariable{"BATON_GPU_TRACE", "none",
                        "file that the CUDA driver's calls are recorded to, as text"},
    EnvironmentVariable{"BATON_INSTALL", "yes",
                        "no: missing packages are named by ./run, not installed"},
    EnvironmentVariable{
        "BATON_KEY_FILE", "~/.config/baton/cluster.key, made when it is missing",
        "file with the secret that all workers of a cluster share; empty: as if not set"},
    EnvironmentVariable{"BATON_LINT_MOST", "100000",
                        "how many compiled units ./run lint looks at, at most"},
    EnvironmentVariable{"BATON_LOCAL_RANK", "BATON_RANK", "number of this rank on its machine"},
    EnvironmentVariable{"BATON_LOCAL_RANKS", "BATON_RANKS", "how many ranks this machine has"},
    EnvironmentVariable{"BATON_LOG", "warning",
                        "what is told on stderr: trace, debug, info, warning, error or off"},
    EnvironmentVariable{"BATON_LOG_FORMAT", "text", "json: each line of the log is an object"},
    EnvironmentVariable{
        "BATON_PATIENCE", "1",
        "so many times the usual is waited for others before they are given up: for "
        "debuggers, sanitizers, emulators; times that are given hold as they are"},
    EnvironmentVariable{"BATON_RANK", "that of the launcher (torchrun, Open MPI, Slurm)",
                        "number of this rank, from 0"},
    EnvironmentVariable{"BATON_RANKS", "that of the launcher", "how many ranks there are"},
    EnvironmentVariable{"BATON_RENDEZVOUS", "that of the launcher",
                        "HOST:PORT where the ranks find each other"},
    EnvironmentVariable{"BATON_SEED", "all", "the one seed that tests with random faults run"},
    EnvironmentVariable{"BATON_SEEDS", "a few hundred or thousand",
                        "how many seeds those tests run"},
    EnvironmentVariable{"BATON_SLAB_KIB", "65536",
                        "the most that a slab of a memory pool takes, unless one block needs more; "
                        "less makes many small processes on one machine start sooner"},
};

}  // namespace

absl::Span<const EnvironmentVariable> known_environment() { return kVariables; }

absl::StatusOr<int64_t> number_from_environment(const char* name, int64_t standard, int64_t least,
                                                int64_t most) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == 0) return standard;
  int64_t number = 0;
  if (absl::SimpleAtoi(text, &number) && number >= least && number <= most) return number;
  return absl::InvalidArgumentError(
      absl::StrCat(name, "=", text, ": give a whole number from ", least, " to ", most));
}

size_t most_slab_bytes() {
  static const size_t bytes = static_cast<size_t>(slab_kib().value_or(kSlabKib)) << 10;
  return bytes;
}

std::vector<std::string> wrong_environment() {
  std::vector<std::string> known, wrong;
  for (const EnvironmentVariable& variable : kVariables) known.emplace_back(variable.name);
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    if (text.substr(0, kPrefix.size()) != kPrefix) continue;
    const std::string name(text.substr(0, text.find('=')));
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    const std::string hint = did_you_mean(name, known);
    wrong.push_back(absl::StrCat(
        "Baton reads no environment variable ", name,
        hint.empty()
            ? absl::StrCat("; `env -u ", name, " baton info --settings` lists those it does")
            : hint));
  }
  for (const absl::Status& status : {log_level_status(), patience_status(), slab_kib().status()}) {
    if (!status.ok()) wrong.emplace_back(status.message());
  }
  std::sort(wrong.begin(), wrong.end());
  return wrong;
}

}  // namespace baton::base
