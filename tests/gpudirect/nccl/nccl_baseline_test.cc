// The baseline that asks NCCL, as the program it is: over libraries that stand for CUDA's driver,
// of two devices, and for NCCL.
#include "absl/strings/str_split.h"
#include "bench/report/child_process.h"
#include "bench/report/report.h"
#include "tests/test.h"

namespace baton::bench {
namespace {

std::vector<Json> rows_of(const std::string& arguments) {
  std::vector<std::string> argv = {NCCL_BASELINE};
  for (const auto word : absl::StrSplit(arguments, ' ')) argv.emplace_back(word);
  const auto output =
      output_of(-1, argv, {{"LD_LIBRARY_PATH", LIBRARY_FOLDERS}}, std::chrono::seconds(60));
  EXPECT_TRUE(output.ok()) << output.status();
  std::vector<Json> rows;
  const std::vector<std::string> lines =
      absl::StrSplit(output.value_or(""), '\n', absl::SkipEmpty());
  for (const std::string& line : lines) rows.push_back(Json::parse(line, nullptr, false));
  return rows;
}

TEST(NcclBaseline, TimesEveryCollectiveAndLooksAtWhatItGave) {
  for (const char* collective :
       {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all"}) {
    const std::vector<Json> rows =
        rows_of(absl::StrCat("2 ", collective, " default f32 sum 1 3 1 64 1000"));
    ASSERT_EQ(rows.size(), 2u) << collective;
    EXPECT_EQ(rows[0]["count"], 64) << collective << rows[0];
    EXPECT_EQ(rows[1]["count"], 1000) << collective << rows[1];
    EXPECT_GT(rows[1]["us"]["p50"], 0) << collective;
  }
}

// The stand-in sums floats alone.
TEST(NcclBaseline, WhatIsWrongIsNoFigure) {
  const std::vector<Json> rows = rows_of("2 all_reduce default f64 sum 0 3 1 64");
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0]["missing"], "NCCL's all_reduce is wrong at rank 0");
}

TEST(NcclBaseline, SaysWhyThereAreNoFigures) {
  const auto why = [](const std::string& arguments) {
    const std::vector<Json> rows = rows_of(arguments);
    return rows.size() == 1 ? rows[0].value("missing", "") : "";
  };
  EXPECT_EQ(why("3 all_reduce default f32 sum 0 3 1 64"),
            "2 GPUs for 3 ranks: NCCL needs one per rank");
  EXPECT_EQ(why("2 send_receive default f32 sum 0 3 1 64"), "NCCL is not measured by send_receive");
}

}  // namespace
}  // namespace baton::bench
