// Validators for option values, to pass to CLI::Option::check() or transform(). An invalid value is
// refused before the command does anything, with the values that are allowed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"

namespace baton::engine::command_line {

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
