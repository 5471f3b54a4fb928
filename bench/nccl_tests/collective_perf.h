// `baton all_reduce_perf` and its siblings: a collective among forked ranks, or among those that
// mpirun, srun or torchrun started.
#pragma once

namespace baton::bench {

// argv[0] is the command's name.
int collective_perf_main(int argc, char** argv);

}  // namespace baton::bench
