// Finds a process's place among the ranks that mpirun, srun, torchrun or a user's script started.
#include "collectives/launch/environment.h"

#include <unistd.h>

#include <cstdlib>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"

namespace baton::launch {
namespace {

constexpr int kMostFromEnvironment = 1 << 16;

// FNV-1a: the same in every process, unlike absl::Hash.
uint64_t stable_hash(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

absl::Status makes_no_sense(const std::string& name, const std::string& value,
                            const std::string& why) {
  return absl::InvalidArgumentError(
      absl::StrCat("the environment variable ", name, "=\"", value, "\" makes no sense: ", why));
}

class Reader {
 public:
  explicit Reader(const Surroundings& surroundings) : surroundings_(surroundings) {}

  std::string text(const std::string& name) const {
    const char* value = surroundings_.variable(name.c_str());
    return value == nullptr ? "" : value;
  }
  bool has(const std::string& name) const { return !text(name).empty(); }

  // A number from `least` to `most`; where the variable is missing, `otherwise`, if there is one.
  absl::StatusOr<int> number(const std::string& name, int least, int most,
                             std::optional<int> otherwise = std::nullopt) const {
    const std::string value = text(name);
    if (value.empty()) {
      if (otherwise.has_value()) return *otherwise;
      return absl::InvalidArgumentError(absl::StrCat("the environment variable ", name,
                                                     " is not set, but its companions are: set it, "
                                                     "or unset all of them"));
    }
    int number = 0;
    if (!absl::SimpleAtoi(value, &number) || number < least || number > most) {
      return makes_no_sense(name, value, absl::StrCat("not a number from ", least, " to ", most));
    }
    return number;
  }

  // The names of four variables: rank, ranks, and those of this machine.
  absl::StatusOr<Place> place(const std::string& launcher, const std::string& rank,
                              const std::string& ranks, const std::string& local_rank,
                              const std::string& local_ranks) const {
    Place place;
    place.launcher = launcher;
    const auto of = number(ranks, 1, kMostFromEnvironment);
    if (!of.ok()) return of.status();
    const auto mine = number(rank, 0, *of - 1);
    if (!mine.ok()) return mine.status();
    place.rank = *mine;
    place.ranks = *of;
    if (has(local_ranks)) {
      const auto local_of = number(local_ranks, 1, *of);
      if (!local_of.ok()) return local_of.status();
      const auto local = number(local_rank, 0, *local_of - 1);
      if (!local.ok()) return local.status();
      place.local_rank = *local;
      place.local_ranks = *local_of;
    }
    return place;
  }

  // A port that all ranks of a job of this user find by themselves: outside the range from which
  // Linux gives out ports (32768 and up) and above the well-known services.
  uint16_t port_of(const std::string& job) const {
    return static_cast<uint16_t>(12000 +
                                 stable_hash(absl::StrCat(surroundings_.user, "/", job)) % 20000);
  }
  pid_t parent() const { return surroundings_.parent; }

 private:
  const Surroundings& surroundings_;
};

// "2(x3),1" at node 3: 1. 0: it does not say.
int tasks_at(const std::string& tasks_per_node, int node) {
  const std::vector<std::string> parts = absl::StrSplit(tasks_per_node, ',');
  for (const std::string& part : parts) {
    const std::vector<std::string> pieces = absl::StrSplit(part, "(x");
    int tasks = 0;
    int times = 1;
    if (!absl::SimpleAtoi(pieces[0], &tasks)) return 0;
    if (pieces.size() == 2 && !absl::SimpleAtoi(pieces[1].substr(0, pieces[1].find(')')), &times)) {
      return 0;
    }
    if (node < times) return std::max(tasks, 0);
    node -= times;
  }
  return 0;
}

// Where the ranks meet, for launchers that do not say it. `job`: the same at all ranks.
absl::Status find_rendezvous(const Reader& in, const std::string& job, Place& place) {
  place.serves = place.rank == 0;
  if (const std::string said = in.text("BATON_RENDEZVOUS"); !said.empty()) {
    place.rendezvous = said;
    return absl::OkStatus();
  }
  if (place.ranks == 1) {
    place.serves = false;
    return absl::OkStatus();
  }
  if (!job.empty() && place.local_ranks == place.ranks) {
    place.rendezvous = absl::StrCat("127.0.0.1:", in.port_of(job));
    return absl::OkStatus();
  }
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}) {
    if (!in.has(name)) continue;
    auto host = first_host(in.text(name));
    if (!host.ok())
      return makes_no_sense(name, in.text(name), std::string(host.status().message()));
    place.rendezvous =
        absl::StrCat(*host, ":", in.port_of(absl::StrCat(in.text("SLURM_JOB_ID"), ".", job)));
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s started %d ranks, but nothing says where they can meet: set BATON_RENDEZVOUS=HOST:PORT "
      "for all of them, with the host that rank 0 runs on and a free port there",
      place.launcher, place.ranks));
}

using Found = absl::StatusOr<std::optional<Place>>;

Found from_baton(const Reader& in) {
  auto place =
      in.place("baton", "BATON_RANK", "BATON_RANKS", "BATON_LOCAL_RANK", "BATON_LOCAL_RANKS");
  if (!place.ok()) return place.status();
  if (!in.has("BATON_LOCAL_RANKS")) {
    place->local_rank = place->rank;
    place->local_ranks = place->ranks;
  }
  if (absl::Status good = find_rendezvous(in, "", *place); !good.ok()) return good;
  return *place;
}

Found from_torchrun(const Reader& in) {
  auto place = in.place("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE");
  if (!place.ok()) return place.status();
  place->serves = place->rank == 0;
  if (in.has("BATON_RENDEZVOUS") || (place->ranks == 1 && !in.has("MASTER_ADDR"))) {
    if (absl::Status good = find_rendezvous(in, "", *place); !good.ok()) return good;
    return *place;
  }
  if (!in.has("MASTER_ADDR")) {
    return absl::InvalidArgumentError(
        "RANK and WORLD_SIZE are set, but MASTER_ADDR is not: set it to the host of rank 0, or set "
        "BATON_RENDEZVOUS=HOST:PORT");
  }
  auto port = in.number("MASTER_PORT", 1, UINT16_MAX);
  if (!port.ok()) return port.status();
  // torchrun's own agent listens at MASTER_PORT then: take the next one.
  if (in.text("TORCHELASTIC_USE_AGENT_STORE") == "True") {
    port = *port == UINT16_MAX ? *port - 1 : *port + 1;
  }
  const std::string host = in.text("MASTER_ADDR");
  const bool v6 = host.find(':') != std::string::npos && host.front() != '[';
  place->rendezvous = absl::StrCat(v6 ? "[" : "", host, v6 ? "]:" : ":", *port);
  return *place;
}

Found from_open_mpi(const Reader& in) {
  auto place = in.place("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                        "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE");
  if (!place.ok()) return place.status();
  const std::string job =
      in.has("PMIX_NAMESPACE") ? in.text("PMIX_NAMESPACE") : in.text("OMPI_MCA_ess_base_jobid");
  if (absl::Status good = find_rendezvous(in, job, *place); !good.ok()) return good;
  return *place;
}

Found from_pmi(const Reader& in) {
  auto place = in.place("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS");
  if (!place.ok()) return place.status();
  // MPICH's Hydra numbers no jobs, but all its ranks of one machine are children of one proxy.
  const std::string job =
      in.has("PMI_JOBID") ? in.text("PMI_JOBID") : absl::StrCat("child of ", in.parent());
  if (absl::Status good = find_rendezvous(in, job, *place); !good.ok()) return good;
  return *place;
}

Found from_slurm(const Reader& in) {
  auto place = in.place("srun", "SLURM_PROCID", "SLURM_NTASKS", "", "");
  if (!place.ok()) return place.status();
  const char* const tasks =
      in.has("SLURM_STEP_TASKS_PER_NODE") ? "SLURM_STEP_TASKS_PER_NODE" : "SLURM_TASKS_PER_NODE";
  if (in.has(tasks)) {
    const auto node = in.number("SLURM_NODEID", 0, kMostFromEnvironment, 0);
    if (!node.ok()) return node.status();
    place->local_ranks = tasks_at(in.text(tasks), *node);
    if (place->local_ranks < 1 || place->local_ranks > place->ranks) {
      return makes_no_sense(
          tasks, in.text(tasks),
          absl::StrFormat("node %d must have from 1 to %d ranks", *node, place->ranks));
    }
    const auto local = in.number("SLURM_LOCALID", 0, place->local_ranks - 1, 0);
    if (!local.ok()) return local.status();
    place->local_rank = *local;
  }
  const std::string job =
      absl::StrCat(in.text("SLURM_JOB_ID"), ".",
                   in.has("SLURM_STEP_ID") ? in.text("SLURM_STEP_ID") : in.text("SLURM_STEPID"));
  if (absl::Status good = find_rendezvous(in, job, *place); !good.ok()) return good;
  return *place;
}

}  // namespace

absl::StatusOr<std::string> first_host(const std::string& node_list) {
  const size_t end = node_list.find_first_of(",[");
  std::string host = node_list.substr(0, end);
  if (end != std::string::npos && node_list[end] == '[') {
    const size_t shut = node_list.find(']', end);
    const size_t number_end = node_list.find_first_of(",-]", end);
    const std::string number = node_list.substr(end + 1, number_end - end - 1);
    if (shut == std::string::npos || number.empty()) {
      return absl::InvalidArgumentError("a bracket opens and none closes after a number");
    }
    host += number;
    // What follows the bracket belongs to the name: "rack[1-2]-gpu[0-3]".
    const size_t rest_end = node_list.find(',', shut);
    const std::string rest = node_list.substr(shut + 1, rest_end - shut - 1);
    if (!rest.empty()) {
      auto tail = first_host(node_list.substr(shut + 1));
      if (!tail.ok()) return tail;
      host += *tail;
    }
  }
  if (host.empty()) return absl::InvalidArgumentError("it names no host");
  return host;
}

absl::StatusOr<std::optional<Place>> place_in(const Surroundings& surroundings) {
  const Reader in(surroundings);
  if (in.has("BATON_RANK") || in.has("BATON_RANKS")) return from_baton(in);
  if (in.has("RANK") && in.has("WORLD_SIZE")) return from_torchrun(in);
  if (in.has("OMPI_COMM_WORLD_RANK")) return from_open_mpi(in);
  if (in.has("PMI_RANK") && in.has("PMI_SIZE")) return from_pmi(in);
  // Without a step it is a batch script: Slurm has started one process there, not a rank.
  if (in.has("SLURM_PROCID") && (in.has("SLURM_STEP_ID") || in.has("SLURM_STEPID"))) {
    return from_slurm(in);
  }
  return std::nullopt;
}

absl::StatusOr<std::optional<Place>> from_environment() {
  return place_in({.variable = [](const char* name) -> const char* { return std::getenv(name); },
                   .user = getuid(),
                   .parent = getppid()});
}

}  // namespace baton::launch
