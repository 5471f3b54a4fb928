// Parsing the command line of one command, and saying what is wrong with it.
#pragma once

#include <string>

#include "CLI/CLI.hpp"

namespace baton::engine::command_line {

inline constexpr int kUsage = 2;  // exit status

// What is wrong, for people: of a flag that does not exist, with the nearest that does.
std::string complaint(const CLI::App& app, const CLI::ParseError& error);

// The long flag of `app` that is nearest to `flag`, as "; did you mean --flag?"; "" if none is
// near.
std::string did_you_mean_flag(const CLI::App& app, const std::string& flag);

// To be called once, behind all options: what --help says, that flags take no values, and the
// hidden flag --help-table (help_text.h). `name` is what people typed, "baton serve".
void prepare(CLI::App& app, const std::string& name);

// Prepares and parses. -1: go on; else the exit status to leave with, everything said: 0 after
// --help.
int parse(CLI::App& app, const std::string& name, int argc, const char* const* argv);

}  // namespace baton::engine::command_line
