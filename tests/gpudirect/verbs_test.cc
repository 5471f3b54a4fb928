// Device memory over verbs: recognised, registered through a dma-buf, and moved by the adapter
// alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "gpudirect/contract/memory_place.h"
#include "tests/gpudirect/fake/fake_driver.h"
#include "tests/gpudirect/fake/made_up_costs.h"
#include "tests/verbs/verbs_pair.h"

namespace baton {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class DeviceMemoryOverVerbs : public testing::Test {
 protected:
  static constexpr size_t kBytes = VerbsPair::kBytes;

  void start(gpudirect::FakeOptions options = {}, FakeOptions adapters = {}) {
    gpu_ = std::make_unique<gpudirect::FakeDriver>(std::move(options));
    driver_ = gpudirect::FakeDriver::driver();
    memory_ = std::make_unique<gpudirect::CudaMemory>([this] { return &driver_; },
                                                      gpudirect::options_of_this_test());
    internal::use_device_memory(memory_.get());
    pair_ = std::make_unique<VerbsPair>(std::move(adapters));
    ASSERT_TRUE(pair_->connect());
    near_ = gpu_->allocate(kBytes);
    far_ = gpu_->allocate(kBytes);
  }
  void TearDown() override {
    pair_.reset();
    internal::use_device_memory(nullptr);
    memory_.reset();
    gpu_->free(near_);
    gpu_->free(far_);
    EXPECT_THAT(gpu_->finish(), IsEmpty());
  }
  static absl::StatusOr<MemoryRegion> give(VerbsPair::Side& side, gpudirect::DevicePointer at,
                                           size_t bytes = kBytes) {
    return side.worker->register_memory(reinterpret_cast<void*>(uintptr_t{at}), bytes);
  }
  void check_staged(const std::string& why) {
    const auto near = give(pair_->a, near_);
    const auto far = give(pair_->b, far_);
    ASSERT_TRUE(near.ok()) << near.status();
    ASSERT_TRUE(far.ok()) << far.status();
    const std::string sent = pattern(5);
    gpu_->write(near_, sent);
    TransferRequest request = pair_->request(Op::kWrite);
    request.local = *near;
    request.remote = *pair_->b.worker->remote_region(*far);
    ASSERT_TRUE(pair_->run(request).ok());
    EXPECT_TRUE(gpu_->read(far_, kBytes) == sent);
    EXPECT_THAT(pair_->a.worker->explain(pair_->a.peer),
                AllOf(HasSubstr("CUDA device 0: staged through 64 MiB"), HasSubstr(why)));
    EXPECT_EQ(pair_->a.worker->stats().staged_transfers, 1u);
    EXPECT_EQ(pair_->a.worker->stats().staged_bytes, kBytes);
    EXPECT_EQ(pair_->b.worker->stats().staged_bytes, kBytes);
  }
  std::string pattern(int seed) {
    pair_->fill(seed);
    return {reinterpret_cast<const char*>(pair_->a.memory.data()), kBytes};
  }

  std::unique_ptr<gpudirect::FakeDriver> gpu_;
  gpudirect::Driver driver_;
  std::unique_ptr<gpudirect::CudaMemory> memory_;
  std::unique_ptr<VerbsPair> pair_;
  gpudirect::DevicePointer near_ = 0;
  gpudirect::DevicePointer far_ = 0;
};

TEST_F(DeviceMemoryOverVerbs, MovesBothWaysWithEitherSideOnADevice) {
  start();
  const auto near = give(pair_->a, near_);
  const auto far = give(pair_->b, far_);
  ASSERT_TRUE(near.ok()) << near.status();
  ASSERT_TRUE(far.ok()) << far.status();
  EXPECT_EQ(near->place, (MemoryPlace{MemoryKind::kDevice, 0}));
  EXPECT_EQ(pair_->fake->stats().dma_bufs, 2u);
  const RemoteRegion remote = *pair_->b.worker->remote_region(*far);

  TransferRequest request = pair_->request(Op::kWrite);  // host to device
  const std::string first = pattern(3);
  request.remote = remote;
  ASSERT_TRUE(pair_->run(request).ok());
  EXPECT_TRUE(gpu_->read(far_, kBytes) == first);

  request = pair_->request(Op::kRead);  // device to device
  request.local = *near;
  request.remote = remote;
  ASSERT_TRUE(pair_->run(request).ok());
  EXPECT_TRUE(gpu_->read(near_, kBytes) == first);

  const std::string second = pattern(40);
  gpu_->write(near_, second);
  request = pair_->request(Op::kWrite);  // device to host
  request.local = *near;
  ASSERT_TRUE(pair_->run(request).ok());
  EXPECT_TRUE(std::equal(second.begin(), second.end(),
                         reinterpret_cast<const char*>(pair_->b.memory.data())));
  EXPECT_EQ(gpu_->largest_copy(), 0u) << "the adapter moves it, no copy does";
}

// The processor would have to read what goes inline.
TEST_F(DeviceMemoryOverVerbs, SmallTransfersAreNotSentInline) {
  start();
  const auto near = give(pair_->a, near_);
  ASSERT_TRUE(near.ok()) << near.status();
  gpu_->write(near_, "small");
  for (const size_t bytes : {size_t{1}, size_t{5}, size_t{64}, size_t{4096}}) {
    TransferRequest request = pair_->request(Op::kWrite, bytes);
    request.local = *near;
    ASSERT_TRUE(pair_->run(request).ok()) << bytes;
  }
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(pair_->b.memory.data()), 5), "small");
}

TEST_F(DeviceMemoryOverVerbs, APartInsideAnAllocationKeepsItsBounds) {
  start();
  constexpr size_t kAt = 3 * 4096 + 64;
  const auto far = give(pair_->b, far_ + kAt, 1000);
  ASSERT_TRUE(far.ok()) << far.status();
  const std::string sent = pattern(9);
  const std::string before = gpu_->read(far_, kBytes);
  TransferRequest request = pair_->request(Op::kWrite, 1000);
  request.remote = *pair_->b.worker->remote_region(*far);
  ASSERT_TRUE(pair_->run(request).ok());
  EXPECT_TRUE(gpu_->read(far_, kBytes) ==
              before.substr(0, kAt) + sent.substr(0, 1000) + before.substr(kAt + 1000));
}

// Nor through an adapter that takes none: then it is staged, and explain() says why.
TEST_F(DeviceMemoryOverVerbs, WithoutADmaBufItIsStagedAndTheReasonIsSaid) {
  start({.attributes = gpudirect::without_dma_buf()});
  check_staged("CUDA device 0 exports none");
}

// What an adapter writes there might be seen late, and nothing could be done about it.
TEST_F(DeviceMemoryOverVerbs, WithoutOrderAndWithoutAFlushItIsStaged) {
  gpudirect::Attributes device = gpudirect::unordered_writes();
  device[gpudirect::kRdmaFlushWritesOptions] = 2;  // by streams alone
  start({.attributes = device});
  check_staged("offers no flush to the host");
}

// Registered memory of the host is not what there is too little of.
TEST_F(DeviceMemoryOverVerbs, WhereTheWindowIsTooSmallItIsStagedAndTheReasonIsSaid) {
  start({}, {.window_bytes = kBytes / 2});
  check_staged("BAR1");
  const std::string text = pair_->a.worker->explain(pair_->a.peer);
  EXPECT_THAT(text, testing::Not(HasSubstr("MEMLOCK")));
}

TEST_F(DeviceMemoryOverVerbs, WhereTheAdapterTakesNoDmaBufItIsStagedAndTheReasonIsSaid) {
  start({}, {.dma_buf = false});
  check_staged("no dma-buf");
}

}  // namespace
}  // namespace baton
