// The environment that launch::from_environment() reads; tests replace it.
#pragma once

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "collectives/launch.h"
#include "transport/clock.h"

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

// Exchange between ranks through the launcher that started them, before they are connected: PMI-1,
// the text protocol that the mpiexec of MPICH and Intel MPI (Hydra) speaks over the descriptor
// PMI_FD.

struct PmiTold {
  std::string job;                 // a name that no other job of the launcher has
  std::vector<std::string> ranks;  // what each rank told
};

// Gives `mine` (no blanks) to the others and returns what all gave. All `ranks` call it, once: then
// the descriptor is of no more use. Blocks until all have come. Unavailable: `fd` speaks no PMI-1;
// DeadlineExceeded: it does not answer within `timeout`.
absl::StatusOr<PmiTold> tell_by_pmi(int fd, int rank, int ranks, const std::string& mine,
                                    Time timeout);

// "node1|10.0.0.1,[fd00::1]": what tells this host from others, and its addresses that lead out.
std::string this_host();

}  // namespace baton::launch
