// The serving commands of the `baton` binary. Each takes its own arguments (argv[0] is the
// command's name), prints its own errors to stderr and returns an exit status.
#pragma once

namespace baton::engine::commands {

// `baton serve --role {all,prefill,decode,router}`: serves until SIGINT or SIGTERM. Prints
// "ready: ROLE on URL" to stdout once it accepts requests.
int serve_main(int argc, char** argv);

// `baton generate --model DIR --prompt TEXT`: continues a text on stdout.
int generate_main(int argc, char** argv);

// `baton serve_bench --url URL`: load on an HTTP endpoint, reported with the keys of
// `vllm bench serve`.
int serve_bench_main(int argc, char** argv);

// `baton kernel_bench`: the CPU kernels against the peaks of this machine, measured in the same
// run. Options: --json FILE, --threads N, --only KIND, --quick. Prints a table (GEMM in GFLOP/s
// against the peak of FMA, AMX or vdpbf16ps, one token's products and decode attention in GB/s of
// what they read against read bandwidth over the same bytes, twice as many as the last cache
// holds), writes one JSON object per row, and returns an exit status.
int kernel_bench_main(int argc, char** argv);

// `baton kv_store`: a process that keeps KV blocks for several servers.
// Options: --memory-mib N, --host, --port, --key-file, --provider, --lm-port. Prints one line
// beginning with "ready: " and serves until SIGINT or SIGTERM; then says what it did. Returns an
// exit status.
int kv_store_main(int argc, char** argv);

}  // namespace baton::engine::commands
