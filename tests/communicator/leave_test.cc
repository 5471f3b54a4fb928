// A rank that leaves while what it sent is still on its way.
#include "tests/communicator/group.h"
#include "tests/until.h"

namespace baton {
namespace {

// Promise(collectives): What a finished call left under way arrives although its sender leaves | up
//   to 4 KiB is copied; leaving waits for acknowledgements, 60 s at most
TEST(Leave, WhatACallLeftOnItsWayArrives) {
  ManualClock clock;
  std::atomic<bool> leaving{false};
  CommunicatorOptions options = test_options("tcp");
  options.worker.clock = &clock;
  run_group(2, options, [&](Communicator& comm) {
    ASSERT_TRUE(comm.barrier().ok());
    float value = comm.rank() == 0 ? 7.0f : 0.0f;
    if (comm.rank() == 1) {
      // Busy with something else, for longer than goodbyes are waited for.
      until([&] { return leaving.load(); });
      for (int i = 0; i < 600; ++i) {
        clock.advance(std::chrono::milliseconds(1));
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    const absl::Status status = comm.broadcast(&value, &value, 1, DataType::kF32, 0);
    EXPECT_TRUE(status.ok()) << "rank " << comm.rank() << ": " << status;
    EXPECT_EQ(value, 7.0f);
    // Over for rank 0 as soon as its message was sent.
    if (comm.rank() == 0) leaving = true;
  });
}

}  // namespace
}  // namespace baton
