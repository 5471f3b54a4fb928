// Starting `baton`, and reading what it says and writes.
#include "tests/bench/command.h"

#include "absl/strings/str_split.h"
#include "tests/test.h"

namespace baton::bench {
namespace {

ChildProcess shell(const std::string& text) {
  return must(ChildProcess::spawn(-1, {"sh", "-c", text, BATON_COMMAND}, {}));
}

}  // namespace

ChildProcess start(const std::string& arguments) {
  return shell("exec \"$0\" " + arguments + " 2>&1");
}

Ended end_of(ChildProcess& child) {
  Ended ended;
  while (true) {
    const auto line = child.read_line(kLimit);
    if (!line.ok()) break;
    ended.output += *line + "\n";
  }
  if (const auto status = child.wait(kLimit); status.ok()) ended.status = *status;
  return ended;
}

Ended baton(const std::string& arguments) {
  ChildProcess child = start(arguments);
  return end_of(child);
}

Ended script(const std::string& text) {
  ChildProcess child = shell(text);
  return end_of(child);
}

std::string wait_for(ChildProcess& child, const std::string& text) {
  while (true) {
    const auto line = child.read_line(kLimit);
    EXPECT_TRUE(line.ok()) << "waiting for \"" << text << "\": " << line.status();
    if (!line.ok() || line->find(text) != std::string::npos) return line.ok() ? *line : "";
  }
}

std::string address_of(ChildProcess& server) {
  const std::string line = wait_for(server, "listening on 127.0.0.1:");
  const size_t begin = line.find("127.0.0.1:");
  const size_t end = line.find_first_not_of("0123456789.:", begin);
  std::string where = begin == std::string::npos ? "" : line.substr(begin, end - begin);
  if (where.ends_with(':')) where.pop_back();  // the sentence goes on
  return where;
}

std::vector<std::vector<std::string>> table_rows(const std::string& output) {
  std::vector<std::vector<std::string>> rows;
  for (const absl::string_view line : absl::StrSplit(output, '\n')) {
    std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    const bool number =
        !words.empty() && words[0].find_first_not_of("0123456789") == std::string::npos;
    if (number && words.size() >= 5) rows.push_back(std::move(words));
  }
  return rows;
}

std::vector<Json> rows_in(const std::string& path) {
  std::vector<Json> rows;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    rows.push_back(Json::parse(line, nullptr, false));
  }
  return rows;
}

}  // namespace baton::bench
