// `baton kv_file_bw` as a user runs it: rows that are checked, beside fio where there is one.
#include "tests/bench/command.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton::bench {
namespace {

using testing::HasSubstr;

// Where a file system has no O_DIRECT there is nothing to compare, and the command says so.
bool no_direct_reads(const Ended& ended) {
  return ended.output.find("cannot be read past the page cache") != std::string::npos;
}

TEST(KvFileBw, TinyRunsAreCheckedAndWrittenAsJson) {
  const TemporaryFolder folder;
  for (const std::string reader : {"", " --no-io-uring"}) {
    const std::string path = folder.path("rows.jsonl"), at = folder.path("files");
    const Ended ended = baton("kv_file_bw --bytes 2M --record-bytes 64K --rounds 3 --directory " +
                              at + reader + " --json " + path);
    if (no_direct_reads(ended)) GTEST_SKIP() << ended.output;
    ASSERT_EQ(ended.status, 0) << ended.output;
    EXPECT_THAT(ended.output, HasSubstr("sums checked"));
    const std::vector<Json> rows = rows_in(path);
    ASSERT_EQ(rows.size(), 2u);
    for (const Json& row : rows) {
      EXPECT_EQ(row["params"]["record_bytes"], 64 << 10);
      EXPECT_EQ(row["params"]["records"], 32);
      EXPECT_EQ(row["repetitions"], 3);
      EXPECT_EQ(row["verified"], true);
      EXPECT_GT(row["GB_per_s"].get<double>(), 0);
      // fio is asked, or it is said why not.
      EXPECT_NE(row.contains("floor"), ended.output.find("without fio: ") != std::string::npos)
          << ended.output;
    }
    // The file is gone.
    EXPECT_TRUE(std::filesystem::is_empty(at));
  }
}

TEST(KvFileBw, BadSizesExitWithTwo) {
  for (const std::string wrong : {"--record-bytes 5000", "--record-bytes 4K", "--rounds 0",
                                  "--bytes 64K --record-bytes 128K", "--directory /dev/null/x"}) {
    EXPECT_EQ(baton("kv_file_bw " + wrong).status, 2) << wrong;
  }
  EXPECT_THAT(baton("kv_file_bw --record-bytes 5000").output, HasSubstr("is a multiple of 4K"));
}

}  // namespace
}  // namespace baton::bench
