// Calls of communicators that wait for streams of a device, and streams that wait for calls.
#include "gpudirect/contract/stream_gates.h"
#include "gpudirect/device.h"
#include "tests/communicator/group.h"
#include "tests/gpudirect/fake/installed_fake.h"
#include "tests/test.h"
#include "tests/until.h"

namespace baton {
namespace {

using gpudirect::CleanFake;
using gpudirect::Device;
using gpudirect::DevicePointer;
using gpudirect::InstalledFake;
using gpudirect::kSuccess;
using testing::HasSubstr;

constexpr int kRanks = 3;
constexpr size_t kCount = 5000;
constexpr size_t kBytes = kCount * sizeof(int32_t);

// What a user has on a device: a stream, which stands still from stop() to let_go(), two vectors.
class User {
 public:
  explicit User(InstalledFake& gpu) : gpu_(gpu), driver_(gpudirect::FakeDriver::driver()) {
    device_ = *Device::open(driver_, 0);
    const Device::Current current(*device_);
    EXPECT_EQ(driver_.cuStreamCreateWithPriority(&stream_, gpudirect::kStreamNonBlocking, 0),
              kSuccess);
    gates_ = *gpudirect::StreamGates::open(*device_, 4);
    made = gpu_.fake().allocate(kBytes);
    data = gpu_.fake().allocate(kBytes);
  }
  ~User() {
    gates_.reset();
    gpu_.fake().run_all();
    device_->give_back([&] { driver_.cuStreamDestroy(stream_); });
    gpu_.fake().free(made);
    gpu_.fake().free(data);
    device_.reset();
  }
  User(const User&) = delete;
  User& operator=(const User&) = delete;

  void stop() {
    obstacle_ = *gates_->hold(stream_, Clock::steady().now() + std::chrono::seconds(600));
  }
  void let_go() {
    gates_->end(obstacle_.gate, true);
    gates_->close(obstacle_.gate);
  }
  // On the stream: `to` becomes what `from` is then.
  void copy(DevicePointer to, DevicePointer from) {
    const Device::Current current(*device_);
    EXPECT_EQ(driver_.cuMemcpyAsync(to, from, kBytes, stream_), kSuccess);
  }
  void write(DevicePointer at, int32_t value) {
    const std::vector<int32_t> values(kCount, value);
    gpu_.fake().write(at, {reinterpret_cast<const char*>(values.data()), kBytes});
  }
  bool holds(DevicePointer at, int32_t value) {
    const std::vector<int32_t> values(kCount, value);
    return gpu_.fake().read(at, kBytes) ==
           std::string_view(reinterpret_cast<const char*>(values.data()), kBytes);
  }
  DeviceStream stream() const { return {0, stream_}; }
  static int32_t* at(DevicePointer pointer) {
    return reinterpret_cast<int32_t*>(static_cast<uintptr_t>(pointer));
  }

  DevicePointer made = 0, data = 0;

 private:
  InstalledFake& gpu_;
  gpudirect::Driver driver_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<gpudirect::StreamGates> gates_;
  gpudirect::Stream stream_ = nullptr;
  gpudirect::StreamGates::Hold obstacle_;
};

// Each rank's turn is over when it has advanced so often.
void advance(Communicator& comm, InstalledFake& gpu) {
  for (int i = 0; i < 100; ++i) {
    comm.progress();
    gpu.fake().run(1);
  }
}

class CollectiveStreams : public testing::TestWithParam<const char*> {
 public:
  static void SetUpTestSuite() { setenv("BATON_FLIGHT_RECORDER", "none", 1); }
  // body(comm, user)
  template <typename Body>
  void run(Body&& body, CommunicatorOptions options = test_options(GetParam())) {
    CleanFake gpu({.memory_bytes = size_t{1} << 30});
    run_group(kRanks, options, [&](Communicator& comm) {
      User user(gpu);
      body(comm, user, gpu);
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Over, CollectiveStreams, testing::Values("shm", "tcp"),
                         [](const auto& test) { return std::string(test.param); });

// Promise(devices): A collective reads what its stream makes before it, and a stream reads what the
//   collective made; beginning it and holding the stream block nothing | streams that stand still
//   meanwhile, every kind of call
TEST_P(CollectiveStreams, CallsReadWhatTheirStreamMakes) {
  using Begin = absl::StatusOr<Work> (*)(Communicator&, int32_t*, const CallOptions&);
  struct Case {
    const char* name;
    Begin begin;
    int32_t wanted[kRanks];  // of inputs 1, 2 and 3
  };
  const Case cases[] = {
      {"all_reduce",
       [](Communicator& comm, int32_t* data, const CallOptions& how) {
         return comm.all_reduce_async(data, data, kCount, DataType::kI32, ReduceOp::kSum, how);
       },
       {6, 6, 6}},
      {"all_reduce of products",
       [](Communicator& comm, int32_t* data, const CallOptions& how) {
         static const int32_t factor = 10;
         CallOptions scaled = how;
         scaled.factor = &factor;
         return comm.all_reduce_async(data, data, kCount, DataType::kI32, ReduceOp::kPreMulSum,
                                      scaled);
       },
       {60, 60, 60}},
      {"broadcast",
       [](Communicator& comm, int32_t* data, const CallOptions& how) {
         return comm.broadcast_async(data, data, kCount, DataType::kI32, 1, how);
       },
       {2, 2, 2}},
      {"ring of sends",
       [](Communicator& comm, int32_t* data, const CallOptions& how) -> absl::StatusOr<Work> {
         const auto group = comm.group_begin();
         if (!group.ok()) return group.status();
         CallOptions in_it = how;
         in_it.group = *group;
         const int right = (comm.rank() + 1) % kRanks, left = (comm.rank() + 2) % kRanks;
         auto begun = comm.send_async(data, kCount / 2, DataType::kI32, right, in_it);
         if (begun.ok()) {
           begun = comm.receive_async(data + kCount / 2, kCount / 2, DataType::kI32, left, in_it);
         }
         absl::Status status = begun.status();
         status.Update(comm.group_end(*group));
         if (!status.ok()) return status;
         return *group;
       },
       {}},
      {"all_to_all_v",
       [](Communicator& comm, int32_t* data, const CallOptions& how) {
         constexpr size_t kEach = kCount / (2 * kRanks);
         const size_t counts[kRanks] = {kEach, kEach, kEach};
         const size_t from[kRanks] = {0, kEach, 2 * kEach};
         return comm.all_to_all_v_async(data, counts, from, data + kCount / 2, counts, from,
                                        DataType::kI32, how);
       },
       {}},
  };
  run([&](Communicator& comm, User& user, InstalledFake& gpu) {
    for (const Case& c : cases) {
      SCOPED_TRACE(c.name);
      user.write(user.data, -100);
      user.write(user.made, comm.rank() + 1);
      user.stop();
      user.copy(user.data, user.made);
      CallOptions how;
      how.after = user.stream();
      const auto work = must(c.begin(comm, user.at(user.data), how));
      advance(comm, gpu);
      EXPECT_FALSE(comm.test(work).has_value()) << "it did not wait";
      // The stream goes on with the result.
      EXPECT_EQ(comm.hold(work, user.stream()), absl::OkStatus());
      user.copy(user.made, user.data);
      advance(comm, gpu);
      EXPECT_TRUE(user.holds(user.data, -100));
      user.let_go();
      ASSERT_EQ(comm.wait(work), absl::OkStatus());
      gpu.fake().run_all();
      const auto* const seen = reinterpret_cast<const int32_t*>(gpu.fake().view(user.made, kBytes));
      const int32_t r = comm.rank();
      for (size_t i = 0; i < kCount; ++i) {
        int32_t wanted = c.wanted[r];
        if (wanted == 0 && i < kCount / 2) wanted = r + 1;  // the two that move halves
        if (wanted == 0 && c.name[0] == 'r') wanted = (r + 2) % kRanks + 1;
        if (wanted == 0) {
          const size_t from = (i - kCount / 2) / (kCount / (2 * kRanks));
          wanted = from < kRanks ? static_cast<int32_t>(from) + 1 : r + 1;
        }
        ASSERT_EQ(seen[i], wanted) << i;
      }
      ASSERT_TRUE(comm.barrier().ok());
    }
  });
}

TEST_P(CollectiveStreams, CallsBehindOneThatWaitsKeepTheirOrderAndOthersGoAhead) {
  run([&](Communicator& comm, User& user, InstalledFake&) {
    const int right = (comm.rank() + 1) % kRanks, left = (comm.rank() + 2) % kRanks;
    user.write(user.made, 1);
    user.stop();
    user.copy(user.data, user.made);
    CallOptions gated;
    gated.after = user.stream();
    gated.release = user.stream();
    int32_t* const data = user.at(user.data);
    std::vector<int32_t> host(kCount, comm.rank()), got(kCount, -1);
    const auto first =
        must(comm.all_reduce_async(data, data, kCount, DataType::kI32, ReduceOp::kSum, gated));
    // In other memory, and behind it all the same: as at a rank where the first does not wait.
    const auto second = must(
        comm.all_reduce_async(host.data(), host.data(), kCount, DataType::kI32, ReduceOp::kMax));
    // Between two ranks alone: it waits for neither.
    const auto receive = must(comm.receive_async(got.data(), kCount, DataType::kI32, left));
    std::vector<int32_t> mine(kCount, comm.rank());
    ASSERT_TRUE(comm.send(mine.data(), kCount, DataType::kI32, right).ok());
    ASSERT_TRUE(comm.wait(receive).ok());
    EXPECT_EQ(got, std::vector<int32_t>(kCount, left));
    EXPECT_FALSE(comm.test(first).has_value());
    EXPECT_FALSE(comm.test(second).has_value());
    // A third one waits for a stream that waits for the first: it begins when that has ended.
    const auto third =
        must(comm.all_reduce_async(data, data, kCount, DataType::kI32, ReduceOp::kSum, gated));
    user.let_go();
    for (const Work work : {third, second, first}) {
      EXPECT_EQ(comm.wait(work), absl::OkStatus());
    }
    EXPECT_TRUE(user.holds(user.data, kRanks * kRanks));
    EXPECT_EQ(host, std::vector<int32_t>(kCount, kRanks - 1));
    ASSERT_TRUE(comm.barrier().ok());
  });
}

TEST_P(CollectiveStreams, AStreamThatNeverComesEndsTheCallAtItsDeadlineAndLetsTheStreamGo) {
  ManualClock clock;
  CommunicatorOptions options = test_options(GetParam());
  options.worker.clock = &clock;
  options.timeout = std::chrono::seconds(5);
  std::atomic<int> begun{0}, over{0};
  run(
      [&](Communicator& comm, User& user, InstalledFake& gpu) {
        user.write(user.data, 7);
        const bool late = comm.rank() == 0;
        if (late) user.stop();
        CallOptions gated;
        gated.after = gated.release = user.stream();
        int32_t* const data = user.at(user.data);
        const auto work =
            must(comm.all_reduce_async(data, data, kCount, DataType::kI32, ReduceOp::kSum, gated));
        user.copy(user.made, user.data);
        ++begun;
        until([&] { return begun == kRanks; }, [&] { comm.progress(); });
        std::optional<absl::Status> ended;
        until([&] { return (ended = comm.test(work)).has_value(); },
              [&] { clock.advance(std::chrono::milliseconds(1)); });
        EXPECT_FALSE(ended->ok());
        if (late) {
          EXPECT_THAT(text(*ended), HasSubstr("deadline")) << *ended;
          user.let_go();
        }
        ++over;
        until([&] { return over == kRanks; }, [&] { comm.progress(); });
        until([&] { return gpu.fake().queued() == 0; }, [&] { gpu.fake().run(10); });
      },
      options);
}

TEST_P(CollectiveStreams, WhatMakesNoSenseIsRefusedAndBreaksNothing) {
  run([&](Communicator& comm, User& user, InstalledFake&) {
    std::vector<float> host(100, 1);
    const float factor = 2;
    const auto refused = [&](const CallOptions& how, ReduceOp op = ReduceOp::kSum) {
      return comm.all_reduce_async(host.data(), host.data(), 100, DataType::kF32, op, how).status();
    };
    CallOptions how;
    how.after = user.stream();
    how.timeout = kNever;
    EXPECT_TRUE(absl::IsInvalidArgument(refused(how))) << "nothing would end the wait";
    how.timeout = Time::zero();
    how.factor = &factor;
    EXPECT_THAT(text(refused(how, ReduceOp::kPreMulSum)), HasSubstr("leave out `after`"));
    how.after = {9, user.stream().handle};
    EXPECT_FALSE(refused(how).ok()) << "there is no such device";
    EXPECT_TRUE(absl::IsNotFound(comm.hold(Work{77}, user.stream())));
    const auto work = must(comm.all_reduce_async(host.data(), host.data(), 100, DataType::kF32,
                                                 ReduceOp::kSum, {.after = user.stream()}));
    EXPECT_TRUE(absl::IsInvalidArgument(comm.hold(work, {})));
    EXPECT_TRUE(comm.wait(work).ok());
    EXPECT_EQ(host, std::vector<float>(100, kRanks));
    ASSERT_TRUE(comm.barrier().ok());
  });
}

}  // namespace
}  // namespace baton
