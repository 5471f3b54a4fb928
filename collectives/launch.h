// Starting ranks: forked by this process, or started by mpirun, srun or torchrun.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace baton::launch {

// Where this process stands in its group.
struct Place {
  int rank = 0;
  int ranks = 1;
  int local_rank = 0;  // among those of this machine
  int local_ranks = 1;
  std::string rendezvous;  // "host:port"; empty: not said (one rank)
  bool serves = false;     // this rank must start the RendezvousServer at that address
  std::string launcher;    // "mpirun", "srun", "torchrun", "baton", or "" (alone)
};

// Reads the environment, in this order: BATON_RANK / BATON_RANKS / BATON_RENDEZVOUS, torchrun
// (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), Open MPI (OMPI_COMM_WORLD_*), PMI, Slurm
// (SLURM_PROCID, SLURM_NTASKS, the first host of SLURM_JOB_NODELIST). nullopt: not started by any
// of them. InvalidArgument names the variable that makes no sense.
absl::StatusOr<std::optional<Place>> from_environment();

struct ForkOptions {
  int ranks = 2;
  bool restart = false;  // start a rank that died anew, with the next generation
  int max_restarts = 3;
  bool prefix_output = false;  // put "[rank] " before every line of a rank's output
};

// Forks `ranks` processes that each run `rank_main` and exit with what it returns; serves their
// rendezvous; waits for all. Returns the exit status: 0 if all returned 0, else that of the first
// that failed (128 + signal for a killed one), after which the others get some time to fail by
// themselves and are then killed. Passes SIGINT and SIGTERM on. Ranks die with the launcher. Call
// it before there are threads. `generation` is 0 at first and counts restarts of that rank.
absl::StatusOr<int> fork_ranks(const ForkOptions& options,
                               const std::function<int(const Place&, int generation)>& rank_main);

}  // namespace baton::launch
