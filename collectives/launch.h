// Starting ranks: forked by this process, or started by mpirun, srun or torchrun.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "transport/clock.h"
#include "transport/identity.h"

namespace baton::launch {

// This process's rank and the size of its group.
struct Place {
  int rank = 0;
  int ranks = 1;
  int local_rank = 0;  // among those of this machine
  int local_ranks = 1;
  std::string rendezvous;   // "host:port"; empty: not said (one rank)
  bool serves = false;      // this rank must start the RendezvousServer at that address (start_at)
  uint64_t generation = 0;  // of the group to join there
  std::string launcher;     // "mpirun", "srun", "torchrun", "baton", or "" (alone)
};

// Reads the environment, in this order: BATON_RANK / BATON_RANKS / BATON_RENDEZVOUS (and
// BATON_LOCAL_RANK / BATON_LOCAL_RANKS, else all ranks are taken to be on this machine), torchrun
// (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), Open MPI (OMPI_COMM_WORLD_*), PMI (MPICH, Intel
// MPI), Slurm (SLURM_PROCID, SLURM_NTASKS, the first host of the step's nodes; only within a step,
// as srun starts it). BATON_RENDEZVOUS goes before the launcher's own address; where neither says
// one, it is made of the job's number and the user's, which is possible on one machine and under
// Slurm. Ranks of PMI on several hosts tell each other their addresses through the launcher
// (PMI_FD), for which this blocks until all have started; a program that calls MPI_Init itself sets
// BATON_RENDEZVOUS instead.
// nullopt: not started by any of them. InvalidArgument names the variable that makes no sense, the
// one that is missing of two, or both pairs where two launchers contradict each other (mpirun in a
// pod that has RANK=0 WORLD_SIZE=1).
absl::StatusOr<std::optional<Place>> from_environment();

// The same for a command with `--ranks N` (0: not given): nullopt where it is to fork them, or,
// with 0, was started by no launcher. InvalidArgument where a launcher has started several ranks
// already.
absl::StatusOr<std::optional<Place>> place_for(int ranks_to_fork);

struct ForkOptions {
  int ranks = 2;
  bool restart = false;  // start a rank that died anew, with the next generation
  int max_restarts = 3;  // of each rank within `restart_period`
  Time restart_period = std::chrono::hours(1);
  Time grace = std::chrono::seconds(5);  // for the others to end by themselves after a failure
  std::optional<ClusterKey> key;         // of the rendezvous; default: ClusterKey::for_this_user()
};

// Forks `ranks` processes that each run `rank_main` and exit with what it returns; serves their
// rendezvous; waits for all. Returns the exit status: 0 if all returned 0, else that of the first
// that failed (128 + signal for a killed one; stderr says which rank and how), after which the
// others get some time to fail by themselves and are then killed. Passes SIGINT and SIGTERM on.
// Ranks die with the launcher. Call it before there are threads; it starts none.
// `restarts` is 0 at first and counts how often that rank was started anew. Its place then has the
// first generation that has not met yet: survivors join it with the one after their own.
// With `restart`, a rank returns 0 only when the work of all is done. From then on no rank is
// started anew, those who would meet again hear Cancelled, and the result is 0.
absl::StatusOr<int> fork_ranks(const ForkOptions& options,
                               const std::function<int(const Place&, int restarts)>& rank_main);

}  // namespace baton::launch
