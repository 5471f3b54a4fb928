// Plans of agents that requantise on a device, where a kernel runs for long, another agent is
// silent, or memory goes away: who waits for what, and what is lost with it.
#include <future>

#include "tests/gpudirect/agents/device_pair.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

using ::testing::HasSubstr;
using Of = Block::Of;

// From here on kernels run, as far as anybody can see, until end().
class EndlessKernels {
 public:
  explicit EndlessKernels(FakeDriver& fake) : fake_(fake) {
    fake_.fail_next("cuEventQuery", gpudirect::kNotReady, SIZE_MAX);
  }
  ~EndlessKernels() { end(); }
  EndlessKernels(const EndlessKernels&) = delete;
  EndlessKernels& operator=(const EndlessKernels&) = delete;
  void end() { fake_.fail_next("cuEventQuery", gpudirect::kSuccess, 0); }

 private:
  FakeDriver& fake_;
};

// A cache that a kernel is at is nobody else's yet, also when its transfer was aborted; and who
// asks whether it is does not wait for the kernel, nor hold up who asks the agent for other things.
TEST(RequantisingFences, ARunningKernelKeepsItsCacheAndDelaysNoCall) {
  InstalledFake driver(without_dma_buf(), with_kernels());
  {
    DevicePair pair(driver);
    const auto plan = pair.plan(pair.source.place);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const auto id = plan->make_transfer(*pair.a, pair.request());
    const uint64_t launched = driver.fake().calls_of("cuLaunchKernel");
    EndlessKernels kernels(driver.fake());
    ASSERT_TRUE(pair.a->post(*id).ok());
    run_agents(*pair.a, *pair.b,
               [&] { return driver.fake().calls_of("cuLaunchKernel") > launched; });
    Block& block = pair.source.block(0);
    const auto deregistered = [&] {
      auto status = std::async(std::launch::async, [&] {
        return pair.a->deregister_memory({block.whole()}, MemoryKind::kVram);
      });
      EXPECT_EQ(status.wait_for(patient(std::chrono::seconds(10))), std::future_status::ready)
          << "it waits for the kernel";
      if (HasFailure()) kernels.end();
      return status.get();
    };
    EXPECT_FALSE(*pair.a->local_free(*id));
    absl::Status status = deregistered();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;

    ASSERT_TRUE(pair.a->abort(*id).ok());
    EXPECT_FALSE(*pair.a->local_free(*id));
    status = deregistered();
    ASSERT_TRUE(absl::IsFailedPrecondition(status)) << status;
    status = pair.a->release(*id, Time::zero());
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;

    kernels.end();
    run_agents(*pair.a, *pair.b, [&] { return *pair.a->local_free(*id); });
    run_agents(*pair.a, *pair.b, [&] { return !pair.running(*id); });
    EXPECT_TRUE(absl::IsCancelled(pair.a->status(*id))) << pair.a->status(*id);
    EXPECT_TRUE(pair.a->release(*id).ok());
    block.take_back();
  }
  driver.expect_clean();
}

// However many transfers with an agent wait for its word, others go on: also those of the host.
TEST(RequantisingFences, ASilentPeerLeavesStagingMemoryForOthers) {
  for (const Of near : {Of::kDevice, Of::kHost}) {
    SCOPED_TRACE(near == Of::kHost ? "host" : "device");
    InstalledFake driver(without_dma_buf(), with_kernels());
    {
      DevicePair pair(driver, 128 << 10, Op::kWrite, near);
      const auto silent = device_agent("silent", "tcp");
      const DeviceCache there(*silent, driver, pair.of.target, Of::kHost);
      introduce(*pair.a, *silent);
      const auto plan = AgentKvPlan::make_requantising(*pair.a, Op::kWrite, pair.source.place,
                                                       "silent", there.place, pair.of.blocks.share);
      ASSERT_TRUE(plan.ok()) << plan.status();
      std::vector<AgentTransferId> waiting;
      for (int i = 0; i < 8; ++i) {
        waiting.push_back(*plan->make_transfer(*pair.a, pair.request()));
        ASSERT_TRUE(pair.a->post(waiting.back()).ok());
      }
      // As many as may have begun to travel.
      const auto travelling = [&] {
        return std::count_if(waiting.begin(), waiting.end(), [&](AgentTransferId id) {
          return pair.a->telemetry(id)->descriptors > 0;
        });
      };
      run_agents(*pair.a, *pair.a, [&] { return travelling() >= 3; });
      const CacheBytes want = pair.want();
      ASSERT_TRUE(pair.run().ok());
      EXPECT_TRUE(pair.target.bytes() == want);
      for (const AgentTransferId id : waiting) {
        EXPECT_TRUE(pair.running(id));
        ASSERT_TRUE(pair.a->abort(id).ok());
      }
      for (const AgentTransferId id : waiting) {
        run_agents(*pair.a, *silent, [&] { return !pair.running(id); });
        EXPECT_TRUE(pair.a->release(id).ok());
      }
    }
    driver.expect_clean();
  }
}

// A kernel at memory that is gone would lose the device to the whole process.
TEST(RequantisingFences, MemoryThatWasFreedWhileRegisteredFailsItsTransferAlone) {
  for (const Op op : {Op::kWrite, Op::kRead}) {
    SCOPED_TRACE(op == Op::kWrite ? "write" : "read");
    InstalledFake driver(without_dma_buf(), with_kernels());
    {
      DevicePair pair(driver, 128 << 10, op);
      DeviceCache other(*pair.a, driver, op == Op::kWrite ? pair.of.source : pair.of.target,
                        Of::kDevice);
      ASSERT_TRUE(pair.run(other.place).ok());
      const auto plan = pair.plan(other.place);
      const auto id = plan->make_transfer(*pair.a, pair.request());
      other.block(0).free_registered();
      for (int i = 0; i < 2; ++i) {
        ASSERT_TRUE(pair.a->post(*id).ok());
        run_agents(*pair.a, *pair.b, [&] { return !pair.running(*id); });
        const absl::Status gone = pair.a->status(*id);
        EXPECT_TRUE(absl::IsInvalidArgument(gone)) << gone;
        EXPECT_THAT(std::string(gone.message()), HasSubstr("no longer memory of CUDA device 0"));
      }
      EXPECT_TRUE(pair.a->release(*id).ok());
      const CacheBytes want = pair.want();
      ASSERT_TRUE(pair.run().ok());
      EXPECT_TRUE(pair.target.bytes() == want);
    }
    driver.expect_clean();
  }
}

}  // namespace
}  // namespace baton::kvtransfer
