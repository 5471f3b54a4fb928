// The collective benchmarks themselves: forked ranks, every collective, both files, exit statuses.
#include "bench/nccl_tests/collective_perf.h"

#include "bench/report/child_process.h"
#include "nlohmann/json.hpp"
#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton::bench {
namespace {

using nlohmann::json;
using testing::HasSubstr;

struct Ran {
  int status = -1;
  std::string out;
  // Of the rows: columns of numbers and words.
  std::vector<std::vector<std::string>> rows;
};

// Runs a command in a process of its own.
Ran run(
    const std::string& command, std::vector<std::string> arguments,
    const std::function<void()>& prepare = [] {}) {
  arguments.insert(arguments.begin(), command);
  Ran ran;
  std::fflush(nullptr);  // what GoogleTest has not written yet would be written twice
  auto child = ChildProcess::fork(-1, [&](int out) {
    dup2(out, STDOUT_FILENO);
    prepare();
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    const int status = collective_perf_main(static_cast<int>(arguments.size()), argv.data());
    std::fflush(nullptr);
    return status;
  });
  if (!child.ok()) return ran;
  for (;;) {
    const auto line = child->read_line(patient(std::chrono::minutes(2)));
    if (!line.ok()) break;
    absl::StrAppend(&ran.out, *line, "\n");
    if (line->starts_with("#")) continue;
    std::istringstream words(*line);
    ran.rows.emplace_back(std::istream_iterator<std::string>(words),
                          std::istream_iterator<std::string>());
  }
  const auto status = child->wait(patient(std::chrono::minutes(2)));
  if (status.ok()) ran.status = *status;
  return ran;
}

TEST(CollectivePerf, EveryCollectiveIsRightInAndOutOfPlace) {
  const struct {
    const char* command;
    bool in_place;
    const char* largest = "100000";
    size_t rows = 3;
  } commands[] = {
      {"all_reduce_perf", true}, {"all_gather_perf", true}, {"reduce_scatter_perf", true},
      {"broadcast_perf", true},  {"reduce_perf", true},     {"alltoall_perf", false},
      {"sendrecv_perf", false},  {"gather_perf", true},     {"scatter_perf", true}};
  int number = 0;
  for (const auto& [command, in_place, largest, rows] : commands) {
    const Ran ran = run(command, {"--ranks", "3", "-b", "48", "-e", largest, "-f", "40", "-n", "3",
                                  "-c", "2", "--no-pin"});
    EXPECT_EQ(ran.status, 0) << ++number << ran.out;
    ASSERT_EQ(ran.rows.size(), rows) << number << ran.out;
    for (const auto& row : ran.rows) {
      ASSERT_EQ(row.size(), 13u) << ran.out;
      EXPECT_EQ(row[8], "0") << ran.out;
      EXPECT_EQ(row[12], in_place ? "0" : "N/A") << ran.out;
    }
    EXPECT_THAT(ran.out, HasSubstr("# Out of bounds values : 0 OK"));
  }
}

TEST(CollectivePerf, PutsIntoAWindowAreRight) {
  for (const char* provider : {"shm", "tcp"}) {
    const Ran ran = run("sendrecv_perf",
                        {"--ranks", "3", "-b", "8", "-e", "100000", "-f", "100", "-n", "5", "-m",
                         "3", "-c", "3", "--no-pin", "--window", "--provider", provider});
    EXPECT_EQ(ran.status, 0) << ran.out;
    ASSERT_EQ(ran.rows.size(), 3u) << ran.out;
    for (const auto& row : ran.rows) EXPECT_EQ(row[8], "0") << ran.out;
  }
}

TEST(CollectivePerf, GatherScatterAndHypercubeAreRightByAllRootsAndOptions) {
  const std::vector<std::string> variants[] = {{"-m", "3"}, {"--malloc", "-u", "3"}, {"-d", "all"}};
  for (const std::string command : {"gather_perf", "scatter_perf", "hypercube_perf"}) {
    const size_t roots = command == "hypercube_perf" ? 1 : 4;
    for (const std::vector<std::string>& variant : variants) {
      std::vector<std::string> arguments = {"-g", "4", "-b", "1K", "-e",      "1K",
                                            "-n", "2", "-r", "-1", "--no-pin"};
      arguments.insert(arguments.end(), variant.begin(), variant.end());
      const Ran ran = run(command, arguments);
      EXPECT_EQ(ran.status, 0) << ran.out;
      EXPECT_EQ(ran.rows.size(), roots * (variant[0] == "-d" ? kDataTypes : 1)) << ran.out;
      for (const auto& row : ran.rows) {
        ASSERT_EQ(row.size(), 13u) << ran.out;
        EXPECT_EQ(row[8] + row[12], "00") << ran.out;
      }
    }
  }
  EXPECT_EQ(run("hypercube_perf", {"-g", "3", "-b", "8", "-e", "8"}).status, 1);
}

// What cannot be measured is an error, and no verdict on what was not measured.
TEST(CollectivePerf, AnErrorComesWithoutAVerdict) {
  const Ran ran = run("all_reduce_perf", {"-g", "1", "-b", "1024T", "-n", "1", "--no-pin"});
  EXPECT_EQ(ran.status, 1) << ran.out;
  EXPECT_THAT(ran.out, testing::Not(HasSubstr("Out of bounds values")));
}

TEST(CollectivePerf, EveryTypeAndOperation) {
  const Ran ran = run("all_reduce_perf", {"--ranks", "2", "-b", "4000", "-e", "4000", "-n", "2",
                                          "-d", "all", "-o", "all", "--no-pin"});
  EXPECT_EQ(ran.status, 0) << ran.out;
  // 6 types of floats, 6 of integers, bool.
  EXPECT_EQ(ran.rows.size(), 6u * 6 + 6 * 9 + 7) << ran.out;
}

TEST(CollectivePerf, OptionsChangeHowItRunsAndNotWhatComesOut) {
  const std::vector<std::vector<std::string>> variants = {
      {"--provider", "tcp"}, {"--malloc", "-u", "3"},
      {"-m", "4"},           {"-z", "1", "-I", "1"},
      {"-z", "3"},           {"--ordered", "-N", "2"},
      {"-C", "1"},           {"--explain", "-S", "1"},
      {"-a", "0"},           {"--algorithm", "ring", "--channels", "1", "--chunk", "4K"}};
  for (const std::vector<std::string>& variant : variants) {
    std::vector<std::string> arguments = {"--ranks", "2",  "-b", "20000",   "-e",
                                          "20000",   "-n", "3",  "--no-pin"};
    arguments.insert(arguments.end(), variant.begin(), variant.end());
    const Ran ran = run("all_reduce_perf", arguments);
    EXPECT_EQ(ran.status, 0) << variant[0] << ran.out;
    EXPECT_THAT(ran.out, HasSubstr("values : 0 OK")) << variant[0];
  }
}

TEST(CollectivePerf, WritesBothFiles) {
  const TemporaryFolder folder;
  const std::string ours = folder.path("rows.jsonl"), theirs = folder.path("nccl.json");
  const Ran ran = run("all_gather_perf", {"--ranks", "2", "-b", "1K", "-e", "2K", "-f", "2", "-n",
                                          "2", "--no-pin", "--json", ours, "-J", theirs});
  ASSERT_EQ(ran.status, 0) << ran.out;
  std::ifstream lines(ours);
  int rows = 0;
  for (std::string line; std::getline(lines, line); ++rows) {
    const json row = json::parse(line, nullptr, false);
    ASSERT_TRUE(row.is_object()) << line;
    EXPECT_EQ(row["verified"], true);
    EXPECT_FALSE(row["route"].get<std::string>().empty());
  }
  EXPECT_EQ(rows, 4);  // two sizes, in and out of place
  std::ifstream file(theirs);
  const json document = json::parse(file, nullptr, false);
  ASSERT_TRUE(document.is_object());
  EXPECT_EQ(document["results"].size(), 2u);
  EXPECT_EQ(document["config"]["devices"].size(), 2u);
  EXPECT_EQ(document["out_of_bounds"]["count"], 0);
}

TEST(CollectivePerf, OneRankFromTheEnvironment) {
  const Ran ran = run("all_reduce_perf", {"-b", "64", "-e", "64", "-n", "2", "--no-pin"}, [] {
    setenv("BATON_RANK", "0", 1);
    setenv("BATON_RANKS", "1", 1);
  });
  EXPECT_EQ(ran.status, 0) << ran.out;
  EXPECT_EQ(ran.rows.size(), 1u) << ran.out;
}

TEST(CollectivePerf, FailureIsAnExitStatus) {
  const std::vector<std::string> base = {"--ranks", "2",  "-b", "64",      "-e",
                                         "64",      "-n", "2",  "--no-pin"};
  // Faster than any machine.
  EXPECT_EQ(run("all_reduce_perf", base, [] { setenv("NCCL_TESTS_MIN_BW", "1e9", 1); }).status, 1);
  EXPECT_EQ(run("all_reduce_perf", {"--ranks", "2", "-g", "8"}).status, 2);
  std::vector<std::string> unwritable = base;
  unwritable.insert(unwritable.end(), {"--json", "/nonexistent/rows"});
  EXPECT_EQ(run("all_reduce_perf", unwritable).status, 2);
}

}  // namespace
}  // namespace baton::bench
