// The ranks of `baton serve --tensor-parallel-size N`: where they run, and how they meet.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "absl/status/statusor.h"
#include "collectives/launch.h"
#include "engine/shard/group.h"
#include "transport/settings.h"

namespace baton::engine::commands {

struct RankFlags {
  int size = 1;         // ranks of the model
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

}  // namespace baton::engine::commands
