// A command line, parsed: what came of it, and what was printed.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "tests/test.h"

namespace baton::bench {

template <typename Command>
struct Parsed {
  Command command;
  std::string out;
  std::string err;
  bool ok() const { return command.options.has_value(); }
  // The options of a line that must be right.
  const auto& operator*() const {
    if (!ok()) throw std::runtime_error(err);
    return *command.options;
  }
};

// parse(argc, argv) of a line whose words a blank parts.
template <typename Parse>
auto parse_line(const std::string& program, const std::string& line, Parse&& parse) {
  std::vector<std::string> words = {program};
  if (!line.empty()) {
    for (const auto word : absl::StrSplit(line, ' ')) words.emplace_back(word);
  }
  std::vector<const char*> argv;
  for (const std::string& word : words) argv.push_back(word.c_str());
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  Parsed<decltype(parse(1, argv.data()))> parsed;
  parsed.command = parse(static_cast<int>(argv.size()), argv.data());
  parsed.out = testing::internal::GetCapturedStdout();
  parsed.err = testing::internal::GetCapturedStderr();
  return parsed;
}

}  // namespace baton::bench
