// Tickets of layers: each is told once, in its step, and a layer that was left out or overtaken is
// an error.
#include "gpudirect/layer_tickets.h"

#include "tests/gpudirect/fake/with_device.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"
#include "transport/base/limits/memory_left.h"

namespace baton::gpudirect {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

class LayerTicketsTest : public WithDevice {
 protected:
  static constexpr uint32_t kLayers = 3;
  ~LayerTicketsTest() override { fake_.run_all(); }
  Stream stream() const { return device_->stream(Direction::kBetween); }
  // What a graph of a step does when it is replayed; `without` is left out.
  void replay(uint32_t without = kLayers) {
    ASSERT_TRUE(tickets_->begin(stream()).ok());
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      if (layer != without) {
        ASSERT_TRUE(tickets_->mark(stream(), layer).ok());
      }
    }
  }
  absl::StatusOr<size_t> poll() {
    return tickets_->poll([&](uint64_t step, uint32_t layer) { told_.emplace_back(step, layer); });
  }

  std::unique_ptr<LayerTickets> tickets_ = *LayerTickets::open(*device_, *launcher_, kLayers);
  std::vector<std::pair<uint64_t, uint32_t>> told_;
};

TEST_F(LayerTicketsTest, EachLayerOfEachStepIsToldOnceWhenItIsDone) {
  ASSERT_EQ(*poll(), 0u);
  for (uint64_t step = 1; step <= 3; ++step) {
    replay();
    EXPECT_EQ(*poll(), 0u) << "nothing has run";
    fake_.run(1);  // begin()
    EXPECT_EQ(*poll(), 0u);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      fake_.run(1);
      EXPECT_EQ(*poll(), 1u);
      EXPECT_EQ(told_.back(), std::make_pair(step, layer));
      EXPECT_EQ(*poll(), 0u);
    }
  }
  EXPECT_EQ(told_.size(), 3 * kLayers);
}

TEST_F(LayerTicketsTest, ALayerThatWasLeftOutIsAnErrorOfTheNextStep) {
  replay(1);
  fake_.run_all();
  EXPECT_EQ(*poll(), kLayers - 1);
  replay();
  fake_.run_all();
  const auto polled = poll();
  EXPECT_EQ(polled.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(polled.status().message()),
              HasSubstr("step 2 has begun, but in step 1 these layers were not reported: 1"));
  told_.clear();
  EXPECT_EQ(*poll(), kLayers);
  EXPECT_THAT(told_, ElementsAre(Pair(2, 0), Pair(2, 1), Pair(2, 2)));
}

TEST_F(LayerTicketsTest, WhatTheNextStepMayOverwriteIsNotTold) {
  replay();
  fake_.run_all();
  replay();
  fake_.run(1);  // the next one has begun, and marked nothing yet
  const auto polled = poll();
  EXPECT_EQ(polled.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(told_, IsEmpty());
  EXPECT_EQ(*poll(), 0u) << "the tickets of the step before count for nothing";
  fake_.run_all();
  EXPECT_EQ(*poll(), kLayers);
}

TEST_F(LayerTicketsTest, AnUnannouncedStepIsAnError) {
  replay();
  fake_.run_all();
  EXPECT_EQ(*poll(), kLayers);
  for (int i = 0; i < 2; ++i) replay();
  fake_.run_all();
  EXPECT_EQ(poll().status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(*poll(), kLayers);
  EXPECT_EQ(told_.back().first, 3u);
}

TEST_F(LayerTicketsTest, AStepThatFailedCanBeForgotten) {
  ASSERT_TRUE(tickets_->begin(stream()).ok());
  ASSERT_TRUE(tickets_->mark(stream(), 0).ok());
  fake_.run_all();
  tickets_->forget_steps();
  EXPECT_EQ(*poll(), 0u);
  replay();
  fake_.run_all();
  EXPECT_EQ(*poll(), kLayers);
  EXPECT_THAT(told_, ElementsAre(Pair(2, 0), Pair(2, 1), Pair(2, 2)));
}

// Who waits for layers asks nothing else of the device: he would wait for ever.
TEST_F(LayerTicketsTest, ALostDeviceEndsTheWait) {
  replay();
  fake_.run(2);  // begin(), and the first layer
  fake_.lose();
  EXPECT_EQ(*poll(), 1u) << "what was done is told";
  absl::Status status;
  for (int i = 0; i < 10'000 && status.ok(); ++i) status = poll().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("CUDA device 0 is lost"));
  EXPECT_EQ(poll().status(), device_->alive());
}

TEST_F(LayerTicketsTest, BadLayersAndErrorsLeaveNothingBehind) {
  EXPECT_EQ(tickets_->mark(stream(), kLayers).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(LayerTickets::open(*device_, *launcher_, 0).ok());
  // Of a machine with 1,000 MiB: refused before any of it is taken.
  TemporaryFolder machine;
  machine.file("proc/meminfo", "MemAvailable: 1024000 kB");
  base::look_for_memory_below(machine.path());
  EXPECT_EQ(LayerTickets::open(*device_, *launcher_, UINT32_MAX).status().code(),
            absl::StatusCode::kResourceExhausted);
  base::look_for_memory_below("");
  for (uint64_t k = 1; k <= 12; ++k) {
    fake_.fail_call_in(k, kOutOfMemory);
    LayerTickets::open(*device_, *launcher_, kLayers).IgnoreError();
    fake_.fail_call_in(0, kSuccess);
  }
}

}  // namespace
}  // namespace baton::gpudirect
