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

}  // namespace baton::engine::commands
