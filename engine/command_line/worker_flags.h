// The flags of every command that makes workers: which providers, with which settings, by which
// key, over which pretended link. What is wrong with them is said before anything starts.
#pragma once

#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "transport/settings.h"

namespace baton::engine::command_line {

// `--provider shm,tcp`: those this program has, by name.
CLI::Option* add_providers(CLI::App& app, std::vector<std::string>& providers);
// `--provider tcp`: one of them.
CLI::Option* add_provider(CLI::App& app, std::string& provider, const std::string& text);
// `--set NAME=VALUE`, any number of times.
CLI::Option* add_settings(CLI::App& app, SettingValues& settings);
// `--key-file FILE`; an empty name means no file.
CLI::Option* add_key_file(CLI::App& app, std::string& file);
// `--advertise HOST[:PORT]`, under this name: WorkerOptions::advertise.
CLI::Option* add_advertise(CLI::App& app, const char* name, std::string& advertise);
// `--link 40MB/s,200us`: as LinkShape::parse() reads it.
CLI::Option* add_link(CLI::App& app, std::string& link);

// Says on stderr which of these settings have no effect, as they are of providers that are not
// among `providers` (empty: all are used). That is no error: scripts give one list to several runs.
void tell_idle_settings(const std::string& command, const SettingValues& settings,
                        const std::vector<std::string>& providers);

}  // namespace baton::engine::command_line
