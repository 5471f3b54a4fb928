// CUDA graphs over the fake: what was recorded runs at each launch, with what memory holds then.
#include "gpudirect/launcher.h"

#include "gpudirect/device_memory.h"
#include "gpudirect/layer_tickets.h"
#include "tests/fails_with.h"
#include "tests/gpudirect/fake/with_device.h"
#include "tests/test.h"

namespace baton::gpudirect {
namespace {

class StreamGraphTest : public WithDevice {
 protected:
  Stream stream() const { return device_->stream(Direction::kBetween); }
  DevicePointer at(size_t offset) const { return slab_->span().data + offset; }
  void put(size_t offset, const std::vector<float>& values) {
    write_floats(fake_, at(offset), values);
  }
  std::vector<float> get(size_t offset, size_t count) {
    return read_floats(fake_, at(offset), count);
  }
  // target = target + source, of four numbers.
  absl::Status add() const {
    kernels::ReduceSum sum{.target = pointer_of<void>(at(0)), .count = 4, .source_count = 2};
    sum.sources[0] = pointer_of<const void>(at(0));
    sum.sources[1] = pointer_of<const void>(at(256));
    return launcher_->reduce_sum(sum, 1, stream());
  }
  absl::Status launch(const StreamGraph& graph) {
    const Device::Current current(*device_);
    return graph.launch(stream());
  }

  std::unique_ptr<DeviceSlab> slab_ = *DeviceSlab::create(*device_, kMiB);
};

TEST_F(StreamGraphTest, RunsAtEachLaunchWithWhatMemoryHoldsThen) {
  put(0, {0, 0, 0, 0});
  put(256, {1, 2, 3, 4});
  const auto graph = must(StreamGraph::record(*device_, stream(), [&] { return add(); }));
  EXPECT_EQ(fake_.queued(), 0u) << "what was recorded does not run";
  ASSERT_TRUE(launch(*graph).ok());
  ASSERT_TRUE(launch(*graph).ok());
  fake_.run_all();
  EXPECT_EQ(get(0, 4), (std::vector<float>{2, 4, 6, 8}));
  put(256, {10, 10, 10, 10});
  ASSERT_TRUE(launch(*graph).ok());
  fake_.run_all();
  EXPECT_EQ(get(0, 4), (std::vector<float>{12, 14, 16, 18}));
}

TEST_F(StreamGraphTest, ItsLayersAreToldOfByTickets) {
  auto tickets = must(LayerTickets::open(*device_, *launcher_, 2));
  const auto graph = StreamGraph::record(*device_, stream(), [&] {
    absl::Status status = tickets->begin(stream());
    for (uint32_t layer = 0; layer < 2 && status.ok(); ++layer) {
      status = add();
      if (status.ok()) status = tickets->mark(stream(), layer);
    }
    return status;
  });
  ASSERT_TRUE(graph.ok()) << graph.status();
  for (uint64_t step = 1; step <= 3; ++step) {
    ASSERT_TRUE(launch(**graph).ok());
    std::vector<uint32_t> told;
    while (fake_.queued() > 0) {
      fake_.run(1);
      ASSERT_TRUE((tickets)
                      ->poll([&](uint64_t of, uint32_t layer) {
                        EXPECT_EQ(of, step);
                        told.push_back(layer);
                        EXPECT_EQ(fake_.queued() > 0, layer == 0)
                            << "told when it was done, and not at the end";
                      })
                      .ok());
    }
    EXPECT_EQ(told, (std::vector<uint32_t>{0, 1}));
  }
}

TEST_F(StreamGraphTest, AFailedRecordingLeavesTheStreamAsItWas) {
  const auto failed = StreamGraph::record(*device_, stream(), [&] {
    EXPECT_TRUE(add().ok());
    return absl::InternalError("no more");
  });
  EXPECT_EQ(failed.status().message(), "no more");
  for (const char* call : {"cuStreamBeginCapture", "cuStreamEndCapture",
                           "cuGraphInstantiateWithFlags", "cuLaunchKernel"}) {
    fake_.fail_next(call, kOutOfMemory);
    EXPECT_FALSE(StreamGraph::record(*device_, stream(), [&] { return add(); }).ok()) << call;
    EXPECT_EQ(fake_.queued(), 0u);
  }
  put(0, {0, 0, 0, 0});
  put(256, {1, 1, 1, 1});
  {
    const Device::Current current(*device_);
    ASSERT_TRUE(add().ok());
  }
  EXPECT_EQ(fake_.queued(), 1u) << "the stream is not recorded any more";
  fake_.run_all();
  EXPECT_EQ(get(0, 1), (std::vector<float>{1}));
}

TEST(StreamGraph, ADriverWithoutGraphsSaysSo) {
  CleanDriver fake({.missing = {"cuGraphInstantiateWithFlags"}});
  const auto device = Device::open(FakeDriver::driver(), 0);
  const auto graph = StreamGraph::record(**device, (*device)->stream(Direction::kBetween),
                                         [] { return absl::OkStatus(); });
  EXPECT_THAT(graph.status(), fails_with(Code::kUnavailable, {"CUDA 11.4"}));
}

}  // namespace
}  // namespace baton::gpudirect
