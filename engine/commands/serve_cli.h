// The serving commands of the `baton` binary. Each takes its own arguments (argv[0] is the
// command's name), prints its own errors to stderr and returns an exit status.
#pragma once

namespace baton::engine::commands {

// `baton serve --role {all,prefill,decode,router}`: serves until SIGINT or SIGTERM. Prints
// "ready: ROLE on URL" to stdout once it accepts requests.
int serve_main(int argc, char** argv);

// `baton generate --model DIR --prompt TEXT`: continues a text on stdout.
int generate_main(int argc, char** argv);

// `baton kv_store`: a process that keeps KV blocks for several servers.
// Options: --memory-mib N, --host, --port, --key-file, --provider, --lm-port. Prints one line
// beginning with "ready: " and serves until SIGINT or SIGTERM; then says what it did. Returns an
// exit status.
int kv_store_main(int argc, char** argv);

}  // namespace baton::engine::commands
