// Transfers that wait for streams of a device, and streams that wait for transfers: each begins and
// goes on when it should, and never for nothing.
#include "transport/internal/stream_order.h"
#include "gpudirect/contract/stream_gates.h"
#include "gpudirect/device.h"
#include "tests/gpudirect/staged_pair.h"
#include "tests/test.h"

namespace baton {
namespace {

using gpudirect::Device;
using gpudirect::DevicePointer;
using gpudirect::FakeDriver;
using gpudirect::kMiB;
using gpudirect::kSuccess;
using ::testing::HasSubstr;

const Time kLong = std::chrono::seconds(600);
constexpr size_t kSent = 100'000;

// Whether a transfer waits for the stream, and the stream for it.
struct Order {
  bool after = false, release = false;
  Time timeout = kLong;
};

// The user's side of `a`: a stream, and something on it that has still to happen until let_go().
class StreamOrder : public StagedPair, public testing::WithParamInterface<const char*> {
 protected:
  void begin() {
    start(GetParam());
    device_ = *Device::open(driver_, 0);
    const Device::Current current(*device_);
    ASSERT_EQ(driver_.cuStreamCreateWithPriority(&stream_, gpudirect::kStreamNonBlocking, 0),
              kSuccess);
    gates_ = *gpudirect::StreamGates::open(*device_, 4);
    spare_ = gpu_->allocate(2 * kMiB);
  }
  void TearDown() override {
    for (Side* side : {&a_, &b_}) side->worker.reset();
    gates_.reset();
    gpu_->run_all();
    device_->give_back([&] { driver_.cuStreamDestroy(stream_); });
    gpu_->free(spare_);
    device_.reset();
    StagedPair::TearDown();
  }
  void stop_stream() { obstacle_ = *gates_->hold(stream_, Clock::steady().now() + kLong); }
  void let_go() {
    gates_->end(obstacle_.gate, true);
    gates_->close(obstacle_.gate);
  }
  // On the user's stream.
  void copy(DevicePointer to, DevicePointer from, size_t bytes = kSent) {
    const Device::Current current(*device_);
    ASSERT_EQ(driver_.cuMemcpyAsync(to, from, bytes, stream_), kSuccess);
  }
  // Enough for all that may move to move; few enough for the fake not to call it a hang.
  void drive_a_while() {
    for (int i = 0; i < 200; ++i) {
      const FakeDriver::ProgressThread here;
      a_.worker->progress();
      b_.worker->progress();
      gpu_->run(1);
    }
  }
  // Between devices.
  TransferRequest ordered(Op op, const Order& how = {}) {
    TransferRequest out = request(op, true, true, kSent);
    out.timeout = how.timeout;
    if (how.after) out.after = stream();
    if (how.release) out.release = stream();
    return out;
  }
  TransferId submit(const TransferRequest& request, CallSite from = CallSite::here()) {
    const auto id = a_.worker->submit(request);
    EXPECT_TRUE(id.ok()) << from.line << ": " << id.status();
    return id.value_or(TransferId{});
  }
  DeviceStream stream() const { return {0, stream_}; }
  // What a kernel behind the wait would see.
  bool delivered(TransferId id) {
    const auto outcome = must(a_.worker->outcome(id));
    return *reinterpret_cast<const uint64_t*>(uintptr_t{outcome.address}) == outcome.delivered;
  }
  TransferState state(TransferId id) { return *a_.worker->state(id); }

  std::unique_ptr<Device> device_;
  std::unique_ptr<gpudirect::StreamGates> gates_;
  gpudirect::Stream stream_ = nullptr;
  gpudirect::StreamGates::Hold obstacle_;
  DevicePointer spare_ = 0;
};

// Named by itself, or by an event on it.
TEST_P(StreamOrder, AWriteSendsWhatItsStreamMakesBeforeIt) {
  begin();
  gpudirect::Event event = nullptr;
  {
    const Device::Current current(*device_);
    ASSERT_EQ(driver_.cuEventCreate(&event, gpudirect::kEventDisableTiming), kSuccess);
  }
  for (const bool by_event : {false, true}) {
    gpu_->write(a_.at, std::string(kSent, 'o'));
    gpu_->write(spare_, std::string(kSent, 'n'));
    gpu_->write(b_.at, std::string(kSent, '-'));
    stop_stream();
    copy(a_.at, spare_);
    TransferRequest write = ordered(Op::kWrite);
    if (by_event) {
      const Device::Current current(*device_);
      ASSERT_EQ(driver_.cuEventRecord(event, stream_), kSuccess);
      write.after_event = {0, event};
    } else {
      write.after = stream();
    }
    const TransferId id = submit(write);
    copy(spare_, b_.at);  // what comes later on the stream is not waited for
    drive_a_while();
    EXPECT_EQ(state(id), TransferState::kActive);
    EXPECT_EQ(gpu_->read(b_.at, kSent), std::string(kSent, '-')) << "it did not wait";
    let_go();
    ASSERT_TRUE(finish(id).ok());
    EXPECT_EQ(gpu_->read(b_.at, kSent), std::string(kSent, 'n'));
    gpu_->run_all();
  }
  device_->give_back([&] { driver_.cuEventDestroy(event); });
}

// PyTorch's stream, for one: what is put there is the user's, and so is what submit() puts there.
TEST_P(StreamOrder, DefaultStreamsAreAsGoodAsOthers) {
  begin();
  gpudirect::Stream const made = stream_;
  for (gpudirect::Stream const handle :
       {gpudirect::Stream{nullptr}, gpudirect::kLegacyStream, gpudirect::kThreadsStream}) {
    SCOPED_TRACE(handle);
    gpu_->write(a_.at, std::string(kSent, 'o'));
    gpu_->write(spare_, std::string(kSent, 'n'));
    gpu_->write(b_.at, std::string(kSent, '-'));
    stream_ = handle;
    const TransferRequest write = ordered(Op::kWrite, {.after = true, .release = true});
    TransferRequest read = ordered(Op::kRead, {.release = true});
    read.remote_layout = Layout::contiguous(kSent, kSent);
    gpu_->write(b_.at + kSent, std::string(kSent, 'r'));
    TransferId writing, reading;
    {
      const FakeDriver::UsersDefaultStreams users;
      stop_stream();
      copy(a_.at, spare_);
      writing = submit(write);
      reading = submit(read);
      copy(spare_, a_.at);
    }
    stream_ = made;
    drive_a_while();
    EXPECT_EQ(state(writing), TransferState::kActive);
    EXPECT_EQ(gpu_->read(b_.at, kSent), std::string(kSent, '-'));
    ASSERT_EQ(finish(reading).code(), absl::StatusCode::kOk);
    let_go();
    until([&] { return ended(state(writing)); });
    gpu_->run_all();
    EXPECT_EQ(gpu_->queued(), 0u);
    EXPECT_TRUE(delivered(writing));
    ASSERT_TRUE(finish(writing).ok());
    EXPECT_EQ(gpu_->read(b_.at, kSent), std::string(kSent, 'n'));
    EXPECT_EQ(gpu_->read(spare_, kSent), std::string(kSent, 'n'));
  }
}

// Nothing is pinned then: that would keep the progress thread for as long as the driver takes.
TEST_P(StreamOrder, TheFirstOneMayBeSubmittedByACallback) {
  begin();
  struct Next {
    Worker& worker;
    TransferRequest request;
    absl::StatusOr<TransferId> id = absl::UnknownError("not called");
  };
  Next next{*a_.worker, ordered(Op::kWrite, {.after = true, .release = true})};
  TransferRequest first = request(Op::kWrite, true, true, kSent);
  first.context = &next;
  first.on_end = [](void* context, TransferId, const absl::Status&) {
    Next& then = *static_cast<Next*>(context);
    then.id = then.worker.submit(then.request);
  };
  ASSERT_TRUE(run(first).ok());
  ASSERT_TRUE(next.id.ok()) << next.id.status();
  EXPECT_TRUE(finish(*next.id).ok());
  gpu_->run_all();
}

TEST_P(StreamOrder, WhatIsPutOnAStreamBehindAReadSeesItsBytes) {
  begin();
  gpu_->write(a_.at, std::string(kSent, 'o'));
  gpu_->write(b_.at, std::string(kSent, 'n'));
  const TransferId id = submit(ordered(Op::kRead, {.after = true, .release = true}));
  copy(spare_, a_.at);
  gpu_->run_all();
  EXPECT_TRUE(gpu_->stuck()) << "the stream went on";
  until([&] { return ended(state(id)); });
  gpu_->run_all();
  EXPECT_EQ(gpu_->read(spare_, kSent), std::string(kSent, 'n'));
  EXPECT_TRUE(delivered(id));
  ASSERT_TRUE(a_.worker->release(id).ok());
  EXPECT_EQ(a_.worker->outcome(id).status().code(), absl::StatusCode::kNotFound);
}

TEST_P(StreamOrder, ChainsRunInTheOrderOfTheirStream) {
  begin();
  gpu_->write(b_.at, std::string(kSent, '1'));
  // There and back, three times, without anybody waiting in between.
  std::vector<TransferId> ids;
  for (int i = 0; i < 3; ++i) {
    ids.push_back(submit(ordered(Op::kRead, {.after = true, .release = true})));
    copy(a_.at + kSent, a_.at);
    TransferRequest write = ordered(Op::kWrite, {.after = true, .release = true});
    write.local_layout = Layout::contiguous(kSent, kSent);
    write.remote_layout = Layout::contiguous(kSent * (i + 1), kSent);
    ids.push_back(submit(write));
  }
  until([&] { return ended(state(ids.back())); });
  gpu_->run_all();
  for (const TransferId id : ids) EXPECT_TRUE(delivered(id) && finish(id).ok());
  EXPECT_EQ(gpu_->read(b_.at, 4 * kSent), std::string(4 * kSent, '1'));
}

// Also of a transfer that waits for its target's word then: wherever the other side stops.
TEST_P(StreamOrder, AtTheTimeoutTheStreamGoesOnAndKnows) {
  begin();
  for (size_t rounds = 0; rounds < 40; ++rounds) {
    for (const Op op : {Op::kRead, Op::kWrite}) {
      SCOPED_TRACE(testing::Message() << rounds << (op == Op::kRead ? " read" : " written"));
      const Time timeout = std::chrono::milliseconds(5);
      const TransferId id = submit(ordered(op, {.release = true, .timeout = timeout}));
      copy(spare_, a_.at);
      const Time end = Clock::steady().now() + timeout;
      turn(rounds);
      while (Clock::steady().now() <= end) a_.worker->progress();
      a_.worker->progress();
      gpu_->run_all();
      EXPECT_FALSE(gpu_->stuck());
      EXPECT_EQ(delivered(id), state(id) == TransferState::kDone);
      const absl::Status status = finish(id);
      // The other side has said nothing.
      EXPECT_TRUE(rounds > 0 || absl::IsDeadlineExceeded(status)) << status;
    }
  }
}

TEST_P(StreamOrder, WhatIsCancelledBeforeItBeganMovesNothing) {
  begin();
  gpu_->write(b_.at, std::string(kSent, '-'));
  stop_stream();
  // More often than there are gates: each gives its own back.
  for (size_t i = 0; i < kMostStreamWaits + 10; ++i) {
    const TransferId id = submit(ordered(Op::kWrite, {.after = true}));
    a_.worker->progress();
    ASSERT_TRUE(a_.worker->cancel(id).ok()) << i;
    ASSERT_EQ(finish(id).code(), absl::StatusCode::kCancelled);
  }
  let_go();
  gpu_->run_all();
  drive_a_while();
  EXPECT_EQ(gpu_->read(b_.at, kSent), std::string(kSent, '-'));
  EXPECT_TRUE(a_.worker->deregister_memory(a_.device_region).ok());
}

TEST_P(StreamOrder, ACancelledOneLetsItsStreamGoWhenNothingMovesAnyMore) {
  begin();
  const TransferId id = submit(ordered(Op::kRead, {.release = true}));
  ASSERT_TRUE(a_.worker->cancel(id).ok());
  until([&] { return ended(state(id)); });
  gpu_->run_all();
  EXPECT_FALSE(gpu_->stuck());
  EXPECT_EQ(delivered(id), state(id) == TransferState::kDone);
  finish(id).IgnoreError();
}

TEST_P(StreamOrder, APeerThatGoesTakesThoseThatStandAsideWithIt) {
  begin();
  stop_stream();
  const TransferId id = submit(ordered(Op::kWrite, {.after = true}));
  a_.worker->progress();
  b_.worker.reset();
  ASSERT_TRUE(
      a_.worker->wait_until([&] { return ended(state(id)); }, patient(std::chrono::seconds(20)))
          .ok());
  EXPECT_EQ(state(id), TransferState::kFailed);
  let_go();
}

TEST_P(StreamOrder, AWorkerThatEndsLetsStreamsGo) {
  begin();
  submit(ordered(Op::kRead, {.release = true}));
  a_.worker.reset();
  gpu_->run_all();
  EXPECT_FALSE(gpu_->stuck());
}

TEST_P(StreamOrder, ALostDeviceEndsThem) {
  begin();
  stop_stream();
  const TransferId id = submit(ordered(Op::kWrite, {.after = true}));
  gpu_->lose();
  EXPECT_EQ(finish(id).code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(run(request(Op::kWrite, false, false)).ok()) << "host traffic goes on";
}

TEST_P(StreamOrder, WhatCannotBeWaitedForIsRefused) {
  begin();
  TransferRequest write = ordered(Op::kWrite, {.after = true, .timeout = kNever});
  EXPECT_THAT(std::string(a_.worker->submit(write).status().message()), HasSubstr("timeout"));
  write = ordered(Op::kWrite);
  write.after_event = {0, nullptr};
  EXPECT_EQ(a_.worker->submit(write).status().code(), absl::StatusCode::kInvalidArgument);
  write = ordered(Op::kWrite);
  write.after = {7, stream_};
  EXPECT_FALSE(a_.worker->submit(write).ok());
  const TransferId plain = submit(ordered(Op::kWrite));
  EXPECT_EQ(a_.worker->outcome(plain).status().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(finish(plain).ok());

  // All gates are taken: the error says so, and no slot of a transfer is lost by it.
  stop_stream();
  std::vector<TransferId> ids;
  write = request(Op::kWrite, true, true, 64);
  write.timeout = kLong;
  write.after = stream();
  absl::Status full;
  while (full.ok()) {
    const auto id = a_.worker->submit(write);
    if (!id.ok()) {
      full = id.status();
    } else {
      ids.push_back(*id);
    }
  }
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()), HasSubstr("release() those"));
  EXPECT_EQ(ids.size(), kMostStreamWaits);
  for (size_t i = 0; i < 5000; ++i) {
    ASSERT_THAT(std::string(a_.worker->submit(write).status().message()),
                HasSubstr("waits between"));
  }
  let_go();
  for (const TransferId id : ids) ASSERT_TRUE(finish(id).ok());
}

INSTANTIATE_TEST_SUITE_P(Providers, StreamOrder, testing::Values("tcp", "shm"),
                         [](const auto& each) { return std::string(each.param); });

TEST(StreamOrderWithoutDevices, IsRefusedWithARemedy) {
  const internal::DeviceMemory* const before = internal::device_memory();
  internal::use_device_memory(nullptr);
  auto worker = must(Worker::create({.providers = {"tcp"}}));
  const PeerId self = *worker->connect(worker->address());
  TransferRequest nothing{.peer = self, .timeout = std::chrono::seconds(1)};
  nothing.after = {0, nullptr};
  const absl::Status status = worker->submit(nothing).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("synchronise"));
  internal::use_device_memory(before);
}

}  // namespace
}  // namespace baton
