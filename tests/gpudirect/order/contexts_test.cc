// What an application has made in contexts of its own, beside the primary one or on another device:
// memory, events and streams of them are used or refused, and what becomes of such a context is no
// loss of the device.
#include "tests/gpudirect/staged_pair.h"
#include "tests/test.h"

namespace baton {
namespace {

using gpudirect::Context;
using gpudirect::DevicePointer;
using gpudirect::FakeDriver;
using gpudirect::kMiB;
using gpudirect::kSuccess;
using ::testing::HasSubstr;

class Contexts : public StagedPair {
 protected:
  // A stream of the context, and an event that is still to happen on it.
  void make_in(Context context) {
    ASSERT_EQ(driver_.cuCtxPushCurrent(context), kSuccess);
    ASSERT_EQ(driver_.cuStreamCreateWithPriority(&stream_, gpudirect::kStreamNonBlocking, 0),
              kSuccess);
    ASSERT_EQ(driver_.cuEventCreate(&event_, gpudirect::kEventDisableTiming), kSuccess);
    ASSERT_EQ(driver_.cuEventRecord(event_, stream_), kSuccess);
    Context popped = nullptr;
    ASSERT_EQ(driver_.cuCtxPopCurrent(&popped), kSuccess);
  }
  void destroy_in(Context context) {
    driver_.cuCtxPushCurrent(context);
    driver_.cuEventDestroy(event_);
    driver_.cuStreamDestroy(stream_);
    Context popped = nullptr;
    driver_.cuCtxPopCurrent(&popped);
  }
  TransferRequest ordered() {
    TransferRequest out = request(Op::kWrite, true, true);
    out.timeout = patient(std::chrono::seconds(60));
    return out;
  }

  gpudirect::Stream stream_ = nullptr;
  gpudirect::Event event_ = nullptr;
};

// Small pages are packed by kernels, which would lose the device to all of the process there.
TEST_F(Contexts, MemoryBesideThePrimaryOneIsRefusedInOneLine) {
  start();
  const Context users = gpu_->make_context(0);
  const DevicePointer at = gpu_->allocate_in(users, kMiB);
  for (const bool gone : {false, true}) {
    if (gone) gpu_->destroy_context(users);
    const absl::Status status =
        a_.worker->register_memory(reinterpret_cast<void*>(uintptr_t{at}), kMiB).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    if (!gone) {
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr("a context other than the primary one of CUDA device 0"));
      EXPECT_THAT(std::string(status.message()), HasSubstr("cudaMalloc"));
    }
    EXPECT_TRUE(run(request(Op::kWrite, true, true)).ok()) << "other memory moves";
  }
}

// Of the device that the transfer's memory is on, and of another.
TEST_F(Contexts, AnEventOfALostContextEndsItsTransferAndNoOther) {
  start("tcp", {.devices = 2});
  for (const int device : {0, 1}) {
    for (const bool gone : {false, true}) {
      SCOPED_TRACE(gone ? device + 10 : device);
      const Context users = gpu_->make_context(device);
      make_in(users);
      TransferRequest write = ordered();
      write.after_event = {0, event_};
      const auto id = must(a_.worker->submit(write));
      gpu_->run_all();
      if (gone) {
        gpu_->destroy_context(users);
      } else {
        gpu_->lose_context(users);
      }
      const absl::Status status = finish(id);
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr("belongs to a CUDA context that is lost"));
      EXPECT_TRUE(run(request(Op::kWrite, true, true)).ok()) << "the device is not lost";
      if (!gone) destroy_in(users);
    }
  }
}

TEST_F(Contexts, AStreamOfALostContextIsRefused) {
  start("tcp", {.devices = 2});
  for (const int device : {0, 1}) {
    const Context users = gpu_->make_context(device);
    make_in(users);
    gpu_->run_all();
    gpu_->lose_context(users);
    TransferRequest write = ordered();
    write.after = {0, stream_};
    EXPECT_EQ(a_.worker->submit(write).status().code(), absl::StatusCode::kFailedPrecondition);
    write = ordered();
    write.release = {0, stream_};
    EXPECT_EQ(a_.worker->submit(write).status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_TRUE(run(request(Op::kWrite, true, true)).ok()) << "the device is not lost";
    destroy_in(users);
  }
}

}  // namespace
}  // namespace baton
