// Staged transfers under faults of the driver: each ends, with a clear error where it failed, and
// the host's memory goes on moving. That bytes get where they should is the conformance suite's.
#include "gpudirect/contract/staging.h"
#include "tests/gpudirect/fake/fake_driver.h"
#include "tests/gpudirect/staging/lent_pair.h"
#include "tests/test.h"
#include "transport/worker.h"

namespace baton {
namespace {

using gpudirect::FakeDriver;
using gpudirect::kMiB;
using ::testing::HasSubstr;

using Staged = StagedPair;

// Through pinned memory over tcp, and straight from the peer's ring over shm.
class StagedOrLent : public Lent, public testing::WithParamInterface<bool> {
 protected:
  static bool lent() { return GetParam(); }
  void begin(gpudirect::FakeOptions options = {}) {
    lent() ? lend(std::move(options)) : start("tcp", std::move(options));
  }
};
INSTANTIATE_TEST_SUITE_P(Ways, StagedOrLent, testing::Bool(), [](const auto& lent) {
  return std::string(lent.param ? "lent" : "staged");
});

// Promise(devices): A failing driver call ends the transfer with the driver's words; the next one
//   works | each call is made to fail in turn
TEST_P(StagedOrLent, WhicheverCallFailsTheTransferEndsAndTheNextOneWorks) {
  begin();
  size_t failed = 0;
  for (const Op op : {Op::kWrite, Op::kRead}) {
    for (uint64_t k = 1; k <= (lent() ? 40 : 60); ++k) {
      SCOPED_TRACE(testing::Message() << "call " << k);
      const std::string sent(600'000, static_cast<char>(k));
      gpu_->write(op == Op::kWrite ? a_.at : b_.at, sent);
      gpu_->fail_call_in(k, gpudirect::kOutOfMemory);
      const absl::Status status = run(request(op, true, true));
      gpu_->fail_call_in(0, gpudirect::kSuccess);  // should it not have come to that
      failed += status.ok() ? 0 : 1;
      if (!status.ok() && !lent()) {
        EXPECT_THAT(std::string(status.message()), HasSubstr("CUDA_ERROR_OUT_OF_MEMORY"));
      }
      ASSERT_TRUE(run(request(op, false, false)).ok()) << "host traffic goes on";
      const absl::Status next = run(request(op, true, true));
      ASSERT_TRUE(next.ok()) << next;
      ASSERT_TRUE(gpu_->read(op == Op::kWrite ? b_.at : a_.at, sent.size()) == sent);
    }
  }
  EXPECT_GT(failed, lent() ? 10u : 20u);
}

// Promise(devices): After a staged transfer ends, nothing of it moves | copies that began are
//   awaited; the target is asked
TEST_P(StagedOrLent, CancelledAtAnyRoundNothingIsCopiedAfterTheEnd) {
  begin();
  size_t stopped = 0;
  for (size_t rounds = 0; rounds < 80; ++rounds) {
    const TransferId id =
        *a_.worker->submit(request(rounds % 2 == 0 ? Op::kWrite : Op::kRead, true, true));
    turn(rounds / 2);
    ASSERT_TRUE(a_.worker->cancel(id).ok());
    if (!finish(id).ok()) ++stopped;
    const std::string reused(600'000, 'r');
    gpu_->write(a_.at, reused);
    gpu_->write(b_.at, reused);
    gpu_->run_all();
    turn(30);
    gpu_->run_all();
    ASSERT_TRUE(gpu_->read(b_.at, reused.size()) == reused) << "after " << rounds << " rounds";
    ASSERT_TRUE(gpu_->read(a_.at, reused.size()) == reused) << "after " << rounds << " rounds";
  }
  EXPECT_GT(stopped, 10u);
}

TEST_P(StagedOrLent, ALostDeviceEndsItsTransfersAndTheHostsGoOn) {
  for (size_t rounds = 0; rounds < 16; ++rounds) {
    SCOPED_TRACE(testing::Message() << "lost after " << rounds << " rounds");
    if (rounds != 0) TearDown();
    begin({.seed = rounds + 1});
    const TransferId id =
        *a_.worker->submit(request(rounds % 2 == 0 ? Op::kWrite : Op::kRead, true, true, kBytes));
    turn(rounds);
    gpu_->lose();
    const absl::Status status = finish(id);
    // Over already, or aborted: which of them is the matter of a few rounds only.
    EXPECT_TRUE(absl::IsAborted(status) || (!lent() && status.ok() && rounds > 8)) << status;
    EXPECT_TRUE(run(request(Op::kWrite, false, false)).ok());
    EXPECT_TRUE(absl::IsAborted(run(request(Op::kRead, true, false)))) << "it stays lost";
  }
}

// Promise(devices): Urgent transfers overtake staged bulk; no copy is longer than 4 MiB | room of
//   its own in the ring, two copies queued ahead
TEST_F(Staged, WhatIsUrgentOvertakesBulk) {
  start("tcp", {.seed = 7});
  const TransferId bulk = *a_.worker->submit(request(Op::kWrite, true, true, kBytes));
  until([&] { return gpu_->copies() > 2; });
  ASSERT_TRUE(run(request(Op::kWrite, true, true, 4096)).ok());
  EXPECT_EQ(*a_.worker->state(bulk), TransferState::kActive);
  EXPECT_TRUE(finish(bulk).ok());
  EXPECT_LE(gpu_->largest_copy(), gpudirect::PinnedRing::kLongestCopy);
}

// Straight at a ring: what waits behind a copy that has begun waits for all of it.
TEST_F(Staged, WhereSomethingUrgentComesByBulkGoesInShortCopies) {
  start();
  const auto ring = must(installed_->memory().staging_ring(0, 16 * kMiB, false));
  std::vector<uint64_t> order;
  const auto copy = [&](uint64_t cookie, bool urgent, size_t bytes) {
    const internal::CopyRun piece{reinterpret_cast<std::byte*>(uintptr_t{a_.at}),
                                  ring->memory().data(), bytes};
    ring->copy(internal::CopyDirection::kToHost, cookie, urgent, {&piece, 1});
  };
  const auto finish_all = [&] {
    baton::until([&] { return !ring->busy(); },
                 [&] {
                   ring->progress([&](uint64_t cookie, const absl::Status& status) {
                     order.push_back(cookie);
                     EXPECT_TRUE(status.ok() || absl::IsCancelled(status)) << status;
                   });
                 });
  };
  const auto copies = [&](const std::function<void()>& what) {
    const uint64_t before = gpu_->copies();
    what();
    finish_all();
    return gpu_->copies() - before;
  };
  EXPECT_EQ(copies([&] { copy(1, false, 4 * kMiB); }), 1u);
  EXPECT_EQ(copies([&] {
              copy(2, true, 1000);
              copy(3, false, 4 * kMiB);
            }),
            5u);
  // It passes bulk that has begun.
  order.clear();
  copy(4, false, 4 * kMiB);
  ring->progress([](uint64_t, const absl::Status&) {});
  copy(5, true, 1000);
  finish_all();
  EXPECT_EQ(order, (std::vector<uint64_t>{5, 4}));
  // Bulk that has begun and is dropped ends when its parts have, and once.
  order.clear();
  copy(6, false, 4 * kMiB);
  ring->progress([](uint64_t, const absl::Status&) {});
  ring->drop(6);
  copy(7, false, kMiB);
  finish_all();
  EXPECT_EQ(order, (std::vector<uint64_t>{6, 7}));
  // For so many bytes, and no more.
  constexpr size_t kRounds = gpudirect::PinnedRing::kShortFor / (4 * kMiB) + 1;
  for (size_t i = 0; i < kRounds; ++i) {
    copies([&] { copy(8, false, 4 * kMiB); });
  }
  EXPECT_EQ(copies([&] { copy(9, false, 4 * kMiB); }), 1u);
}

// Each call of the driver fails once while bulk goes in parts: it ends once, and with the error.
TEST_F(Staged, WhicheverPartOfACopyFailsItEndsOnce) {
  start();
  for (uint64_t k = 1; k <= 16; ++k) {
    SCOPED_TRACE(k);
    const auto ring = must(installed_->memory().staging_ring(0, 16 * kMiB, false));
    size_t ends = 0;
    absl::Status bulk;
    const internal::CopyRun piece{reinterpret_cast<std::byte*>(uintptr_t{a_.at}),
                                  ring->memory().data(), 4 * kMiB};
    const internal::CopyRun small{piece.device, piece.host, 1000};
    ring->copy(internal::CopyDirection::kToHost, 1, true, {&small, 1});
    ring->copy(internal::CopyDirection::kToHost, 2, false, {&piece, 1});
    gpu_->fail_call_in(k, gpudirect::kOutOfMemory);
    baton::until([&] { return !ring->busy(); },
                 [&] {
                   ring->progress([&](uint64_t cookie, const absl::Status& status) {
                     ++ends;
                     if (cookie == 2) bulk = status;
                   });
                 });
    gpu_->fail_call_in(0, gpudirect::kSuccess);
    EXPECT_EQ(ends, 2u);
    if (bulk.ok()) continue;
    EXPECT_THAT(std::string(bulk.message()), HasSubstr("OUT_OF_MEMORY"));
  }
}

// Promise(devices): A counter rises when the bytes are on the target's device | the target answers
//   after its copy
TEST_F(Staged, TheCounterRisesWhenTheCopyHasEndedOnTheDevice) {
  start();
  const CounterId counter = *b_.worker->allocate_counter();
  for (uint64_t round = 1; round <= 50; ++round) {
    const std::string sent(700'000, static_cast<char>(round));
    gpu_->write(a_.at, sent);
    TransferRequest write = request(Op::kWrite, true, true, sent.size());
    write.counter = b_.worker->remote_counter(counter);
    write.notify = "all there";
    const TransferId id = *a_.worker->submit(write);
    until([&] { return b_.worker->counter_value(counter) == round; });
    ASSERT_TRUE(gpu_->read(b_.at, sent.size()) == sent) << "risen too early";
    EXPECT_TRUE(finish(id).ok());
  }
  Notification heard;
  size_t count = 0;
  while (b_.worker->next_notification(heard)) ++count;
  EXPECT_EQ(count, 50u);
}

TEST_F(Staged, APeerThatGoesLeavesNothingThatMoves) {
  for (const size_t rounds : {0, 2, 4, 8, 16, 32}) {
    start("tcp", {.seed = rounds + 1});
    const TransferId id = *a_.worker->submit(request(Op::kWrite, true, true, kBytes));
    turn(rounds);
    a_.worker->disconnect(a_.peer, Time::zero()).IgnoreError();
    const absl::Status status = finish(id);
    EXPECT_TRUE(status.ok() || absl::IsUnavailable(status)) << status;
    until([&] { return b_.worker->stats().peers_up == 0; });
    ASSERT_TRUE(b_.worker->deregister_memory(b_.device_region).ok());
    EXPECT_TRUE(a_.worker->deregister_memory(a_.device_region).ok());
    EXPECT_EQ(gpu_->queued(), 0u) << "a copy is still to come";
    if (rounds != 32) TearDown();
  }
}

TEST_F(Staged, ExplainSaysThatAndWhy) {
  start();
  const std::string text = a_.worker->explain(a_.peer);
  EXPECT_THAT(text, HasSubstr("CUDA device 0: staged through 16 MiB"));
  EXPECT_THAT(text, HasSubstr("tcp moves bytes by the CPU"));
}

// 1,024 pages of 1 KiB with gaps between them, from a device to the host and back.
class StagedPages : public StagedPair {
 protected:
  static constexpr size_t kPages = 1024;
  static constexpr size_t kPage = 1024;
  void favour(gpudirect::CopyWay way) {
    means_.kernels = FakeDriver::image();
    means_.table = gpudirect::costs_that_favour(way);
  }
  void move_pages() {
    std::vector<uint32_t> pages(kPages);
    for (uint32_t i = 0; i < kPages; ++i) pages[i] = kPages - 1 - i;  // no neighbours
    for (const Op op : {Op::kWrite, Op::kRead}) {
      gpu_->write(a_.at, std::string(kBytes, '-'));
      std::string sent(kPages * kPage, '\0');
      for (size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<char>(i * 31 % 253);
      if (op == Op::kWrite) {
        for (size_t i = 0; i < kPages; ++i) {
          gpu_->write(a_.at + pages[i] * 2 * kPage, sent.substr(i * kPage, kPage));
        }
      } else {
        std::copy(sent.begin(), sent.end(), reinterpret_cast<char*>(b_.host.data()));
      }
      TransferRequest move = request(op, true, false, kPages * kPage);
      move.local_layout = Layout::paged(0, pages, 2 * kPage, kPage);
      ASSERT_TRUE(run(move).ok());
      if (op == Op::kWrite) {
        EXPECT_EQ(std::string_view(reinterpret_cast<char*>(b_.host.data()), sent.size()), sent);
      } else {
        for (size_t i = 0; i < kPages; ++i) {
          ASSERT_EQ(gpu_->read(a_.at + pages[i] * 2 * kPage, kPage), sent.substr(i * kPage, kPage));
        }
      }
    }
  }
};

// Every byte ends as that of a piece that lies there; to the host, and to devices by each way.
class StagedOverlaps : public StagedPages,
                       public testing::WithParamInterface<gpudirect::CopyWay> {};
TEST_P(StagedOverlaps, EndAsOneOfThem) {
  favour(GetParam());
  start();
  std::string sent(2 * kPages * kPage, '\0');
  for (size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<char>(i * 31 / kPage);
  gpu_->write(a_.at, sent);
  std::copy(sent.begin(), sent.end(), reinterpret_cast<char*>(b_.host.data()));
  const std::vector<uint32_t> same(kPages, 3);
  const Layout apart = Layout::strided(0, kPages, 2 * kPage, kPage);
  for (const Layout& over :
       {Layout::paged(0, same, kPage, kPage), Layout::strided(0, kPages, 0, kPage),
        Layout::strided(0, kPages, kPage / 2, kPage)}) {
    for (const bool far : {false, true}) {
      TransferRequest move = request(Op::kWrite, true, far);
      move.local_layout = apart;
      move.remote_layout = over;
      ASSERT_TRUE(run(move).ok());
      const size_t end = 4 * kPage + kPages * kPage / 2;
      std::string there(reinterpret_cast<char*>(b_.host.data()), end);
      if (far) there = gpu_->read(b_.at, end);
      std::vector<bool> written(end), of_one(end);
      LayoutWalker to(over, 0), from(apart, 0);
      for (size_t left = apart.bytes(); left > 0; --left) {
        written[to.offset()] = true;
        if (there[to.offset()] == sent[from.offset()]) of_one[to.offset()] = true;
        if (left > 1) {
          to.advance(1);
          from.advance(1);
        }
      }
      EXPECT_EQ(of_one, written);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Ways, StagedOverlaps,
                         testing::Values(gpudirect::CopyWay::kBatch, gpudirect::CopyWay::kPacked,
                                         gpudirect::CopyWay::kKernel),
                         [](const auto& each) {
                           std::string name(name_of(each.param));
                           std::replace(name.begin(), name.end(), ' ', '_');
                           return name;
                         });

TEST_F(StagedPages, ArePackedByAKernelWhereThatCostsLeast) {
  favour(gpudirect::CopyWay::kPacked);
  start();
  EXPECT_THAT(a_.worker->explain(a_.peer), HasSubstr("to the host by 'packed'"));
  const uint64_t launches = gpu_->calls_of("cuLaunchKernel");
  const uint64_t copies = gpu_->calls_of("cuMemcpyAsync");
  move_pages();
  EXPECT_GT(gpu_->calls_of("cuLaunchKernel"), launches);
  EXPECT_LT(gpu_->calls_of("cuMemcpyAsync") - copies, kPages / 4);
}

TEST_F(StagedPages, AreCopiedByEnginesAloneWhereNoKernelMayRun) {
  favour(gpudirect::CopyWay::kPacked);
  settings_ = {{"staging.kernels", "off"}};
  start();
  EXPECT_THAT(a_.worker->explain(a_.peer), testing::Not(HasSubstr("'packed'")));
  move_pages();
  EXPECT_EQ(gpu_->calls_of("cuLaunchKernel"), 0u);
}

TEST_F(StagedPages, WhatCopiesCostIsMeasuredOnceForADevice) {
  means_ = {.kernels = FakeDriver::image(), .table = std::nullopt};
  start();
  const uint64_t calls = gpu_->calls();
  auto third =
      must(Worker::create({.providers = {"tcp"}, .settings = {{"staging.ring_mib", "16"}}}));
  ASSERT_TRUE(third->register_memory(reinterpret_cast<void*>(uintptr_t{b_.at}), kBytes).ok());
  EXPECT_LT(gpu_->calls() - calls, 200u);
  move_pages();
}

// A device that is full has no room for packing: its memory moves all the same.
TEST_F(StagedPages, AFullDeviceIsCopiedWithoutKernels) {
  favour(gpudirect::CopyWay::kPacked);
  gpudirect::FakeOptions full;
  full.memory_bytes = kBytes;
  start("tcp", std::move(full));
  move_pages();
  EXPECT_EQ(gpu_->calls_of("cuLaunchKernel"), 0u);
}

}  // namespace
}  // namespace baton
