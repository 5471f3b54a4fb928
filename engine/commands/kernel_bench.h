// `baton kernel_bench`: the CPU kernels against the peaks of this machine, measured in the same
// run.
#pragma once

namespace baton::engine::commands {

// Options: --json FILE, --threads N, --only KIND, --quick. Prints a table (GEMM in GFLOP/s against
// the peak of FMA, AMX or vdpbf16ps, one token's products and decode attention in GB/s of what they
// read against read bandwidth over the same bytes, twice as many as the last cache holds), writes
// one JSON object per row, and returns an exit status.
int kernel_bench_main(int argc, char** argv);

}  // namespace baton::engine::commands
