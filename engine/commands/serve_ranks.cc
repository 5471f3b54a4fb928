// Forking ranks, or joining those that a launcher has started.
#include "engine/commands/serve_flags.h"

#include <chrono>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "collectives/rendezvous.h"
#include "engine/command_line/command_line.h"
#include "engine/files/files.h"
#include "engine/model/config.h"
#include "engine/model/shard.h"

namespace baton::engine::commands {
namespace {

constexpr size_t kMaxConfig = size_t{1} << 20;

// What cannot be is said once and at once, not by every rank after it has loaded the model.
absl::Status check_size(const RankFlags& flags, const std::string& directory) {
  const absl::StatusOr<std::string> text = read_file(directory + "/config.json", kMaxConfig);
  if (!text.ok()) return absl::OkStatus();  // loading it says more
  const absl::StatusOr<ModelConfig> config = parse_model_config(*text);
  return config.ok() ? check_shard(*config, {0, flags.size, flags.expert_parallel})
                     : absl::OkStatus();
}

absl::StatusOr<ClusterKey> key_of(const std::string& key_file) {
  return key_file.empty() ? ClusterKey::for_this_user() : ClusterKey::from_file(key_file);
}

}  // namespace

void add_rank_flags(CLI::App& app, RankFlags* flags) {
  app.add_option("--tensor-parallel-size,--tp", flags->size,
                 "number of processes that each hold a part of the model (-tp): forked here, or "
                 "started by mpirun, srun, torchrun, or by hand with BATON_RANK, BATON_RANKS and "
                 "BATON_RENDEZVOUS=HOST:PORT; it divides the model's KV heads")
      ->check(command_line::whole_number(1, 256))
      ->capture_default_str();
  app.add_flag("--enable-expert-parallel", flags->expert_parallel,
               "distribute the model's experts over these processes, each expert whole in one "
               "process (default: every process has columns of all experts)");
  app.add_option("--tensor-parallel-timeout", flags->timeout,
                 "seconds that one rank may delay the others in a step before the server exits")
      ->check(command_line::real_number(0.1, 86400))
      ->capture_default_str();
}

std::vector<char*> with_long_names(int argc, char** argv) {
  static char name[] = "--tensor-parallel-size";
  static std::vector<std::string> joined;
  joined.reserve(static_cast<size_t>(argc));
  std::vector<char*> out;
  for (int i = 0; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word == "-tp") {
      out.push_back(name);
    } else if (word.substr(0, 4) == "-tp=") {
      out.push_back(joined.emplace_back(name + std::string(word.substr(3))).data());
    } else {
      out.push_back(argv[i]);
    }
  }
  return out;
}

absl::StatusOr<int> run_ranks(const RankFlags& flags, const std::string& directory,
                              const std::string& key_file,
                              const std::function<int(const launch::Place&)>& rank_main) {
  if (flags.size == 1) return rank_main({});
  if (absl::Status status = check_size(flags, directory); !status.ok()) return status;
  absl::StatusOr<ClusterKey> key = key_of(key_file);
  if (!key.ok()) return key.status();
  absl::StatusOr<std::optional<launch::Place>> place = launch::from_environment();
  if (!place.ok()) return place.status();
  if (!place->has_value() || (*place)->ranks == 1) {
    return launch::fork_ranks({.ranks = flags.size, .key = *key},
                              [&](const launch::Place& here, int) { return rank_main(here); });
  }
  const launch::Place& here = **place;
  if (here.ranks != flags.size) {
    return absl::InvalidArgumentError(absl::StrCat("--tensor-parallel-size is ", flags.size,
                                                   ", but ", here.launcher, " started ", here.ranks,
                                                   " ranks"));
  }
  std::unique_ptr<collectives::RendezvousServer> server;
  if (here.serves) {
    auto started = collectives::RendezvousServer::start_at(*key, here.rendezvous,
                                                           static_cast<uint32_t>(here.ranks));
    if (!started.ok()) return started.status();
    server = *std::move(started);
  }
  return rank_main(here);
}

absl::StatusOr<std::unique_ptr<shard::Group>> meet(const RankFlags& flags,
                                                   const launch::Place& place,
                                                   const std::vector<std::string>& providers,
                                                   const SettingValues& settings,
                                                   const std::string& key_file) {
  if (place.ranks == 1) return nullptr;
  absl::StatusOr<ClusterKey> key = key_of(key_file);
  if (!key.ok()) return key.status();
  CommunicatorOptions options;
  options.rank = place.rank;
  options.ranks = place.ranks;
  options.rendezvous = place.rendezvous;
  options.generation = place.generation;
  options.name = "tensor-parallel";
  options.worker.key = *std::move(key);
  options.worker.providers = providers;
  options.worker.settings = settings;
  options.start_timeout = std::chrono::minutes(5);
  options.timeout = std::chrono::duration_cast<Time>(std::chrono::duration<double>(flags.timeout));
  return shard::Group::meet(std::move(options), flags.expert_parallel);
}

}  // namespace baton::engine::commands
