// What --help prints: values and their ranges in the field's notation, lines of at most 100
// columns. And the same as a table, from which the man pages and the completions are made.
#pragma once

#include <string>

#include "CLI/CLI.hpp"

namespace baton::engine::command_line {

// `--rounds 1..1000    Rounds over the slow link [3]`, where CLI11 by itself writes
// `--rounds INT:INT in [1 - 1000]=3`.
class HelpText : public CLI::Formatter {
 public:
  HelpText();
  std::string make_option_name(const CLI::Option* option, bool is_positional) const override;
  std::string make_option_opts(const CLI::Option* option) const override;
  std::string make_option_desc(const CLI::Option* option) const override;
};

// The options of a command for programs, what `--help-table` prints: a line each, its fields
// separated by tabs.
//   about    TEXT
//   argument NAME  VALUE  TEXT        a positional
//   option   -h, --help  VALUE  TEXT  VALUE as in --help; empty: the option takes none
//   footer   TEXT                     its lines separated by the two characters \n
std::string option_table(const CLI::App& app);

}  // namespace baton::engine::command_line
