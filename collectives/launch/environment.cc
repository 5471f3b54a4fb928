// Finds a process's place among the ranks that mpirun, srun, torchrun or a user's script started.
#include "collectives/launch/environment.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstdlib>
#include <initializer_list>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "collectives/rendezvous.h"

namespace baton::launch {
namespace {

constexpr int kMostFromEnvironment = 1 << 16;
constexpr Time kPmiTime = std::chrono::seconds(60);  // until the launcher has started all ranks

// FNV-1a: the same in every process, unlike absl::Hash.
uint64_t stable_hash(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

absl::Status makes_no_sense(const std::string& name, const std::string& value,
                            const std::string& why) {
  return absl::InvalidArgumentError(
      absl::StrCat("the environment variable ", name, "=\"", value, "\" is not valid: ", why));
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

// "2(x3),1": 2, 2, 2, 1. Empty: it does not say.
std::vector<int> tasks_of_nodes(const std::string& tasks_per_node) {
  std::vector<int> nodes;
  const std::vector<std::string> parts = absl::StrSplit(tasks_per_node, ',');
  for (const std::string& part : parts) {
    const std::vector<std::string> pieces = absl::StrSplit(part, "(x");
    int tasks = 0;
    int times = 1;
    if (!absl::SimpleAtoi(pieces[0], &tasks) || tasks < 0) return {};
    if (pieces.size() == 2 && !absl::SimpleAtoi(pieces[1].substr(0, pieces[1].find(')')), &times)) {
      return {};
    }
    if (times < 1 || times > kMostFromEnvironment) return {};
    nodes.insert(nodes.end(), static_cast<size_t>(times), tasks);
  }
  return nodes;
}

// Finds the rendezvous for launchers that do not set it. `job`: the same at all ranks.
// `node_lists`: variables of Slurm, the first of which that is set names the host of rank 0.
absl::Status find_rendezvous(const Reader& in, const std::string& job,
                             std::initializer_list<const char*> node_lists, Place& place) {
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
  for (const char* name : node_lists) {
    if (!in.has(name)) continue;
    auto host = first_host(in.text(name));
    if (!host.ok())
      return makes_no_sense(name, in.text(name), std::string(host.status().message()));
    place.rendezvous =
        absl::StrCat(*host, ":", in.port_of(absl::StrCat(in.text("SLURM_JOB_ID"), ".", job)));
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s started %d ranks, but no rendezvous address is set: set BATON_RENDEZVOUS=HOST:PORT "
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
  if (absl::Status good = find_rendezvous(in, "", {}, *place); !good.ok()) return good;
  return *place;
}

Found from_torchrun(const Reader& in) {
  auto place = in.place("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE");
  if (!place.ok()) return place.status();
  place->serves = place->rank == 0;
  if (in.has("BATON_RENDEZVOUS") || (place->ranks == 1 && !in.has("MASTER_ADDR"))) {
    if (absl::Status good = find_rendezvous(in, "", {}, *place); !good.ok()) return good;
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
  // A script that numbers ranks by hand and leaves LOCAL_RANK out: they meet on this machine alone.
  if (!in.has("LOCAL_WORLD_SIZE") && collectives::only_this_machine(place->rendezvous)) {
    place->local_rank = place->rank;
    place->local_ranks = place->ranks;
  }
  return *place;
}

// Under Slurm, mpirun starts its daemons in a step of their own: the list of that step leaves out
// the node where mpirun runs, and rank 0 with it.
constexpr std::initializer_list<const char*> kNodesOfJob = {"SLURM_JOB_NODELIST", "SLURM_NODELIST"};
constexpr std::initializer_list<const char*> kNodesOfStep = {
    "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"};

Found from_open_mpi(const Reader& in) {
  auto place = in.place("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                        "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE");
  if (!place.ok()) return place.status();
  const std::string job =
      in.has("PMIX_NAMESPACE") ? in.text("PMIX_NAMESPACE") : in.text("OMPI_MCA_ess_base_jobid");
  if (absl::Status good = find_rendezvous(in, job, kNodesOfJob, *place); !good.ok()) return good;
  return *place;
}

// Several hosts, or an unknown number of them: the ranks tell each other through the launcher.
absl::Status meet_by_pmi(const Reader& in, Place& place) {
  const auto fd = in.number("PMI_FD", 0, INT_MAX);
  if (!fd.ok()) return fd.status();
  const std::string mine = this_host();
  const auto told = tell_by_pmi(*fd, place.rank, place.ranks, mine, patient(kPmiTime));
  if (!told.ok()) {
    return absl::Status(told.status().code(),
                        absl::StrCat(told.status().message(),
                                     "; set BATON_RENDEZVOUS=HOST:PORT for all ranks, with the "
                                     "host that rank 0 runs on and a free port there"));
  }
  const auto first = told->ranks.begin(), me = first + place.rank, end = told->ranks.end();
  place.local_rank = static_cast<int>(std::count(first, me, mine));
  place.local_ranks = static_cast<int>(std::count(first, end, mine));
  place.serves = place.rank == 0;
  const uint16_t port = in.port_of(told->job);
  place.rendezvous = in.text("BATON_RENDEZVOUS");
  if (!place.rendezvous.empty()) return absl::OkStatus();
  const std::string host = first->substr(0, first->find('|'));
  const std::vector<std::string> addresses = absl::StrSplit(
      first->substr(std::min(first->size(), host.size() + 1)), ',', absl::SkipEmpty());
  for (const std::string& address : addresses) {
    if (place.local_ranks == place.ranks) break;
    absl::StrAppend(&place.rendezvous, place.rendezvous.empty() ? "" : ",", address, ":", port);
  }
  if (place.rendezvous.empty()) place.rendezvous = absl::StrCat("127.0.0.1:", port);
  return absl::OkStatus();
}

Found from_pmi(const Reader& in) {
  auto place = in.place("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS");
  if (!place.ok()) return place.status();
  const bool local = in.has("MPI_LOCALNRANKS");
  const bool meets = in.has("BATON_RENDEZVOUS") || place->local_ranks == place->ranks;
  if (place->ranks > 1 && in.has("PMI_FD") && !(local && meets)) {
    if (absl::Status good = meet_by_pmi(in, *place); !good.ok()) return good;
    return *place;
  }
  // MPICH's Hydra numbers no jobs, but all its ranks of one machine are children of one proxy.
  const std::string job = in.has("PMI_JOBID") ? in.text("PMI_JOBID")
                          : place->local_ranks == place->ranks
                              ? absl::StrCat("child of ", in.parent())
                              : "";
  if (absl::Status good = find_rendezvous(in, job, kNodesOfJob, *place); !good.ok()) return good;
  return *place;
}

// Sets local_rank and local_ranks, by what srun says of this task, or else by the list of nodes:
// srun gives neighbours to a node unless it is told otherwise.
absl::Status find_local_rank(const Reader& in, Place& place) {
  const char* const tasks =
      in.has("SLURM_STEP_TASKS_PER_NODE") ? "SLURM_STEP_TASKS_PER_NODE" : "SLURM_TASKS_PER_NODE";
  std::vector<int> nodes = tasks_of_nodes(in.text(tasks));
  const char* const number =
      in.has("SLURM_STEP_NUM_NODES") ? "SLURM_STEP_NUM_NODES" : "SLURM_NNODES";
  if (nodes.empty()) {
    if (in.has(tasks)) return makes_no_sense(tasks, in.text(tasks), "not a list such as 2(x3),1");
    const auto count = in.number(number, 1, kMostFromEnvironment, place.ranks);
    if (!count.ok()) return count.status();
    const int each = (place.ranks + *count - 1) / *count;
    for (int left = place.ranks; left > 0; left -= each) nodes.push_back(std::min(each, left));
  }
  size_t node = 0;
  int before = 0;  // ranks on nodes before this one
  while (node + 1 < nodes.size() && place.rank >= before + nodes[node]) before += nodes[node++];
  const auto said =
      in.number("SLURM_NODEID", 0, static_cast<int>(nodes.size()) - 1, static_cast<int>(node));
  if (!said.ok())
    return in.has(tasks)
               ? makes_no_sense(tasks, in.text(tasks), "it has no node " + in.text("SLURM_NODEID"))
               : said.status();
  place.local_ranks = nodes[static_cast<size_t>(*said)];
  if (place.local_ranks < 1 || place.local_ranks > place.ranks) {
    return makes_no_sense(
        tasks, in.text(tasks),
        absl::StrFormat("node %d must have from 1 to %d ranks", *said, place.ranks));
  }
  const int mine = place.rank - before;
  const auto local = in.number("SLURM_LOCALID", 0, place.local_ranks - 1,
                               std::clamp(mine, 0, place.local_ranks - 1));
  if (!local.ok()) return local.status();
  place.local_rank = *local;
  return absl::OkStatus();
}

Found from_slurm(const Reader& in) {
  auto place = in.place("srun", "SLURM_PROCID", "SLURM_NTASKS", "", "");
  if (!place.ok()) return place.status();
  if (absl::Status good = find_local_rank(in, *place); !good.ok()) return good;
  const std::string job =
      absl::StrCat(in.text("SLURM_JOB_ID"), ".",
                   in.has("SLURM_STEP_ID") ? in.text("SLURM_STEP_ID") : in.text("SLURM_STEPID"));
  if (absl::Status good = find_rendezvous(in, job, kNodesOfStep, *place); !good.ok()) return good;
  return *place;
}

// The variables by which a launcher numbers its ranks, the first to be asked first.
enum Source { kBaton, kTorchrun, kOpenMpi, kPmi, kSlurm };
struct Family {
  const char* rank;
  const char* ranks;
  Found (*place)(const Reader& in);
};
constexpr std::array kFamilies = {
    Family{"BATON_RANK", "BATON_RANKS", from_baton},
    Family{"RANK", "WORLD_SIZE", from_torchrun},
    Family{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", from_open_mpi},
    Family{"PMI_RANK", "PMI_SIZE", from_pmi},
    Family{"SLURM_PROCID", "SLURM_NTASKS", from_slurm},
};

// A launcher's claim about this process.
struct Claim {
  Source source;
  int rank = -1;  // -1: no number
  int ranks = -1;
  std::string text;  // "RANK=0 WORLD_SIZE=1"
};

std::optional<Claim> claim_of(const Reader& in, Source source) {
  const Family& family = kFamilies[source];
  // Without a step it is a batch script: Slurm has started one process there, not a rank.
  if (source == kSlurm && !in.has("SLURM_STEP_ID") && !in.has("SLURM_STEPID")) return std::nullopt;
  if (!in.has(family.rank) || !in.has(family.ranks)) return std::nullopt;
  const std::string rank = in.text(family.rank), ranks = in.text(family.ranks);
  Claim claim{source, -1, -1, absl::StrCat(family.rank, "=", rank, " ", family.ranks, "=", ranks)};
  if (!absl::SimpleAtoi(rank, &claim.rank)) claim.rank = -1;
  if (!absl::SimpleAtoi(ranks, &claim.ranks)) claim.ranks = -1;
  return claim;
}

// Whether `one`, which would be believed, and `other` cannot both be true of one job. A launcher
// may well have been started by another one: torchrun on each node by srun, mpirun's daemons by
// srun.
bool contradict(const Reader& in, const Claim& one, const Claim& other) {
  if (one.rank == other.rank && one.ranks == other.ranks) return false;
  if (one.source == kBaton) return one.ranks == 1 && other.ranks > 1;  // said by hand, for us
  if (one.source == kTorchrun && in.has("TORCHELASTIC_RUN_ID")) return one.ranks < other.ranks;
  if (other.source != kSlurm) return true;
  if (one.source == kTorchrun) return one.ranks <= other.ranks;
  return false;
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
      return absl::InvalidArgumentError("a bracket opens but is not closed after a number");
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
  std::vector<Claim> claims;
  for (const Source source : {kBaton, kTorchrun, kOpenMpi, kPmi, kSlurm}) {
    if (auto claim = claim_of(in, source)) claims.push_back(*std::move(claim));
  }
  // `srun --mpi=pmi2` says it twice, and its daemons' PMI reaches the ranks of an mpirun below it.
  const auto slurm = std::find_if(claims.begin(), claims.end(),
                                  [](const Claim& claim) { return claim.source == kSlurm; });
  if (slurm != claims.end()) {
    const Claim step = *slurm;
    std::erase_if(claims, [&](const Claim& claim) {
      return claim.source == kPmi && claim.rank == step.rank && claim.ranks == step.ranks;
    });
  }
  for (size_t i = 1; i < claims.size(); ++i) {
    if (!contradict(in, claims[0], claims[i])) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "the environment variables ", claims[0].text, " and ", claims[i].text,
        " contradict each other: unset those that do not belong to this job (env -u ",
        kFamilies[claims[0].source].rank, " -u ", kFamilies[claims[0].source].ranks, " ...)"));
  }
  if (!claims.empty()) return kFamilies[claims[0].source].place(in);
  for (const Family& family : kFamilies) {
    if (in.has(family.rank) == in.has(family.ranks) || &family == &kFamilies[kSlurm]) continue;
    const bool rank = in.has(family.rank);
    const char* const there = rank ? family.rank : family.ranks;
    const char* const missing = rank ? family.ranks : family.rank;
    return absl::InvalidArgumentError(
        absl::StrCat("the environment variable ", missing, " is not set, but its companion ", there,
                     "=", in.text(there), " is: set both, or unset ", there));
  }
  return std::nullopt;
}

absl::StatusOr<std::optional<Place>> from_environment() {
  return place_in({.variable = [](const char* name) -> const char* { return std::getenv(name); },
                   .user = getuid(),
                   .parent = getppid()});
}

absl::StatusOr<std::optional<Place>> place_for(int ranks_to_fork) {
  auto place = from_environment();
  if (ranks_to_fork == 0 || !place.ok()) return place;
  if (!place->has_value() || (*place)->ranks == 1) return std::nullopt;
  const Place& here = **place;
  return absl::InvalidArgumentError(absl::StrFormat(
      "--ranks %d forks ranks, but %s started this process as rank %d of %d: leave out --ranks, or "
      "start it without %s",
      ranks_to_fork, here.launcher, here.rank, here.ranks, here.launcher));
}

}  // namespace baton::launch
