// `baton kv_store`: a process that keeps KV blocks for several servers.
#pragma once

namespace baton::engine::commands {

// Options: --memory-mib N, --host, --port, --key-file, --provider, --lm-port. Prints one line
// beginning with "ready: " and serves until SIGINT or SIGTERM; then says what it did. Returns an
// exit status.
int kv_store_main(int argc, char** argv);

}  // namespace baton::engine::commands
