// The collective benchmarks as a user runs them: every collective, both files, exit statuses.
#include "collectives/types.h"
#include "tests/bench/command.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton::bench {
namespace {

using testing::HasSubstr;

// It ends well with so many rows, of which none has a wrong element; `in_place`: nor there.
void expect_right(const std::string& arguments, size_t rows, bool in_place = true) {
  SCOPED_TRACE(arguments);
  const Ended ended = baton(arguments + " --no-pin");
  SCOPED_TRACE(ended.output);
  EXPECT_EQ(ended.status, 0);
  EXPECT_THAT(ended.output, HasSubstr("# Out of bounds values : 0 OK"));
  const std::vector<std::vector<std::string>> table = table_rows(ended.output);
  EXPECT_EQ(table.size(), rows);
  for (const std::vector<std::string>& row : table) {
    ASSERT_EQ(row.size(), 13u);
    EXPECT_EQ(row[8], "0");
    EXPECT_EQ(row[12], in_place ? "0" : "N/A");
  }
}

TEST(CollectivePerf, EveryCollectiveIsRightInAndOutOfPlace) {
  for (const std::string command :
       {"all_reduce_perf", "all_gather_perf", "reduce_scatter_perf", "broadcast_perf",
        "reduce_perf", "alltoall_perf", "sendrecv_perf", "gather_perf", "scatter_perf"}) {
    expect_right(command + " --ranks 3 -b 48 -e 100000 -f 40 -n 3 -c 2", 3,
                 command != "alltoall_perf" && command != "sendrecv_perf");
  }
}

TEST(CollectivePerf, PutsIntoAWindowAreRight) {
  for (const std::string provider : {"shm", "tcp"}) {
    expect_right(
        "sendrecv_perf --ranks 3 -b 8 -e 100000 -f 100 -n 5 -m 3 -c 3 --window --provider " +
            provider,
        3, false);
  }
}

TEST(CollectivePerf, GatherScatterAndHypercubeAreRightByAllRootsAndOptions) {
  for (const std::string command : {"gather_perf", "scatter_perf", "hypercube_perf"}) {
    const size_t roots = command == "hypercube_perf" ? 1 : 4;
    const std::string line = command + " -g 4 -b 1K -e 1K -n 2 -r -1 ";
    expect_right(line + "-m 3", roots);
    expect_right(line + "--malloc -u 3", roots);
    expect_right(line + "-d all", roots * kDataTypes);
  }
  EXPECT_EQ(baton("hypercube_perf -g 3 -b 8 -e 8 --no-pin").status, 1);
}

// What cannot be measured is an error, and no verdict on what was not measured.
TEST(CollectivePerf, AnErrorComesWithoutAVerdict) {
  const Ended ended = baton("all_reduce_perf -g 1 -b 1024T -n 1 --no-pin");
  EXPECT_EQ(ended.status, 1) << ended.output;
  EXPECT_THAT(ended.output, testing::Not(HasSubstr("Out of bounds values")));
}

TEST(CollectivePerf, EveryTypeAndOperation) {
  // 6 types of floats, 6 of integers, bool.
  expect_right("all_reduce_perf --ranks 2 -b 4000 -e 4000 -n 2 -d all -o all", 6 * 6 + 6 * 9 + 7);
}

TEST(CollectivePerf, OptionsChangeHowItRunsAndNotWhatComesOut) {
  for (const std::string variant :
       {"--provider tcp", "--malloc -u 3", "-m 4", "-z 1 -I 1", "-z 3", "--ordered -N 2", "-C 1",
        "--explain -S 1", "-a 0", "--algorithm ring --channels 1 --chunk 4K"}) {
    const Ended ended =
        baton("all_reduce_perf --ranks 2 -b 20000 -e 20000 -n 3 --no-pin " + variant);
    EXPECT_EQ(ended.status, 0) << variant << ended.output;
    EXPECT_THAT(ended.output, HasSubstr("values : 0 OK")) << variant;
  }
}

TEST(CollectivePerf, WritesBothFiles) {
  const TemporaryFolder folder;
  const std::string ours = folder.path("rows.jsonl"), theirs = folder.path("nccl.json");
  expect_right("all_gather_perf --ranks 2 -b 1K -e 2K -f 2 -n 2 --json " + ours + " -J " + theirs,
               2);
  const std::vector<Json> rows = rows_in(ours);
  EXPECT_EQ(rows.size(), 4u);  // two sizes, in and out of place
  for (const Json& row : rows) {
    ASSERT_TRUE(row.is_object());
    EXPECT_EQ(row["verified"], true);
    EXPECT_FALSE(row["route"].get<std::string>().empty());
  }
  std::ifstream file(theirs);
  const Json document = Json::parse(file, nullptr, false);
  ASSERT_TRUE(document.is_object());
  EXPECT_EQ(document["results"].size(), 2u);
  EXPECT_EQ(document["config"]["devices"].size(), 2u);
  EXPECT_EQ(document["out_of_bounds"]["count"], 0);
}

TEST(CollectivePerf, OneRankFromTheEnvironment) {
  const Ended ended =
      script("BATON_RANK=0 BATON_RANKS=1 exec \"$0\" all_reduce_perf -b 64 -e 64 -n 2 --no-pin");
  EXPECT_EQ(ended.status, 0) << ended.output;
  EXPECT_EQ(table_rows(ended.output).size(), 1u) << ended.output;
}

TEST(CollectivePerf, FailureIsAnExitStatus) {
  const std::string line = "all_reduce_perf --ranks 2 -b 64 -e 64 -n 2 --no-pin";
  // Faster than any machine.
  EXPECT_EQ(script("NCCL_TESTS_MIN_BW=1e9 exec \"$0\" " + line).status, 1);
  EXPECT_EQ(baton("all_reduce_perf --ranks 2 -g 8").status, 2);
  EXPECT_EQ(baton(line + " --json /nonexistent/rows").status, 2);
}

}  // namespace
}  // namespace baton::bench
