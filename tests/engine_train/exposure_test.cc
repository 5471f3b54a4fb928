// Overlap recomputed from traces, and the drawing of the loss.
#include "engine/train/exposure.h"

#include <nlohmann/json.hpp>

#include "tests/engine_train/train_fixture.h"
#include "tests/test.h"

namespace baton::engine::train {
namespace {

Span span(std::string_view track, int begin_us, int end_us, uint64_t bytes = 0) {
  using std::chrono::microseconds;
  return {track, "x", microseconds(begin_us), microseconds(end_us), 1, bytes};
}

TEST(Exposure, CountsWaitingDuringCommunicationOnly) {
  Timeline timeline("rank 0");
  timeline.add(span(kComputeTrack, 0, 100));
  timeline.add(span(kCommunicationTrack, 50, 120, 1000));
  timeline.add(span(kCommunicationTrack, 60, 150, 500));  // in flight together
  timeline.add(span(kWaitTrack, 100, 120));
  timeline.add(span(kWaitTrack, 120, 150));
  timeline.add(span(kComputeTrack, 150, 200));
  timeline.add(span(kWaitTrack, 300, 400));  // for nothing that was in flight
  const auto exposure = must(measure_exposure(timeline.to_json()));
  EXPECT_EQ(exposure.ranks, 1u);
  EXPECT_EQ(exposure.calls, 2u);
  EXPECT_EQ(exposure.bytes, 1500u);
  EXPECT_DOUBLE_EQ(exposure.communication_us, 100);
  EXPECT_DOUBLE_EQ(exposure.exposed_us, 50);
  EXPECT_DOUBLE_EQ(exposure.compute_us, 150);
  EXPECT_DOUBLE_EQ(exposure.efficiency(), 0.5);
}

TEST(Exposure, AddsRanksOfAJoinedTrace) {
  std::vector<std::string> traces;
  for (int rank : {0, 1}) {
    Timeline timeline("rank");
    timeline.add(span(kComputeTrack, 0, 100));
    timeline.add(span(kCommunicationTrack, 50, 150));
    timeline.add(span(kWaitTrack, 100, rank == 0 ? 150 : 110));
    nlohmann::json trace = nlohmann::json::parse(timeline.to_json());
    for (nlohmann::json& event : trace["traceEvents"]) event["pid"] = 100 + rank;
    traces.push_back(trace.dump());
  }
  const auto joined = must(join_traces(traces));
  const auto exposure = must(measure_exposure(joined));
  EXPECT_EQ(exposure.ranks, 2u);
  EXPECT_DOUBLE_EQ(exposure.communication_us, 200);
  EXPECT_DOUBLE_EQ(exposure.exposed_us, 60);
}

TEST(Exposure, RefusesWhatIsNoTimelineOfATrainer) {
  for (const char* text : {"", "[]", "{}", "{\"traceEvents\": 1}", "{\"traceEvents\": []}",
                           "{\"traceEvents\":[{\"ph\":\"X\",\"cat\":\"compute\",\"ts\":-1}]}",
                           "{\"traceEvents\":[{\"ph\":\"X\",\"cat\":\"wait\",\"dur\":\"x\"}]}"}) {
    EXPECT_EQ(measure_exposure(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
  EXPECT_FALSE(join_traces({"{\"traceEvents\":[]}", "nothing"}).ok());
}

TEST(Exposure, CountsEveryCallAndByteOfARun) {
  constexpr int kSteps = 3;
  std::string traces[2];
  run_ranks(2, [&](Communicator* comm, int rank) {
    Timeline timeline("rank");
    TrainerOptions options = tiny_options(kSteps);
    options.parallel.zero = 1;
    ComputePool pool(1);
    auto trainer = must(Trainer::create(options, TinyText::get().corpus, pool, comm, &timeline));
    for (int step = 0; step < kSteps; ++step) {
      const auto report = must(trainer->step(step));
      EXPECT_LE(report.exposed, report.took);
    }
    trainer.reset();  // waits for the last weights, which no step counts
    traces[rank] = timeline.to_json();
  });
  const ParameterMap map(tiny_options(kSteps).model);
  const std::vector<FlatRange> buckets = cut_buckets(map, 2, 0);
  const size_t elements = buckets.back().end;
  // Gradients and weights; then one loss and half of the norm's blocks.
  const size_t bytes =
      2 * elements * sizeof(float) + (1 + elements / kNormBlock / 2) * sizeof(double);
  for (int rank : {0, 1}) {
    const auto exposure = must(measure_exposure(traces[rank]));
    EXPECT_EQ(exposure.calls, kSteps * (2 * buckets.size() + 1));
    EXPECT_EQ(exposure.bytes, kSteps * bytes);
    EXPECT_LE(exposure.exposed_us, exposure.communication_us);
    EXPECT_GT(exposure.compute_us, 0);
  }
}

}  // namespace
}  // namespace baton::engine::train
