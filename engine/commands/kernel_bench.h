// `baton kernel_bench`: the CPU kernels against the peaks of this machine, measured in the same
// run.
#pragma once

namespace baton::engine::commands {

// Options: --json FILE, --threads N, --quick. Prints a table (GEMM in GFLOP/s against the FMA peak,
// decode attention in GB/s of KV read against DRAM read bandwidth), writes one JSON object per
// row, and returns an exit status.
int kernel_bench_main(int argc, char** argv);

}  // namespace baton::engine::commands
