// Figures of answers that are known, and the table of them.
#include "engine/load/load.h"
#include "tests/test.h"

namespace baton::engine::load {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using testing::HasSubstr;
using testing::Not;

// The first token after `first` ms, then one each `gap` ms.
Answer answered(int first, int gap, size_t tokens) {
  Answer answer{
      .first = milliseconds(first), .end = milliseconds(first), .input = 10, .output = tokens};
  for (size_t i = 1; i < tokens; ++i) {
    answer.gaps.emplace_back(milliseconds(gap));
    answer.end += milliseconds(gap);
  }
  return answer;
}

LoadResult three() {
  LoadResult result{.answers = {answered(10, 5, 3), answered(30, 20, 5), Answer{.error = "cut"}},
                    .duration = std::chrono::seconds(2),
                    .most_open = 2};
  result.answers[1].cached = 4;
  return result;
}

TEST(LoadReport, CountsWhatIsWholeAndNothingElse) {
  const json report = report_of(three(), {.percentiles = {50, 99.9}});
  EXPECT_EQ(report["completed"], 2);
  EXPECT_EQ(report["failed"], 1);
  EXPECT_EQ(report["total_input_tokens"], 20);
  EXPECT_EQ(report["total_output_tokens"], 8);
  EXPECT_EQ(report["total_cached_tokens"], 4);
  EXPECT_DOUBLE_EQ(report["request_throughput"], 1);
  EXPECT_DOUBLE_EQ(report["output_throughput"], 4);
  EXPECT_DOUBLE_EQ(report["total_token_throughput"], 14);
  EXPECT_EQ(report["max_concurrent_requests"], 2);
  EXPECT_DOUBLE_EQ(report["mean_ttft_ms"], 20);
  EXPECT_DOUBLE_EQ(report["std_ttft_ms"], 10);
  EXPECT_DOUBLE_EQ(report["p50_ttft_ms"], 20);
  EXPECT_NEAR(report["p99.9_ttft_ms"], 29.98, 1e-9);
  EXPECT_DOUBLE_EQ(report["mean_tpot_ms"], 12.5);
  EXPECT_DOUBLE_EQ(report["median_itl_ms"], 20);  // 5 5 20 20 20 20
  EXPECT_NEAR(report["mean_itl_ms"], 15, 1e-9);
  EXPECT_DOUBLE_EQ(report["mean_e2el_ms"], 65);  // 20 and 110
  EXPECT_FALSE(report.contains("ttfts"));
}

TEST(LoadReport, DetailsAreOfEveryRequest) {
  const json report = report_of(three(), {.detailed = true});
  EXPECT_EQ(report["output_lens"], json({3, 5, 0}));
  EXPECT_EQ(report["errors"], json({"", "", "cut"}));
  EXPECT_DOUBLE_EQ(report["ttfts"][1], 0.03);
  EXPECT_EQ(report["itls"][0], json({0.005, 0.005}));
}

TEST(LoadReport, NothingAnsweredIsNoNumberThatCannotBe) {
  LoadResult result{.answers = {Answer{.error = "refused"}}, .duration = milliseconds(1)};
  const json report = report_of(result, {});
  EXPECT_EQ(report["completed"], 0);
  EXPECT_EQ(report["mean_ttft_ms"], 0);
  EXPECT_EQ(report["std_itl_ms"], 0);
  EXPECT_EQ(report_of({}, {})["request_throughput"], 0);
}

TEST(LoadReport, RoundsAreOneBehindTheOther) {
  std::vector<LoadResult> rounds;
  rounds.push_back(three());
  rounds.push_back(three());
  rounds[1].most_open = 3;
  const LoadResult all = joined(std::move(rounds));
  EXPECT_EQ(all.answers.size(), 6u);
  EXPECT_EQ(all.duration, std::chrono::seconds(4));
  EXPECT_EQ(all.most_open, 3u);
  EXPECT_EQ(all.answers[3].sent, std::chrono::seconds(2));
}

TEST(LoadReport, TheTableHasAColumnAndARatioForEachBaseline) {
  const ReportOptions options;
  LoadResult slow = three();
  slow.duration *= 2;
  const std::string one = table_of({{"ours", report_of(three(), options)}}, options);
  EXPECT_THAT(one, Not(HasSubstr("ours")));
  EXPECT_THAT(one, HasSubstr("Successful requests:"));
  EXPECT_THAT(one, Not(HasSubstr("KV")));
  EXPECT_THAT(one, HasSubstr("P99 ITL (ms):"));
  const std::string two = table_of(
      {{"ours", report_of(three(), options)}, {"theirs", report_of(slow, options)}}, options);
  EXPECT_THAT(two, HasSubstr("theirs"));
  EXPECT_THAT(two, HasSubstr("0.50x"));
  for (size_t at = 0, end; (end = two.find('\n', at)) != std::string::npos; at = end + 1) {
    EXPECT_LE(end - at, 100u);
  }
}

TEST(LoadReport, MalformedPercentilesAreRefused) {
  EXPECT_EQ(*parse_percentiles("50,99.9"), (std::vector<double>{50, 99.9}));
  for (const char* wrong : {"", "0", "101", "50,", "p50", "nan"}) {
    EXPECT_FALSE(parse_percentiles(wrong).ok()) << wrong;
  }
}

}  // namespace
}  // namespace baton::engine::load
