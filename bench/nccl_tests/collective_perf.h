// `baton all_reduce_perf` and its siblings: a collective among forked ranks, or among those that
// mpirun, srun or torchrun started.
#pragma once

namespace baton::bench {

int all_reduce_perf_main(int argc, char** argv);
int all_gather_perf_main(int argc, char** argv);
int reduce_scatter_perf_main(int argc, char** argv);
int broadcast_perf_main(int argc, char** argv);
int reduce_perf_main(int argc, char** argv);
int alltoall_perf_main(int argc, char** argv);
int sendrecv_perf_main(int argc, char** argv);
int gather_perf_main(int argc, char** argv);
int scatter_perf_main(int argc, char** argv);
int hypercube_perf_main(int argc, char** argv);

// `baton executor_bench`: what the executor itself costs per step of a schedule, with links that do
// nothing.
int executor_bench_main(int argc, char** argv);

}  // namespace baton::bench
