// What a worker knows of how quick its rails are, and what it makes of that.
#include "transport/internal/tables/rail_pace.h"

#include "tests/test.h"
#include "tests/transport/scripted_peers.h"

namespace baton {
namespace {

using internal::RailPace;
using std::chrono::milliseconds;
using std::chrono::seconds;
constexpr uint64_t kMebibyte = 1 << 20;

TEST(RailPace, IsBytesBySecondsInWhichSomeWereUnderWay) {
  RailPace pace;
  Time now = seconds(5);
  EXPECT_FALSE(pace.known(now));
  for (int i = 0; i < 8; ++i) {
    pace.took(kMebibyte, now);
    now += milliseconds(10);
    pace.moved(kMebibyte, now);
    now += seconds(1);  // idle: nobody's fault
  }
  EXPECT_TRUE(pace.known(now));
  EXPECT_NEAR(pace.rate(), 100.0 * kMebibyte, kMebibyte);
  EXPECT_EQ(pace.part_of(pace.rate() * 3.9, now), 1) << "about as quick";
  EXPECT_NEAR(pace.part_of(pace.rate() * 10, now), 0.1, 0.001);
  now += RailPace::kForgotten;
  EXPECT_EQ(pace.part_of(pace.rate() * 10, now), 1) << "it is tried again";
}

// The first one that comes up may be the slow one.
TEST_F(ScriptedPeers, ARailOfWhichNothingIsKnownHasFewSlices) {
  provider_->slice_bytes = kMebibyte;
  std::vector<char> memory(64 * kMebibyte);
  const HelloInfo who = caller(9, 100);
  const auto [peer, rail] = up(who);
  const MemoryRegion region = *worker_->register_memory(memory.data(), memory.size());
  ASSERT_TRUE(worker_->submit(write_of(region, peer, who.uid)).ok());
  turn();
  EXPECT_THAT(rail->held, testing::SizeIs(2));
  ASSERT_TRUE(worker_->notify_detached(peer, "small").ok());
  turn();
  EXPECT_THAT(rail->held, testing::SizeIs(3)) << "what is small does not wait for that";
  clock_.advance(milliseconds(1));
  report(*rail);
  EXPECT_THAT(rail->held, testing::SizeIs(32)) << "as many as it takes";
}

// Two rails of one provider; what they hold moves when the test says so.
class TwoRails : public ScriptedPeers {
 protected:
  TwoRails() : memory_(256 * kMebibyte) {
    provider_->slice_bytes = kMebibyte;
    who_ = caller(9, 100);
    std::tie(peer_, first_) = up(who_);
    second_ = &call_in(who_, 200);
    region_ = *worker_->register_memory(memory_.data(), memory_.size());
  }
  TransferId write(size_t bytes) {
    TransferRequest request = write_of(region_, peer_, who_.uid);
    request.local_layout = request.remote_layout = Layout::contiguous(0, bytes);
    const TransferId id = worker_->submit(request).value();
    turn();
    return id;
  }
  // The oldest slice that a rail holds is done.
  void report_one(ScriptedRail& rail) {
    ASSERT_FALSE(rail.held.empty());
    const Slice slice = rail.held.front();
    rail.held.erase(rail.held.begin());
    provider_->sink->slice_done(rail, slice.transfer->id, slice.index, absl::OkStatus());
    turn();
  }
  // Time passes in steps of 1 ms; a rail moves a slice when its time has come. Returns how many
  // milliseconds the transfer took.
  int run(TransferId id, int first_ms, int second_ms) {
    for (int ms = 1; ms < 100'000; ++ms) {
      clock_.advance(milliseconds(1));
      if (!first_->held.empty() && ++first_busy_ >= first_ms) {
        first_busy_ = 0;
        report_one(*first_);
      }
      if (!second_->held.empty() && ++second_busy_ >= second_ms) {
        second_busy_ = 0;
        ++by_second_;
        report_one(*second_);
      }
      if (*worker_->state(id) == TransferState::kDone) {
        EXPECT_TRUE(worker_->release(id).ok());
        return ms;
      }
    }
    return -1;
  }

  std::vector<char> memory_;
  HelloInfo who_;
  PeerId peer_;
  ScriptedRail* first_ = nullptr;
  ScriptedRail* second_ = nullptr;
  MemoryRegion region_;
  int first_busy_ = 0, second_busy_ = 0, by_second_ = 0;
};

// 256 slices of 1 MiB, 2 ms each by one rail and a second by the other: by the first alone they
// take 512 ms. Half of them by the other would take two minutes.
// Promise(network): A slow or lossy NIC gets only the share that it can carry | the rate of each
//   rail is measured from its slices
TEST_F(TwoRails, ASlowOneBesideAFastOneCostsAFewOfItsSlices) {
  for (const bool slow_first : {false, true}) {
    SCOPED_TRACE(slow_first);
    by_second_ = 0;
    const auto took = [&] {
      const TransferId id = write(256 * kMebibyte);
      return slow_first ? run(id, 1000, 2) : run(id, 2, 1000);
    };
    EXPECT_LE(took(), 2600) << "what it has before anything is known of it";
    for (int i = 0; i < 3; ++i) EXPECT_LE(took(), 1600) << "one that shows how it is now";
    clock_.advance(RailPace::kForgotten);
  }
}

TEST_F(TwoRails, SimilarRailsShareTheLoad) {
  for (int i = 0; i < 3; ++i) {
    by_second_ = 0;
    EXPECT_LE(run(write(256 * kMebibyte), 2, 4), 520);
    EXPECT_GT(by_second_, 64);
  }
}

TEST_F(TwoRails, OneThatHasBecomeQuickIsFoundOut) {
  for (int i = 0; i < 2; ++i) run(write(256 * kMebibyte), 2, 1000);
  clock_.advance(RailPace::kForgotten);
  run(write(64 * kMebibyte), 2, 2);
  by_second_ = 0;
  run(write(256 * kMebibyte), 2, 2);
  EXPECT_GT(by_second_, 64);
}

// A rail on which nothing moves gets nothing more: neither bulk nor messages, nor questions.
TEST_F(TwoRails, ASilentOneGetsNothingMore) {
  run(write(64 * kMebibyte), 2, 2);
  const TransferId id = write(8 * kMebibyte);
  const size_t stuck = first_->held.size();
  ASSERT_GT(stuck, 0u);
  for (int ms = 0; ms < 200; ++ms) {
    clock_.advance(milliseconds(1));
    if (!second_->held.empty()) report_one(*second_);
  }
  EXPECT_LE(first_->held.size(), stuck);
  const TransferId more = write(32 * kMebibyte);
  EXPECT_EQ(first_->held.size(), stuck) << "it got some";
  ASSERT_TRUE(worker_->notify_detached(peer_, "small").ok());
  turn();
  EXPECT_EQ(first_->held.size(), stuck) << "it got a message";
  for (int ms = 0; ms < 200; ++ms) {
    clock_.advance(milliseconds(1));
    if (!second_->held.empty()) report_one(*second_);
  }
  EXPECT_EQ(*worker_->state(more), TransferState::kDone);
  EXPECT_EQ(*worker_->state(id), TransferState::kActive);
}

TEST_F(TwoRails, WhatOneHasLostIsNotTriedOnOneThatIsNotKnown) {
  run(write(64 * kMebibyte), 2, 2);
  const TransferId id = write(8 * kMebibyte);
  ASSERT_FALSE(first_->held.empty());
  ScriptedRail& third = call_in(who_, 300);
  report(*first_, absl::UnavailableError("it stalled"));
  EXPECT_EQ(third.held.size(), 0u);
  while (!second_->held.empty() || !first_->held.empty()) {
    clock_.advance(milliseconds(1));
    report_one(second_->held.empty() ? *first_ : *second_);
  }
  EXPECT_EQ(*worker_->state(id), TransferState::kDone);
  write(8 * kMebibyte);
  EXPECT_GT(third.held.size(), 0u) << "what is new tries it";
}

}  // namespace
}  // namespace baton
