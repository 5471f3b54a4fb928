// `baton all_reduce_perf` and its siblings: a collective among forked ranks, or among those that
// mpirun, srun or torchrun started.
#pragma once

namespace baton::bench {

// argv[0] is the command's name.
int collective_perf_main(int argc, char** argv);

// `baton executor_bench`: what the executor itself costs per step of a schedule, with links that do
// nothing.
int executor_bench_main(int argc, char** argv);

}  // namespace baton::bench
