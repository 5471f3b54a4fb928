// A child that is forked from a process with devices has none: what it tries says so in one line,
// the host's memory moves there as ever, and what it ends or leaves of its parent's harms nobody.
#include "gpudirect/contract/memory_place.h"
#include "gpudirect/contract/peer_mapping.h"
#include "gpudirect/contract/staging.h"
#include "gpudirect/contract/stream_gates.h"
#include "gpudirect/launcher.h"
#include "gpudirect/layer_tickets.h"
#include "tests/gpudirect/fake/clean_driver.h"
#include "tests/gpudirect/ipc/device_end.h"
#include "tests/sanitized.h"
#include "tests/std.h"

namespace baton {
namespace {

using gpudirect::Device;
using gpudirect::Direction;
using gpudirect::FakeDriver;
using gpudirect::Launcher;
using gpudirect::LayerTickets;
using gpudirect::StreamGates;
using testing::HasSubstr;
using testing::Not;

// In one line, and what to do instead.
void expect_told(const absl::Status& status) {
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("fork")) << status;
  EXPECT_THAT(std::string(status.message()), Not(HasSubstr("\n")));
}

void in_a_child(const std::function<void()>& what) {
  std::fflush(nullptr);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);
    what();
    _exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "the child failed, hung or died";
}

// Of workers of the child's own.
void move_what_is_the_hosts(const char* provider) {
  const auto make = [&] {
    return *Worker::create(
        {.providers = {provider}, .key = *ClusterKey::from_bytes("a secret of the tests")});
  };
  const auto a = make(), b = make();
  expect_host_moves(*a, *b);
}

class ForkedDevices : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (kSanitized) GTEST_SKIP() << "a sanitizer's threads do not live on in a forked child";
  }
};

TEST_P(ForkedDevices, BeforeAnythingIsRegisteredAndAfterwards) {
  CleanFake gpu;
  ASSERT_TRUE(gpu.memory().allocate(0, 4096).ok());  // this process uses CUDA
  End a(gpu, GetParam()), b(gpu, GetParam());
  const gpudirect::DevicePointer at = gpu.fake().allocate(kSharedBytes);
  const auto try_it = [&] {
    in_a_child([&] {
      move_what_is_the_hosts(GetParam());
      const internal::DeviceMemory& devices = *internal::device_memory();
      expect_told(devices.allocate(0, 4096).status());
      expect_told(devices.staging_ring(0, 1 << 20).status());
      expect_told(devices.gates(0, 4).status());
      // It is not the child's memory, and nobody there may say what it was.
      const auto worker = Worker::create(
          {.providers = {GetParam()}, .key = *ClusterKey::from_bytes("a secret of the tests")});
      const auto region = (*worker)->register_memory(gpudirect::pointer_of<void>(at), kSharedBytes);
      EXPECT_TRUE(absl::IsInvalidArgument(region.status())) << region.status();
      EXPECT_THAT(std::string(region.status().message()), Not(HasSubstr("\n")));
    });
  };
  try_it();
  a.make_by_malloc();
  b.make_by_malloc();
  try_it();
  std::fill_n(a.view(), kSharedBytes, std::byte{7});
  EXPECT_TRUE(a.exchange(b.offer(), b.worker.get()));
  try_it();
  std::fill_n(a.view(), kSharedBytes, std::byte{8});
  EXPECT_TRUE(a.exchange_again(b.offer(), b.worker.get()));
  EXPECT_EQ(std::count(b.view(), b.view() + kSharedBytes, std::byte{8}), kSharedBytes);
  a.give_back();
  b.give_back();
  gpu.fake().free(at);
}

INSTANTIATE_TEST_SUITE_P(Over, ForkedDevices, testing::Values("shm", "tcp"),
                         [](const auto& each) { return std::string(each.param); });

// As where somebody has taken the context away, and the driver has another word for that each time.
class TakenContext : public testing::TestWithParam<gpudirect::Result> {};
TEST_P(TakenContext, UnclaimableCopiesEnd) {
  gpudirect::CleanDriver fake;
  const gpudirect::Driver driver = FakeDriver::driver();
  const auto device = *Device::open(driver, 0);
  const auto buffer = *gpudirect::SlabBuffer::create(*device, 1 << 20);
  const auto ring = *gpudirect::PinnedRing::create(*device, 1 << 20);
  const internal::CopyRun run{buffer->data(), ring->memory().data(), 4096};
  ring->copy(internal::CopyDirection::kToHost, 5, false, {&run, 1});
  ring->progress([](uint64_t, const absl::Status&) {});
  fake.fail_next("cuCtxPushCurrent", GetParam(), SIZE_MAX);
  std::optional<absl::Status> ended;
  until([&] { return ended.has_value(); },
        [&] { ring->progress([&](uint64_t, absl::Status status) { ended = std::move(status); }); });
  EXPECT_FALSE(ended->ok());
  std::byte byte{};
  EXPECT_FALSE(buffer->get(0, {&byte, 1}).ok());
  fake.fail_next("cuCtxPushCurrent", GetParam());
  fake.run_all();
}
INSTANTIATE_TEST_SUITE_P(ForkedParts, TakenContext,
                         testing::Values(gpudirect::kInvalidContext, gpudirect::kUnknown));

// All that a user of gpudirect/ may have, with copies, a hold and launches that are on their way.
TEST(ForkedParts, AChildsCopiesEndAndTheParentsGoOn) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer's threads do not live on in a forked child";
  gpudirect::CleanDriver fake;
  const gpudirect::Driver driver = FakeDriver::driver();
  auto device = *Device::open(driver, 0);
  auto launcher = *Launcher::load(*device, FakeDriver::image());
  auto gates = *StreamGates::open(*device, 4);
  auto tickets = *LayerTickets::open(*device, *launcher, 3);
  auto buffer = *gpudirect::SlabBuffer::create(*device, 1 << 20);
  auto ring = *gpudirect::PinnedRing::create(*device, 1 << 20);
  auto copies = *gpudirect::StreamCopies::create(*device);
  gpudirect::Stream stream = nullptr;
  {
    const Device::Current current(*device);
    ASSERT_EQ(driver.cuStreamCreateWithPriority(&stream, gpudirect::kStreamNonBlocking, 0),
              gpudirect::kSuccess);
  }
  std::vector<std::byte> bytes(1 << 20, std::byte{3});
  ASSERT_TRUE(buffer->put(0, bytes).ok());
  const internal::CopyRun run{buffer->data(), ring->memory().data(), 512 << 10};
  ring->copy(internal::CopyDirection::kToHost, 5, false, {&run, 1});
  ASSERT_FALSE(ring->progress([](uint64_t, const absl::Status&) {}));
  const internal::DeviceRun inside{buffer->data(), buffer->data() + (768 << 10), 4096};
  ASSERT_TRUE(copies->begin(0, {&inside, 1}).ok());
  const auto held = gates->hold(stream, Clock::steady().now() + std::chrono::hours(1));
  ASSERT_TRUE(held.ok()) << held.status();
  ASSERT_TRUE(tickets->begin(stream).ok());
  ASSERT_TRUE(tickets->mark(stream, 1).ok());

  const auto end_all = [&] {  // but the device
    tickets.reset();
    gates.reset();
    copies.reset();
    ring.reset();
    buffer.reset();
    launcher.reset();
  };
  in_a_child([&] {
    expect_told(gates->after_stream(stream, Clock::steady().now()).status());
    expect_told(tickets->mark(stream, 2));
    expect_told(Device::open(driver, 0).status());
    expect_told(copies->begin(1, {&inside, 1}));
    expect_told(buffer->put(0, absl::MakeConstSpan(bytes).first(64)));
    expect_told(buffer->get(0, absl::MakeSpan(bytes).first(64)));
    expect_told(device->alive());
    end_all();
    device.reset();
  });

  ASSERT_TRUE(device->alive().ok());
  gates->end(held->gate, true);
  fake.run_all();
  std::optional<absl::Status> copied;
  ring->progress([&](uint64_t, absl::Status status) { copied = std::move(status); });
  ASSERT_TRUE(copied.has_value() && copied->ok());
  EXPECT_EQ(std::count(ring->memory().data(), ring->memory().data() + run.bytes, std::byte{3}),
            static_cast<ptrdiff_t>(run.bytes));
  EXPECT_EQ(copies->ended(0), absl::OkStatus());
  std::vector<uint32_t> told;
  ASSERT_TRUE(tickets->poll([&](uint64_t, uint32_t layer) { told.push_back(layer); }).ok());
  EXPECT_EQ(told, std::vector<uint32_t>{1});
  end_all();
  device->give_back([&] { driver.cuStreamDestroy(stream); });
}

}  // namespace
}  // namespace baton
