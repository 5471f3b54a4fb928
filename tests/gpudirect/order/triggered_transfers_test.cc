// Transfers that kernels start: what was prepared moves, and nothing else does, whatever is asked.
#include "gpudirect/triggers/triggered_transfers.h"

#include "gpudirect/launcher.h"
#include "tests/gpudirect/staged_pair.h"
#include "tests/test.h"

namespace baton {
namespace {

using gpudirect::Device;
using gpudirect::DevicePointer;
using gpudirect::FakeDriver;
using gpudirect::Launcher;
using gpudirect::Trigger;
using gpudirect::TriggeredTransfers;
using gpudirect::TriggerFifo;
using ::testing::HasSubstr;

class Triggered : public StagedPair {
 protected:
  static constexpr uint32_t kPages = 200;
  static constexpr size_t kPage = 3000;

  void begin(uint32_t max_transfers = 4096) {
    max_transfers_ = max_transfers;
    start();
    device_ = *Device::open(driver_, 0);
    launcher_ = *Launcher::load(*device_, FakeDriver::image());
    fifo_ = *TriggerFifo::open(*device_, 64);
    transfers_ = std::make_unique<TriggeredTransfers>(*a_.worker, fifo_->consumer());
    asked_ = gpu_->allocate(1 << 20);
    std::string sent(kBytes, '\0');
    for (size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<char>(i * 7 % 251);
    gpu_->write(a_.at, sent);
    gpu_->write(b_.at, std::string(kBytes, '-'));
  }
  void TearDown() override {
    transfers_.reset();
    for (Side* side : {&a_, &b_}) side->worker.reset();
    gpu_->run_all();
    fifo_.reset();
    launcher_.reset();
    if (asked_ != 0) gpu_->free(asked_);
    device_.reset();
    StagedPair::TearDown();
  }
  // Page i of the list here to the one at 2 i there.
  TransferRequest pages() {
    TransferRequest out = request(Op::kWrite, true, true);
    list_.resize(kPages);
    std::iota(list_.begin(), list_.end(), 0u);
    std::shuffle(list_.begin(), list_.end(), std::mt19937_64(4));
    out.local_layout = Layout::paged(0, list_, kPage, kPage);
    out.remote_layout = Layout::strided(0, kPages, 2 * kPage, kPage);
    return out;
  }
  // A kernel that asks; which of them the queue took.
  std::vector<uint32_t> push(const std::vector<Trigger>& triggers) {
    gpu_->write(asked_, {reinterpret_cast<const char*>(triggers.data()),
                         triggers.size() * sizeof(Trigger)});
    const DevicePointer accepted = asked_ + (512 << 10);
    const gpudirect::kernels::PushTriggers arguments{
        fifo_->device_handle(), reinterpret_cast<const Trigger*>(uintptr_t{asked_}),
        reinterpret_cast<uint32_t*>(uintptr_t{accepted}), static_cast<uint32_t>(triggers.size())};
    {
      const Device::Current current(*device_);
      EXPECT_TRUE(
          launcher_->push_triggers(arguments, 1, device_->stream(gpudirect::Direction::kBetween))
              .ok());
    }
    gpu_->run_all();
    const std::string bytes = gpu_->read(accepted, triggers.size() * sizeof(uint32_t));
    std::vector<uint32_t> out(triggers.size());
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(out.data()));
    return out;
  }
  void until_idle(CallSite from = CallSite::here()) {
    until([&] { return !transfers_->progress() && transfers_->idle(); }, from);
  }
  void expect_pages(size_t from, size_t to) {
    for (size_t i = 0; i < kPages; ++i) {
      const std::string there = gpu_->read(b_.at + 2 * i * kPage, kPage);
      ASSERT_EQ(there, i >= from && i < to ? gpu_->read(a_.at + list_[i] * kPage, kPage)
                                           : std::string(kPage, '-'))
          << i;
      ASSERT_EQ(gpu_->read(b_.at + (2 * i + 1) * kPage, kPage), std::string(kPage, '-')) << i;
    }
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Launcher> launcher_;
  std::unique_ptr<TriggerFifo> fifo_;
  std::unique_ptr<TriggeredTransfers> transfers_;
  DevicePointer asked_ = 0;
  std::vector<uint32_t> list_;
};

TEST_F(Triggered, AKernelStartsThePiecesThatItNames) {
  begin();
  auto number = transfers_->prepare(pages());
  ASSERT_TRUE(number.ok()) << number.status();
  const std::vector<uint32_t> order = list_;
  std::fill(list_.begin(), list_.end(), 0u);  // it was copied
  std::vector<Trigger> todo;
  for (uint32_t first = 20; first < 180; first += 4) todo.push_back({*number, first, 4, 0});
  baton::until([&] { return todo.empty(); },
               [&] {
                 const std::vector<uint32_t> accepted = push(todo);
                 std::vector<Trigger> again;
                 for (size_t i = 0; i < todo.size(); ++i) {
                   if (accepted[i] == 0) again.push_back(todo[i]);
                 }
                 todo = std::move(again);
                 until_idle();
               });
  list_ = order;
  const TriggeredTransfers::State state = transfers_->state(*number);
  EXPECT_EQ(state.started, 40u);
  EXPECT_EQ(state.done, 40u);
  EXPECT_EQ(state.failed, 0u) << state.last_failure;
  expect_pages(20, 180);
}

// The worker has four slots, one of which it lends to a peer at a time: what was taken waits.
TEST_F(Triggered, WithoutASlotTheyWaitAndNoneIsLost) {
  begin(4);
  const uint32_t number = *transfers_->prepare(pages());
  std::vector<Trigger> todo;
  for (uint32_t first = 0; first < 60; ++first) todo.push_back({number, first, 1, 0});
  EXPECT_EQ(push(todo), std::vector<uint32_t>(60, 1));
  until_idle();
  EXPECT_EQ(transfers_->state(number).done, 60u);
  expect_pages(0, 60);
}

TEST_F(Triggered, AnEarlierEpochStartsNothing) {
  begin();
  const uint32_t number = *transfers_->prepare(pages());
  EXPECT_EQ(*transfers_->renew(number), 1u);
  EXPECT_TRUE(absl::IsNotFound(transfers_->renew(number + 1).status()));
  push({{number, 0, 1, 0}, {number, 3, 2, 1}});
  until_idle();
  EXPECT_EQ(transfers_->state(number).started, 1u);
  EXPECT_EQ(fifo_->consumer().refused(), 1u);
  expect_pages(3, 5);
}

// The worker starts a few of them; what is under the transfer may be other memory when it is
// renewed.
TEST_F(Triggered, WhatWaitedForASlotIsRefusedOnceItsTransferIsRenewed) {
  begin(4);
  const uint32_t number = *transfers_->prepare(pages());
  for (const bool by_the_queue : {false, true}) {
    const uint64_t started = transfers_->state(number).started;
    const uint64_t refused = fifo_->consumer().refused();
    const uint32_t epoch = by_the_queue ? 1 : 0;
    std::vector<Trigger> todo;
    for (uint32_t first = 0; first < 40; ++first) todo.push_back({number, first, 1, epoch});
    ASSERT_EQ(push(todo), std::vector<uint32_t>(40, 1));
    ASSERT_TRUE(transfers_->progress());
    const uint64_t went = transfers_->state(number).started - started;
    ASSERT_GT(went, 0u);
    ASSERT_LT(went, 40u);
    EXPECT_EQ(by_the_queue ? *fifo_->consumer().renew(number) : *transfers_->renew(number),
              epoch + 1);
    // Of those that wait; the queue alone knows of none.
    EXPECT_EQ(fifo_->consumer().refused() - refused, by_the_queue ? 0 : 40 - went);
    until_idle();
    EXPECT_EQ(transfers_->state(number).started - started, went);
    EXPECT_EQ(fifo_->consumer().refused() - refused, 40 - went);
  }
  push({{number, 50, 1, 2}});
  const uint64_t before = transfers_->state(number).done;
  until_idle();
  EXPECT_EQ(transfers_->state(number).done, before + 1);
}

// `b` says nothing, and has its share of the worker's slots: what is asked for `c` goes.
TEST_F(Triggered, ASilentPeerHoldsUpNoOther) {
  begin(64);
  WorkerOptions options;
  options.name = "c";
  options.providers = {"tcp"};
  options.key = *ClusterKey::from_bytes("a secret of the tests");
  options.settings = {{"staging.ring_mib", "16"}, {"peer.redial_ms", "0"}};
  auto other = *Worker::create(std::move(options));
  const DevicePointer at = gpu_->allocate(kBytes);
  const MemoryRegion region =
      *other->register_memory(reinterpret_cast<void*>(uintptr_t{at}), kBytes);
  const PeerId peer = *a_.worker->connect(other->address());
  const auto until = [&](const std::function<bool()>& fact) {
    StagedPair::until([&] {
      other->progress();
      transfers_->progress();
      return fact();
    });
  };
  until([&] { return a_.worker->peer_state(peer) == PeerState::kUp; });
  const uint32_t silent = *transfers_->prepare(pages());
  TransferRequest request = pages();
  request.peer = peer;
  request.remote = *other->remote_region(region);
  const uint32_t well = *transfers_->prepare(request);
  std::vector<Trigger> todo;
  for (uint32_t i = 0; i < 58; ++i) todo.push_back({silent, i, 1, 0});
  for (uint32_t i = 0; i < 5; ++i) todo.push_back({well, i, 1, 0});
  ASSERT_EQ(push(todo), std::vector<uint32_t>(63, 1));
  baton::until([&] { return transfers_->state(well).done == 5; },  // though b says nothing
               [&] {
                 transfers_->progress();
                 a_.worker->progress();
                 other->progress();
               },
               [&] { return state_of(*a_.worker, peer, "a"); });
  EXPECT_LT(transfers_->state(silent).started, 58u) << "nothing waits, so nothing was tested";

  // So many are put aside, and no more: then kernels find the queue full.
  size_t accepted = 0, round = 0;
  do {
    round = 0;
    for (const uint32_t each : push(std::vector<Trigger>(64, {silent, 0, 1, 0}))) round += each;
    accepted += round;
    for (int i = 0; i < 3; ++i) transfers_->progress();
  } while (round > 0 && accepted < 10'000);
  EXPECT_LE(accepted, TriggeredTransfers::kMostWaiting + 64 + 64);
  until([&] { return transfers_->idle(); });
  EXPECT_EQ(transfers_->state(silent).done, 58 + accepted)
      << transfers_->state(silent).last_failure;
  transfers_.reset();
  other.reset();
  gpu_->run_all();
  gpu_->free(at);
}

TEST_F(Triggered, WhateverAKernelWritesOnlyPreparedPagesMove) {
  begin();
  const uint32_t number = *transfers_->prepare(pages());
  std::mt19937_64 random(7);
  for (int round = 0; round < 30; ++round) {
    std::vector<Trigger> wild(60);
    for (Trigger& trigger : wild) {
      trigger = {static_cast<uint32_t>(random() % 3),
                 static_cast<uint32_t>(random() % (3 * kPages)),
                 static_cast<uint32_t>(random() % 5), static_cast<uint32_t>(random() % 2)};
      if (random() % 8 == 0) trigger.first = static_cast<uint32_t>(random());
      if (random() % 8 == 0) trigger.count = static_cast<uint32_t>(random());
    }
    push(wild);
    until_idle();
  }
  EXPECT_GT(transfers_->state(number).done, 0u);
  EXPECT_EQ(transfers_->state(number).failed, 0u);
  EXPECT_GT(fifo_->consumer().refused(), 0u);
  for (size_t i = 0; i < kPages; ++i) {
    ASSERT_EQ(gpu_->read(b_.at + (2 * i + 1) * kPage, kPage), std::string(kPage, '-')) << i;
  }
  const size_t end = 2 * kPages * kPage;
  EXPECT_EQ(gpu_->read(b_.at + end, 100'000), std::string(100'000, '-'));
}

TEST_F(Triggered, WhatFailsIsCountedWithItsReason) {
  begin();
  TransferRequest request = pages();
  request.timeout = std::chrono::seconds(5);
  const uint32_t number = *transfers_->prepare(request);
  a_.worker->disconnect(a_.peer, Time::zero()).IgnoreError();  // the other one does not answer
  push({{number, 0, 1, 0}, {number, 1, 1, 0}});
  baton::until([&] { return !transfers_->progress() && transfers_->idle(); },
               [&] { a_.worker->progress(); });
  EXPECT_EQ(transfers_->state(number).failed, 2u);
  EXPECT_FALSE(transfers_->state(number).last_failure.ok());
}

// Nor does other memory move that is registered in its place, at either side.
TEST_F(Triggered, OfMemoryThatWasTakenBackNothingMoves) {
  begin();
  const uint32_t number = *transfers_->prepare(pages());
  for (Side* side : {&b_, &a_}) {
    ASSERT_TRUE(side->worker->deregister_memory(side->device_region).ok());
    side->device_region =
        *side->worker->register_memory(gpudirect::pointer_of<void>(side->at), kBytes);
    push({{number, 0, 4, 0}});
    const uint64_t before = transfers_->state(number).failed;
    until_idle();
    EXPECT_EQ(transfers_->state(number).failed, before + 1);
    EXPECT_TRUE(absl::IsNotFound(transfers_->state(number).last_failure))
        << transfers_->state(number).last_failure;
  }
  expect_pages(0, 0);
}

TEST_F(Triggered, AStateIsReadWhileMoreArePrepared) {
  begin();
  ASSERT_EQ(*transfers_->prepare(pages()), 0u);
  std::atomic<bool> over{false};
  std::thread reader([&] {
    uint64_t started = 0;
    while (!over) started += transfers_->state(0).started;
    EXPECT_EQ(started, 0u);
  });
  for (int i = 0; i < 500; ++i) ASSERT_TRUE(transfers_->prepare(pages()).ok());
  over = true;
  reader.join();
  EXPECT_TRUE(transfers_->state(500).last_failure.ok());
  EXPECT_TRUE(absl::IsNotFound(transfers_->state(501).last_failure));
}

TEST_F(Triggered, TheEndWaitsForWhatWasStarted) {
  begin();
  const uint32_t number = *transfers_->prepare(pages());
  push({{number, 0, kPages, 0}});
  ASSERT_TRUE(transfers_->progress());
  a_.worker->progress();  // it is under way, and the other side has not moved
  std::atomic<bool> over{false};
  std::thread other(
      [&] { baton::until([&] { return over.load(); }, [&] { b_.worker->progress(); }); });
  transfers_.reset();
  over = true;
  other.join();
  EXPECT_TRUE(a_.worker->deregister_memory(a_.device_region).ok());
}

// What kernels still ask for by the numbers of one that has ended is nobody's.
TEST_F(Triggered, TheNextOfAQueueStartsNothingOfTheOneBefore) {
  begin();
  const uint32_t before = *transfers_->prepare(pages());
  push({{before, 0, 1, 0}});
  transfers_ = nullptr;
  fifo_->consumer().take(64, [](const Trigger&) { ADD_FAILURE() << "nobody has prepared it"; });
  transfers_ = std::make_unique<TriggeredTransfers>(*a_.worker, fifo_->consumer());
  until_idle();
  EXPECT_EQ(fifo_->consumer().refused(), 1u);
  const uint32_t number = *transfers_->prepare(pages());
  EXPECT_NE(number, before);
  push({{before, 1, 1, 0}, {number, 3, 2, 0}});
  until_idle();
  EXPECT_EQ(fifo_->consumer().refused(), 2u);
  EXPECT_EQ(transfers_->state(number).done, 1u);
  EXPECT_TRUE(absl::IsNotFound(transfers_->state(before).last_failure));
  EXPECT_TRUE(absl::IsNotFound(transfers_->renew(before).status()));
  EXPECT_EQ(*transfers_->renew(number), 1u);
  expect_pages(3, 5);
}

TEST_F(Triggered, WhatSomebodyElseHasPreparedStartsNothing) {
  begin();
  ASSERT_TRUE(transfers_->prepare(pages()).ok());
  const uint32_t other = fifo_->consumer().prepare(10);
  push({{other, 0, 1, 0}, {other, 1, 1, 0}});
  until_idle();
  EXPECT_EQ(fifo_->consumer().refused(), 2u);
  expect_pages(0, 0);
  const absl::Status status = transfers_->prepare(pages()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
}

TEST_F(Triggered, WhatCannotBePreparedIsRefused) {
  begin();
  TransferRequest bad = pages();
  bad.remote_layout = Layout::strided(0, kPages - 1, kPage, kPage);
  EXPECT_THAT(std::string(transfers_->prepare(bad).status().message()), HasSubstr("pieces"));
  bad = pages();
  bad.remote_layout = Layout::strided(0, kPages, kPage, kPage - 1);
  EXPECT_THAT(std::string(transfers_->prepare(bad).status().message()), HasSubstr("size"));
  bad = pages();
  bad.release = {0, nullptr};
  EXPECT_THAT(std::string(transfers_->prepare(bad).status().message()), HasSubstr("streams"));
  bad = pages();
  bad.detached = true;
  EXPECT_FALSE(transfers_->prepare(bad).ok());
  // More than a trigger can name, and a layout that is none.
  for (const size_t count : {size_t{1} << 32, (size_t{1} << 32) + 1}) {
    bad = pages();
    bad.local_layout = bad.remote_layout = Layout::strided(0, count, 0, 1);
    EXPECT_THAT(std::string(transfers_->prepare(bad).status().message()), HasSubstr("32 bits"));
  }
  bad = pages();
  for (int i = 0; i < Layout::kMaxDims; ++i) bad.local_layout = bad.local_layout.repeated(2, 1);
  bad.remote_layout = bad.local_layout;
  EXPECT_THAT(std::string(transfers_->prepare(bad).status().message()), HasSubstr("dimensions"));
  // Refused when it is started, as the worker refuses it.
  bad = pages();
  bad.local_layout = Layout::paged(kBytes, list_, kPage, kPage);
  const uint32_t number = *transfers_->prepare(bad);
  push({{number, 0, 1, 0}});
  until_idle();
  EXPECT_EQ(transfers_->state(number).last_failure.code(), absl::StatusCode::kOutOfRange);
}

}  // namespace
}  // namespace baton
