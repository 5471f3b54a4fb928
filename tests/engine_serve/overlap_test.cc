// The overlap checker, on timelines whose answer is known.
#include "engine/demo/demo_report.h"

#include "engine/files/trace_spans.h"
#include "tests/test.h"
#include "transport/timeline.h"

namespace baton::engine::serve {
namespace {

using std::chrono::microseconds;

TEST(Overlap, Intervals) {
  const auto a = merged({{5, 7}, {0, 2}, {1, 3}, {7, 8}});
  ASSERT_EQ(a.size(), 2u);
  EXPECT_EQ(a[0].end, 3);
  EXPECT_EQ(a[1].end, 8);
  EXPECT_EQ(length_us(a), 6);
  EXPECT_EQ(overlap_us(a, merged({{2, 6}, {7.5, 20}})), 1 + 1 + 0.5);
  EXPECT_EQ(overlap_us(a, {}), 0);
}

TEST(Overlap, LayerwiseStream) {
  Timeline timeline("prefill");
  const auto span = [&](const char* track, int begin, int end, uint64_t request, uint64_t bytes) {
    timeline.add({.track = track,
                  .name = "x",
                  .begin = microseconds(begin),
                  .end = microseconds(end),
                  .request = request,
                  .bytes = bytes});
  };
  // Two layers of 100 us; each layer's KV takes 50 us and leaves 20 us before the layer's end.
  span("compute", 0, 100, 7, 0);
  span("compute", 100, 200, 7, 0);
  span("transfer", 80, 130, 7, 1000);
  span("transfer", 180, 230, 7, 1000);
  span("step", 0, 1000, 7, 0);      // not a computation of its own
  span("compute", 200, 300, 8, 0);  // another request's
  const auto overlap = demo::measure_overlap(timeline.to_json());
  ASSERT_TRUE(overlap.ok()) << overlap.status();
  EXPECT_DOUBLE_EQ(overlap->transfer_us, 100);
  EXPECT_DOUBLE_EQ(overlap->hidden_us, 50 + 20);
  EXPECT_DOUBLE_EQ(overlap->hidden_share(), 0.7);
  EXPECT_EQ(overlap->bytes, 2000u);
  EXPECT_EQ(overlap->requests, 1u);
}

TEST(Overlap, ASerializedTransferOverlapsNothing) {
  Timeline timeline("prefill");
  timeline.add({.track = "compute", .begin = microseconds(0), .end = microseconds(10)});
  timeline.add({.track = "transfer", .begin = microseconds(10), .end = microseconds(20)});
  EXPECT_EQ(demo::measure_overlap(timeline.to_json())->hidden_share(), 0);
}

TEST(Overlap, BadTimelinesAreErrors) {
  for (const char* text : {"", "[]", "{}", R"({"traceEvents":5})",
                           R"({"traceEvents":[{"ph":"X","cat":"compute","ts":"now"}]})",
                           R"({"traceEvents":[{"ph":"X","cat":"transfer","dur":-1}]})"}) {
    EXPECT_EQ(demo::measure_overlap(text).status().code(), absl::StatusCode::kInvalidArgument)
        << text;
  }
  EXPECT_TRUE(demo::measure_overlap(R"({"traceEvents":[5,{"ph":"M"},{"ph":7}]})").ok());
}

}  // namespace
}  // namespace baton::engine::serve
