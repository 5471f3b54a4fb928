// What `baton serve` is asked to do: its flags, and those it shares with `baton generate`.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "collectives/launch.h"
#include "engine/http/http_server.h"
#include "engine/model/config.h"
#include "engine/router/router.h"
#include "engine/serve/admission.h"
#include "engine/serve/engine.h"
#include "engine/serve/loaded_model.h"
#include "engine/shard/group.h"
#include "transport/settings.h"

namespace baton::engine::commands {

// The ranks of `baton serve --tensor-parallel-size N`: where they run, and how they meet.
struct RankFlags {
  int size = 1;  // ranks of the model
  bool expert_parallel = false;
  double timeout = 60;  // seconds that a rank may keep the others waiting in a step
};

void add_rank_flags(CLI::App& app, RankFlags* flags);
// vLLM's short form, -tp, which the parser of command lines has no place for.
std::vector<char*> with_long_names(int argc, char** argv);

// Runs `rank_main` as every rank that belongs here, and returns the exit status: as the one rank,
// as the rank that a launcher made of this process (launch::from_environment()), or as all of them,
// forked; then the first failure ends them all. InvalidArgument before anything is started if the
// model in `directory` cannot be cut into so many parts, or a launcher says another number of
// ranks.
absl::StatusOr<int> run_ranks(const RankFlags& flags, const std::string& directory,
                              const std::string& key_file,
                              const std::function<int(const launch::Place&)>& rank_main);

// Meets the other ranks; null where there is one.
absl::StatusOr<std::unique_ptr<shard::Group>> meet(const RankFlags& flags,
                                                   const launch::Place& place,
                                                   const std::vector<std::string>& providers,
                                                   const SettingValues& settings,
                                                   const std::string& key_file);

struct ServeFlags {
  std::string model = serve::default_model();
  std::string served_name;
  std::string role = "all";
  std::string host = "127.0.0.1";
  int port = 8000;
  serve::EngineOptions engine;
  std::string on_load_failure = "recompute";
  // KV transfer.
  std::string session_name;  // of ranks that this process forks
  std::string kv_host;
  uint16_t kv_port = 0;
  std::string kv_advertise;
  std::string key_file;
  std::vector<std::string> providers;
  SettingValues settings;
  std::string link;
  std::string timeline;
  // ... to and from engines of other makes.
  std::string kv_agent;
  std::string kv_agent_address;
  std::string kv_identity;
  double kv_lease = 60;
  size_t kv_staging_mib = 256;
  // Router.
  std::vector<std::string> prefill;
  std::vector<std::string> decode;
  std::string workers;
  double stuck_after = seconds_of(http::HttpServerOptions{}.stuck_after);
  std::string api_key;
  std::string tls_certificate;
  std::string tls_key;
  std::string worker_ca;
  std::vector<std::string> allowed_origins;
  double drain = 30;
  std::string generation_config = "auto";
  serve::AdmissionOptions admission;
  double max_wait = 0;
  double load_timeout = 60;
  double load_silence = seconds_of(serve::EngineOptions{}.load_silence);
  // KV tiers.
  size_t kv_host_mib = 0;
  double kv_disk_gib = 0;
  std::string kv_store;
  Arithmetic arithmetic = Arithmetic::kFp32;
  std::string device = "cpu";
  RankFlags ranks;
};

// Parses and checks. -1: go on; else the exit status to leave with, everything said.
int parse_serve(ServeFlags& flags, int argc, char** argv);

// The flag of a command that computes with a model.
void add_model_flag(CLI::App& app, std::string* directory);
void add_engine_flags(CLI::App& app, serve::EngineOptions* engine);
void add_arithmetic_flag(CLI::App& app, Arithmetic* arithmetic);
void add_device_flag(CLI::App& app, std::string* device);

}  // namespace baton::engine::commands
