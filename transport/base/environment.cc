// The table, and the process's environment held against it.
#include "transport/base/environment.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <regex>

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
    EnvironmentVariable{"BATON_ADVERTISE", "the addresses of this machine's interfaces",
                        "HOST or HOST:PORT that peers are told, behind NAT or a published port: of "
                        "every worker that listens beyond loopback and has no option that says so"},
    EnvironmentVariable{"BATON_API_KEY", "none", "key that clients of `baton serve` must send"},
    EnvironmentVariable{"BATON_CASES", "some",
                        "which cases to run of tests that fail each call or byte in turn: all, or "
                        "the number of one"},
    EnvironmentVariable{"BATON_CATCH_FAULTS", "yes",
                        "no: leaves SIGSEGV and SIGBUS to the program, so a transfer from or to "
                        "unmapped memory ends the process"},
    EnvironmentVariable{"BATON_CI", "what is owed",
                        "full: .ci/run runs every test, whatever a change reaches"},
    EnvironmentVariable{
        "BATON_CUBLASLT", "libcublasLt.so.13, or .12",
        "cuBLASLt library for bf16 products on a GPU; none: use Baton's own kernel"},
    EnvironmentVariable{"BATON_CUDA_GRAPHS", "yes",
                        "no: launch a GPU's decoding steps kernel by kernel, not as CUDA graphs"},
    EnvironmentVariable{"BATON_FIRST_SEED", "0",
                        "the seed that tests with random faults begin with"},
    EnvironmentVariable{
        "BATON_FLIGHT_RECORDER", "/tmp/baton-flight-USER-GROUP",
        "a failed collective writes its last events to this path plus .RANK.json; none: nowhere"},
    EnvironmentVariable{"BATON_GPU_LIBRARY", "the machine's",
                        "folder of the CUDA driver's library that ./run gpu tests with"},
    EnvironmentVariable{"BATON_GPU_SECONDS", "465",
                        "time limit for all steps of ./run gpu together"},
    EnvironmentVariable{"BATON_INSTALL", "yes",
                        "no: only name missing packages, do not install them"},
    EnvironmentVariable{
        "BATON_KEY_FILE", "~/.config/baton/cluster.key, made when it is missing",
        "file with the secret that all workers of a cluster share; empty: as if not set"},
    EnvironmentVariable{"BATON_LINT_MOST", "100000", "most compiled units that ./run lint checks"},
    EnvironmentVariable{"BATON_LOCAL_RANK", "BATON_RANK", "number of this rank on its machine"},
    EnvironmentVariable{"BATON_LOCAL_RANKS", "BATON_RANKS", "how many ranks this machine has"},
    EnvironmentVariable{
        "BATON_LOG", "warning",
        "least severe level that is logged to stderr: trace, debug, info, warning, error or off"},
    EnvironmentVariable{"BATON_LOG_FORMAT", "text", "json: each line of the log is an object"},
    EnvironmentVariable{"BATON_NCCL_PROVIDERS", "all that both sides have",
                        "providers of NCCL's plugin, as in shm,tcp"},
    EnvironmentVariable{"BATON_NCCL_SET", "none",
                        "settings of NCCL's plugin, as in tcp.sockets=4,verbs.qps=2"},
    EnvironmentVariable{"BATON_NCCL_TIMELINE", "none",
                        "file to which NCCL's plugin writes a timeline of each process"},
    EnvironmentVariable{"BATON_NCCL_TUNING", "none",
                        "file with rows for the tuner of NCCL's plugin"},
    EnvironmentVariable{"BATON_PATIENCE", "1",
                        "multiplies default timeouts, for debuggers, sanitizers and emulators; "
                        "explicit timeouts stay as given"},
    EnvironmentVariable{"BATON_RANK", "that of the launcher (torchrun, Open MPI, Slurm)",
                        "number of this rank, from 0"},
    EnvironmentVariable{"BATON_RANKS", "that of the launcher", "how many ranks there are"},
    EnvironmentVariable{"BATON_RENDEZVOUS", "that of the launcher",
                        "HOST:PORT where the ranks find each other"},
    EnvironmentVariable{"BATON_SEED", "all", "run tests with random faults with this seed only"},
    EnvironmentVariable{"BATON_SEEDS", "a few hundred or thousand",
                        "how many seeds those tests run"},
    EnvironmentVariable{"BATON_SLAB_KIB", "65536",
                        "largest slab of a memory pool, unless one block needs more; smaller slabs "
                        "make many small processes on one machine start sooner"},
    EnvironmentVariable{"BATON_TORCH", "cpp, and python where that cannot be compiled",
                        "cpp or python: the backend of torch.distributed that must be used"},
};

// Whether an orchestrator has set the variable beside a service whose name begins with "baton", as
// Kubernetes does for every Service of a namespace. Of a service BATON_X:
//   BATON_X_SERVICE_HOST, BATON_X_SERVICE_PORT, BATON_X_SERVICE_PORT_NAME
//   BATON_X_PORT=tcp://10.0.0.1:7000
//   BATON_X_PORT_7000_TCP (udp, sctp), and behind that _PROTO, _PORT, _ADDR
bool is_of_orchestrator(const std::string& name, const std::string& value) {
  static const std::regex by_name(
      ".*_SERVICE_(HOST|PORT|PORT_.*)|.*_PORT_[0-9]+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?");
  static const std::regex address("(tcp|udp|sctp)://.*");
  return std::regex_match(name, by_name) ||
         (name.ends_with("_PORT") && std::regex_match(value, address));
}

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
    if (is_of_orchestrator(name, std::string(text.substr(std::min(name.size() + 1, text.size())))))
      continue;
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
