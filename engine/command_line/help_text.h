// What --help prints: values and their ranges in the field's notation, lines of at most 100
// columns.
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

}  // namespace baton::engine::command_line
