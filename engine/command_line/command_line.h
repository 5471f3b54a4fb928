// Parsing the command line of one command, and saying what is wrong with it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"

namespace baton::engine::command_line {

inline constexpr int kUsage = 2;  // exit status

// The error text for a command line; for an unknown flag it names the nearest known one.
std::string complaint(const CLI::App& app, const CLI::ParseError& error);

// The long flag of `app` that is nearest to `flag`, as "; did you mean --flag?"; "" if none is
// near.
std::string did_you_mean_flag(const CLI::App& app, const std::string& flag);

// To be called once, behind all options: what --help says, that flags take no values, that of a
// repeated option the last value holds, and the hidden flag --help-table (below). `name` is
// what people typed, "baton serve".
void prepare(CLI::App& app, const std::string& name);

// Prepares and parses. -1: go on; else the exit status to leave with, everything said: 0 after
// --help.
int parse(CLI::App& app, const std::string& name, int argc, const char* const* argv);

// The text of --help, with values and their ranges, in lines of at most 100 columns; and the same
// as a table, from which the man pages and the completions are made.

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

// Validators for option values, to pass to CLI::Option::check() or transform(). An invalid value is
// refused before the command does anything, with the values that are allowed.

// Digits alone, from `least` to `most`; a '-' where `least` is negative.
CLI::Validator whole_number(int64_t least, uint64_t most);

// A finite decimal number in [least, most].
CLI::Validator real_number(double least, double most);

// A TCP port; 0: any that is free.
CLI::Validator port();

// A name or an address of a host, which can be looked up.
CLI::Validator host();

// Accepts one of these words; the error for another names the nearest.
CLI::Validator one_of(std::vector<std::string> words);

// A number of bytes, or one with K, M or G (powers of 1024). For transform().
CLI::Validator byte_size();

// A file to write: refused before anything is measured if it cannot be.
CLI::Validator writable_file();

// A folder to write into, made if it is missing.
CLI::Validator writable_folder();

// A file, or a folder, to read.
CLI::Validator readable_file();
CLI::Validator readable_folder();

// Anything but "".
CLI::Validator not_empty();

}  // namespace baton::engine::command_line
