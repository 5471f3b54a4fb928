// Gates between streams and transfers, over a fake whose streams are late.
#include "gpudirect/contract/stream_gates.h"

#include "tests/gpudirect/fake/with_device.h"
#include "tests/sanitized.h"
#include "tests/test.h"
#include "tests/until.h"

namespace baton::gpudirect {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr Time kSoon{1000};

class StreamGatesTest : public WithDevice {
 protected:
  using Gate = StreamGates::Gate;
  using Hold = StreamGates::Hold;

  StreamGatesTest() {
    open(4);
    memory_ = fake_.allocate(2 << 20);
    const Device::Current current(*device_);
    for (Stream& stream : streams_) {
      EXPECT_EQ(device_->driver().cuStreamCreateWithPriority(&stream, kStreamNonBlocking, 0),
                kSuccess);
    }
  }
  ~StreamGatesTest() override {
    gates_.reset();
    fake_.run_all();
    device_->give_back([&] {
      for (const Stream stream : streams_) device_->driver().cuStreamDestroy(stream);
    });
    fake_.free(memory_);
  }
  void open(size_t count) {
    gates_.reset();
    gates_ = must(StreamGates::open(*device_, count));
  }
  // Copies `bytes` from one place of the device's memory to another, on a stream.
  void copy(Stream stream, size_t to, size_t from, size_t bytes = 4) {
    const Device::Current current(*device_);
    ASSERT_EQ(device_->driver().cuMemcpyAsync(memory_ + to, memory_ + from, bytes, stream),
              kSuccess);
  }
  std::optional<absl::Status> passed(Gate gate) { return gates_->passed(gate, Time{0}); }
  // What a kernel behind the wait would read.
  static bool delivered(const Hold& hold) {
    return *pointer_of<const uint64_t>(hold.outcome.address) == hold.outcome.delivered;
  }

  // In either direction.
  void expect_refused(Stream stream, absl::StatusCode code, const char* words) {
    for (const absl::Status& status :
         {gates_->after_stream(stream, kSoon).status(), gates_->hold(stream, kSoon).status()}) {
      EXPECT_EQ(status.code(), code) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(words));
    }
  }

  std::unique_ptr<StreamGates> gates_;
  DevicePointer memory_ = 0;
  Stream streams_[2] = {};
};

// Promise(devices): A transfer ordered after a stream begins behind its work; a stream behind a
//   transfer continues at the latest at its timeout | an event that progress asks for, a word that
//   the stream waits for
TEST_F(StreamGatesTest, ATransferWaitsForWhatAStreamHasStillToDo) {
  fake_.write(memory_, "data");
  copy(streams_[0], 100, 0);
  const auto gate = must(gates_->after_stream(streams_[0], kSoon));
  until([&] { return passed(gate).has_value(); });
  EXPECT_EQ(passed(gate), absl::OkStatus());
  EXPECT_EQ(fake_.read(memory_ + 100, 4), "data");
  gates_->close(gate);
  EXPECT_TRUE(absl::IsNotFound(*passed(gate)));
}

TEST_F(StreamGatesTest, AStreamWaitsForATransfer) {
  fake_.write(memory_, "late");
  const auto hold = must(gates_->hold(streams_[0], kSoon));
  copy(streams_[0], 100, 0);
  copy(streams_[1], 200, 0);
  fake_.run_all();
  EXPECT_TRUE(fake_.stuck());
  EXPECT_NE(fake_.read(memory_ + 100, 4), "late") << "it did not wait";
  EXPECT_EQ(fake_.read(memory_ + 200, 4), "late") << "another stream waits too";

  fake_.write(memory_, "data");
  gates_->end(hold.gate, true);
  fake_.run_all();
  EXPECT_EQ(fake_.read(memory_ + 100, 4), "data");
  EXPECT_TRUE(delivered(hold));
  gates_->end(hold.gate, false);
  EXPECT_TRUE(delivered(hold)) << "the first word counts";
}

TEST_F(StreamGatesTest, WaitsThatNothingWouldEndAreRefused) {
  const Stream copies = device_->stream(Direction::kToDevice);
  EXPECT_THAT(std::string(gates_->hold(copies, kSoon).status().message()),
              HasSubstr("hold the stream that uses the data"));
  EXPECT_THAT(std::string(gates_->hold(streams_[0], kNever).status().message()),
              HasSubstr("needs a deadline"));
  EXPECT_TRUE(gates_->after_stream(copies, kSoon).ok());
  EXPECT_EQ(fake_.queued(), 1u);
}

TEST_F(StreamGatesTest, AGateIsUsedAgainWhenItsStreamHasPassed) {
  open(1);
  const auto hold = must(gates_->hold(streams_[0], kSoon));
  EXPECT_EQ(gates_->hold(streams_[1], kSoon).status().code(), absl::StatusCode::kResourceExhausted);
  gates_->close(hold.gate);
  fake_.run_all();
  EXPECT_FALSE(delivered(hold));
  const auto next = must(gates_->hold(streams_[1], kSoon));
  gates_->end(hold.gate, true);
  fake_.run_all();
  EXPECT_TRUE(fake_.stuck()) << "a word of the gate before lets it through";
  gates_->end(next.gate, true);
}

// Streams that use what transfers deliver, which come in any order, fail, or never come.
TEST_F(StreamGatesTest, NoStreamReadsWhatWasNotDelivered) {
  open(16);
  for (uint64_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    fake_.write(memory_, std::string(16 * 8, '-'));
    fake_.write(memory_ + 4096, std::string(16 * 8, '.'));
    std::vector<Hold> holds;
    std::vector<std::string> wanted;
    for (size_t i = 0; i < 12; ++i) {
      const Stream stream = streams_[random() % 2];
      const auto hold = must(gates_->hold(stream, kSoon));
      holds.push_back(hold);
      copy(stream, 4096 + i * 8, i * 8, 8);
      fake_.run(random() % 4);
    }
    std::vector<size_t> order(holds.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    std::vector<bool> came(holds.size());
    for (const size_t i : order) {
      const uint64_t fate = random() % 4;
      if (fate == 0) continue;  // never comes
      came[i] = fate > 1;
      if (came[i]) fake_.write(memory_ + i * 8, "arrived.");
      gates_->end(holds[i].gate, came[i]);
      fake_.run(random() % 6);
    }
    for (const Hold& hold : holds) gates_->end(hold.gate, false);
    fake_.run_all();
    EXPECT_EQ(fake_.queued(), 0u);
    for (size_t i = 0; i < holds.size(); ++i) {
      EXPECT_EQ(delivered(holds[i]), came[i]);
      EXPECT_EQ(fake_.read(memory_ + 4096 + i * 8, 8), came[i] ? "arrived." : "--------");
      gates_->close(holds[i].gate);
    }
  }
}

// An error of asking is one transfer's, and the device's only where the driver says so.
TEST_F(StreamGatesTest, AnErrorOfAskingIsSaidInTheDriversWords) {
  for (const char* call : {"cuCtxPushCurrent", "cuEventQuery"}) {
    copy(streams_[0], 100, 0);
    const auto gate = must(gates_->after_stream(streams_[0], kSoon));
    fake_.fail_next(call, kOutOfMemory);
    const auto failed = passed(gate);
    ASSERT_TRUE(failed.has_value()) << call;
    EXPECT_THAT(std::string(failed->message()), HasSubstr("out of memory")) << call;
    EXPECT_TRUE(device_->alive().ok()) << call << ": " << device_->alive();
    gates_->close(gate);
  }
  const auto gate = must(gates_->after_stream(streams_[0], kSoon));
  fake_.run_all();
  EXPECT_EQ(passed(gate), absl::OkStatus()) << "the one's before";
}

// What is recorded runs at each launch: neither wait would be for this transfer.
TEST_F(StreamGatesTest, AStreamThatIsRecordedIsRefusedAndItsGraphIsNot) {
  const FakeDriver::UsersRecording recording(fake_, true);
  expect_refused(recording.stream(), absl::StatusCode::kFailedPrecondition, "into a CUDA graph");
  EXPECT_TRUE(recording.intact());
  for (int i = 0; i < 4; ++i)
    EXPECT_TRUE(gates_->after_stream(streams_[1], kSoon).ok()) << "all are free";
}

TEST_F(StreamGatesTest, AnEventOfAGraphEndsTheWaitInTheDriversWords) {
  Event event = nullptr;
  {
    const Device::Current current(*device_);
    ASSERT_EQ(device_->driver().cuEventCreate(&event, kEventDisableTiming), kSuccess);
    const FakeDriver::UsersRecording recording(fake_);
    const FakeDriver::UsersDefaultStreams user;
    ASSERT_EQ(device_->driver().cuEventRecord(event, recording.stream()), kSuccess);
  }
  const auto gate = must(gates_->after_event(event, kSoon));
  const auto failed = passed(gate);
  ASSERT_TRUE(failed.has_value());
  EXPECT_THAT(std::string(failed->message()), HasSubstr("asking where a stream is"));
  EXPECT_TRUE(device_->alive().ok());
  device_->give_back([&] { device_->driver().cuEventDestroy(event); });
}

// An event may be of any context: whatever it stands for has then happened.
TEST_F(StreamGatesTest, AStreamOfAnotherContextIsRefusedAndItsEventIsWaitedFor) {
  const Driver& driver = device_->driver();
  Stream stream = nullptr;
  Event event = nullptr;
  const Context users = fake_.make_context(0);
  ASSERT_EQ(driver.cuCtxPushCurrent(users), kSuccess);
  ASSERT_EQ(driver.cuStreamCreateWithPriority(&stream, kStreamNonBlocking, 0), kSuccess);
  ASSERT_EQ(driver.cuEventCreate(&event, kEventDisableTiming), kSuccess);
  ASSERT_EQ(driver.cuEventRecord(event, stream), kSuccess);
  const auto gate = must(gates_->after_event(event, kSoon));
  EXPECT_EQ(FakeDriver::current_context(), users);
  fake_.run_all();
  EXPECT_EQ(passed(gate), absl::OkStatus());
  {
    const FakeDriver::ForeignStreams given;
    expect_refused(stream, absl::StatusCode::kInvalidArgument,
                   "must be of the primary context of CUDA device 0");
  }
  EXPECT_EQ(fake_.queued(), 0u) << "something was put on it";
  EXPECT_EQ(FakeDriver::current_context(), users);
  driver.cuEventDestroy(event);
  driver.cuStreamDestroy(stream);
  Context popped = nullptr;
  driver.cuCtxPopCurrent(&popped);
  EXPECT_EQ(popped, users);
}

// One that cannot be told to have passed ends the gates without their words: a stream may read
// them.
TEST(StreamGates, WordsThatAStreamMayStillReadStay) {
  for (const size_t failures : {1, 2}) {
    if (kSanitized && failures == 2) continue;  // what stays would be a leak
    FakeDriver fake;
    Stream stream = nullptr;
    {
      const auto device = Device::open(FakeDriver::driver(), 0);
      auto gates = must(StreamGates::open(**device, 1));
      {
        const Device::Current current(**device);
        (*device)->driver().cuStreamCreateWithPriority(&stream, kStreamNonBlocking, 0);
      }
      fake.fail_next("cuEventRecord", kOutOfMemory, failures, 1);
      EXPECT_FALSE(gates->hold(stream, kSoon).ok());
      EXPECT_EQ(fake.queued(), failures == 1 ? 3u : 2u) << "a mark, the wait, and its mark";
      gates.reset();
      fake.run_all();
      EXPECT_THAT(fake.violations(), IsEmpty());
      (*device)->give_back([&] { (*device)->driver().cuStreamDestroy(stream); });
    }
    const std::vector<std::string> left = fake.finish();
    if (failures == 1) {
      EXPECT_THAT(left, IsEmpty());
    } else {
      EXPECT_THAT(left, testing::ElementsAre(HasSubstr("host memory is still registered")));
    }
  }
}

TEST(StreamGates, AreAsManyAsThereCanBe) {
  CleanDriver fake;
  const auto device = *Device::open(FakeDriver::driver(), 0);
  // Of 2^58 + 1 all words have the size of one.
  for (const size_t gates :
       {size_t{0}, StreamGates::kMostGates + 1, (size_t{1} << 58) + 1, size_t{1} << 58, SIZE_MAX}) {
    const auto none = StreamGates::open(*device, gates);
    EXPECT_TRUE(absl::IsInvalidArgument(none.status())) << gates << ": " << none.status();
  }
  EXPECT_TRUE(StreamGates::open(*device, StreamGates::kMostGates).ok());
}

TEST(StreamGates, AreRefusedWhereAStreamCannotWaitForAWord) {
  Attributes attributes = h100();
  attributes[kStreamMemOps64] = 0;
  CleanDriver fake({.attributes = attributes});
  const auto device = Device::open(FakeDriver::driver(), 0);
  const absl::Status status = StreamGates::open(**device).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("wait for transfers on the host"));
}

}  // namespace
}  // namespace baton::gpudirect
