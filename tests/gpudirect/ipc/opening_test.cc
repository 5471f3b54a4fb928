// A peer shares memory of another device. If nobody uses that here, the driver takes a fraction of
// a second to open it: meanwhile rounds of progress go on. Not every kernel reaches it.
#include "tests/gpudirect/ipc/device_end.h"
#include "tests/std.h"

namespace baton {
namespace {

using gpudirect::Context;
using gpudirect::FakeDriver;
using gpudirect::Result;

// Where calls that make a context wait, but those of the test's own thread: it would wait for
// itself.
struct Gate {
  static Result retain(Context* context, int device) {
    {
      std::unique_lock lock(mutex_);
      if (std::this_thread::get_id() == own_) {
        ++by_own_;
      } else {
        ++others_;
        changed_.notify_all();
        changed_.wait(lock, [] { return open_; });
      }
    }
    return FakeDriver::driver().cuDevicePrimaryCtxRetain(context, device);
  }
  static void close(std::thread::id of) {
    const std::lock_guard lock(mutex_);
    own_ = of;
    by_own_ = others_ = 0;
    open_ = false;
  }
  static void let_through() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  inline static std::mutex mutex_;
  inline static std::condition_variable changed_;
  inline static std::thread::id own_;
  inline static int by_own_ = 0, others_ = 0;
  inline static bool open_ = true;
};

class OpeningDevices : public testing::Test {
 protected:
  // A transfer that waits for the device to be opened, whoever opens it.
  absl::StatusOr<TransferId> begin(End& end, Op op) {
    end.make();
    Gate::close(std::this_thread::get_id());
    end.peer = *end.worker->connect(offered_.substr(RemoteRegion::kEncodedBytes));
    auto id = end.submit(op, offered_);
    if (!id.ok()) return id;
    end.until([] {
      const std::lock_guard lock(Gate::mutex_);
      return Gate::others_ + Gate::by_own_ != 0;
    });
    return id;
  }
  void TearDown() override { child_.down.say("out"); }
  Child child_{[](const Pipe& down, const Pipe& up) {
    offer(down, up, [](End& end) { end.make(1); }, {.devices = 2});
  }};
  const std::string offered_ = child_.up.hear();
};

TEST_F(OpeningDevices, GoesOnBehindProgressAndNothingIsStagedForIt) {
  CleanFake fake({.devices = 2});
  fake.driver().cuDevicePrimaryCtxRetain = Gate::retain;
  End end(fake, "shm");
  const auto id = must(begin(end, Op::kWrite));
  for (int round = 0; round < 1000; ++round) end.worker->progress();
  EXPECT_EQ(*end.worker->state(id), TransferState::kActive);
  Gate::let_through();
  end.until([&] { return ended(*end.worker->state(id)); });
  EXPECT_TRUE(end.worker->status(id).ok()) << end.worker->status(id);
  EXPECT_EQ(Gate::by_own_, 0) << "the device was opened in a round of progress";
  EXPECT_EQ(fake.fake().copies_with_host(), 0u) << "it was staged";
  EXPECT_TRUE(end.exchange_again(offered_));
  end.give_back();
}

// One that cannot be opened is said to be so, and its memory staged.
TEST_F(OpeningDevices, WhatCannotBeOpenedIsStaged) {
  CleanFake fake({.devices = 2});
  End end(fake, "shm");
  end.make();
  fake.fake().fail_next("cuDevicePrimaryCtxRetain", gpudirect::kOutOfMemory, 100);
  EXPECT_TRUE(end.exchange(offered_));
  EXPECT_THAT(end.worker->explain(end.peer), testing::HasSubstr("no CUDA IPC"));
  end.give_back();
}

// Workers end, and who drives devices does, while one is being opened.
TEST_F(OpeningDevices, TheEndOfAllWaitsForIt) {
  CleanFake fake({.devices = 2});
  fake.driver().cuDevicePrimaryCtxRetain = Gate::retain;
  {
    End end(fake, "shm");
    must(begin(end, Op::kRead));
    end.worker.reset();
    end.free();
  }
  Gate::let_through();
}

// A kernel at what its device does not reach is the end of that device in this process.
TEST(PeersDevices, KernelsCopyOnlyWhatTheyReach) {
  for (const bool by_malloc : {false, true}) {
    const gpudirect::CudaMemory::Options favoured{
        .kernels = FakeDriver::image(),
        .table = gpudirect::costs_that_favour(gpudirect::CopyWay::kKernel),
        .root = "/nowhere"};
    CleanFake fake({.devices = 2}, favoured);
    End near(fake, "shm"), far(fake, "shm");
    near.make();
    by_malloc ? far.make_by_malloc(1) : far.make(1);
    std::fill_n(near.view(), kSharedBytes, std::byte{7});
    EXPECT_TRUE(near.exchange(far.offer(), far.worker.get()));
    EXPECT_EQ(std::count(far.view(), far.view() + kSharedBytes, std::byte{7}), kSharedBytes);
    EXPECT_EQ(fake.fake().calls_of("cuLaunchKernel") > 0, !by_malloc);
    EXPECT_EQ(fake.fake().copies_with_host(), 0u) << "it was staged";
    for (End* end : {&near, &far}) end->give_back();
  }
}

// The fence between two processes: who takes memory back waits for what the other one copies.
TEST(CudaIpcFence, MemoryIsTakenBackWhenNoCopyOfAnotherProcessUsesIt) {
  size_t in_the_middle = 0;
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    SCOPED_TRACE(seed);
    Child child(
        [](const Pipe& down, const Pipe& up) { offer(down, up, [](End& end) { end.make(); }); });
    const Pipe &down = child.down, &up = child.up;
    CleanFake fake({.seed = seed});
    End here(fake, "shm");
    here.make();
    const std::string offered = up.hear();
    here.peer = *here.worker->connect(offered.substr(RemoteRegion::kEncodedBytes));
    const TransferId id = *here.submit(Op::kWrite, offered);
    here.until([&] { return fake.fake().queued() > 0 || ended(*here.worker->state(id)); });
    if (fake.fake().queued() > 0) ++in_the_middle;
    down.say("take it back");
    // It does not, as long as nobody here looks whether the copy has ended. Were it to, it would
    // say so in this time, or later and be missed.
    pollfd answer{.fd = up.ends[0], .events = POLLIN};
    if (fake.fake().queued() > 0) {
      EXPECT_EQ(poll(&answer, 1, 100), 0) << "a copy to memory that is gone is still to come";
    }
    fcntl(up.ends[0], F_SETFL, O_NONBLOCK);
    here.until([&] { return up.hear() == "freed"; });
    EXPECT_EQ(fake.fake().queued(), 0u) << "a copy to memory that is gone is still to come";
    here.until([&] { return ended(*here.worker->state(id)); });
    EXPECT_EQ(child.end(), 0);
    here.give_back();
  }
  EXPECT_GT(in_the_middle, 3u);
}

}  // namespace
}  // namespace baton
