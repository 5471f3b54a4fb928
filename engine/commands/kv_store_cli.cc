// The command line of the KV store, and running it.
#include "engine/commands/serve_cli.h"

#include <csignal>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "engine/command_line/command_line.h"
#include "engine/command_line/worker_flags.h"
#include "kvtransfer/store/kv_store.h"
#include "kvtransfer/store/lm_server.h"

namespace baton::engine::commands {
namespace {

struct StoreFlags {
  size_t memory_mib = 1024;
  std::string host = "127.0.0.1";
  uint16_t port = 0;
  std::string advertise;
  std::string key_file;
  std::vector<std::string> providers;
  SettingValues settings;
  std::string lm_host = "127.0.0.1";
  int lm_port = -1;  // none
  size_t lm_connections = 1024;
};

absl::Status serve(const StoreFlags& flags, const sigset_t& signals) {
  kvtransfer::store::KvStoreOptions options;
  options.worker.name = "kv-store";
  options.worker.listen_host = flags.host;
  options.worker.listen_port = flags.port;
  options.worker.advertise = flags.advertise;
  options.worker.providers = flags.providers;
  options.worker.settings = flags.settings;
  options.memory_bytes = flags.memory_mib << 20;
  if (!flags.key_file.empty()) {
    absl::StatusOr<ClusterKey> key = ClusterKey::from_file(flags.key_file);
    if (!key.ok()) return key.status();
    options.worker.key = *std::move(key);
  }
  auto store = kvtransfer::store::KvStore::start(std::move(options));
  if (!store.ok()) return store.status();
  if ((*store)->port() == 0) {
    return absl::UnavailableError(
        absl::StrCat("no transport listens on ", flags.host,
                     ", so clients could not reach the store; give --host an ",
                     "address of this machine, and --provider one that listens, such as tcp"));
  }
  std::unique_ptr<kvtransfer::store::LmServer> lm;
  if (flags.lm_port >= 0) {
    auto started = kvtransfer::store::LmServer::start({.host = flags.lm_host,
                                                       .port = static_cast<uint16_t>(flags.lm_port),
                                                       .connections = flags.lm_connections},
                                                      (*store)->arena());
    if (!started.ok()) return started.status();
    lm = *std::move(started);
    std::printf("lm://%s:%u, open to all who reach it: that wire has no authentication\n",
                flags.lm_host.c_str(), lm->port());
  }
  std::printf("ready: kv_store on %s:%u, %zu MiB\n", flags.host.c_str(), (*store)->port(),
              flags.memory_mib);
  std::fflush(stdout);
  int signal = 0;
  sigwait(&signals, &signal);
  const kvtransfer::store::KvStoreStats stats = (*store)->stats();
  std::printf(
      "%lu blocks, %lu MiB; %lu of %lu blocks found in %lu lookups; %lu taken, %lu evicted, "
      "%lu refused, %lu broken\n",
      stats.arena.blocks, stats.arena.bytes >> 20, stats.found, stats.asked, stats.lookups,
      stats.taken, stats.arena.evicted, stats.arena.refused, stats.broken);
  if (lm != nullptr) {
    const kvtransfer::store::LmTotals totals = lm->stats().totals;
    std::printf("lm://: %lu puts, %lu dropped; %lu of %lu gets found; %lu corrupt\n", totals.puts,
                totals.dropped, totals.hits, totals.gets, totals.corrupt);
  }
  return absl::OkStatus();
}

}  // namespace

int kv_store_main(int argc, char** argv) {
  StoreFlags flags;
  CLI::App app("Keeps KV blocks in memory for servers started with --kv-store.");
  app.add_option("--memory-mib", flags.memory_mib, "memory for blocks, taken at the start")
      ->check(command_line::whole_number(1, 1 << 24))
      ->capture_default_str();
  app.add_option("--host", flags.host, "address to listen on; \"*\": all of this machine")
      ->check(command_line::host())
      ->type_name("HOST")
      ->capture_default_str();
  app.add_option("--port", flags.port, "port to listen on; 0: any")
      ->check(command_line::port())
      ->capture_default_str();
  command_line::add_advertise(app, "--advertise", flags.advertise);
  command_line::add_key_file(app, flags.key_file);
  command_line::add_providers(app, flags.providers);
  command_line::add_settings(app, flags.settings);
  auto* lm_port = app.add_option("--lm-port", flags.lm_port,
                                 "answer LMCache's lm://HOST:PORT too, on this port; 0: any")
                      ->check(command_line::port());
  app.add_option("--lm-host", flags.lm_host,
                 "address for it. The wire has no authentication: any client that reaches it can "
                 "read and write all values")
      ->needs(lm_port)
      ->check(command_line::host())
      ->type_name("HOST")
      ->capture_default_str();
  app.add_option("--lm-connections", flags.lm_connections, "most connections there")
      ->needs(lm_port)
      ->check(command_line::whole_number(1, 1 << 20))
      ->capture_default_str();
  if (const int status = command_line::parse(app, "baton kv_store", argc, argv); status >= 0) {
    return status;
  }
  command_line::tell_idle_settings("baton kv_store", flags.settings, flags.providers);
  // Blocked here so that every thread inherits it.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  const absl::Status status = serve(flags, signals);
  if (status.ok()) return 0;
  std::fprintf(stderr, "baton kv_store: %s\n", std::string(status.message()).c_str());
  return 1;
}

}  // namespace baton::engine::commands
