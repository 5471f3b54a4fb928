// disconnect(): when it is over, no byte moves between the two any more, whoever submitted it.
#include <random>

#include "tests/conformance/harness.h"

namespace baton {
namespace {

class Partings : public Conformance {
 protected:
  static constexpr size_t kBytes = 1 << 20;

  // Reads and writes of both sides, over each other.
  void submit_many(size_t count) {
    for (size_t i = 0; i < count; ++i) {
      Side& from = i % 3 == 0 ? b_ : a_;
      Side& to = i % 3 == 0 ? a_ : b_;
      open_.emplace_back(&from, submit(from, request(i % 2 ? Op::kRead : Op::kWrite, from, to, 0,
                                                     i % 5 == 0 ? kBytes : 10'000)));
    }
  }
  bool down(Side& side) { return side.worker->peer_state(side.peer) == PeerState::kDown; }

  // All of side's own have ended; whose end it was not failed because of that.
  void expect_ended(const Side& side) {
    for (const auto& [owner, id] : open_) {
      if (owner != &side) continue;
      EXPECT_TRUE(baton::ended(*owner->worker->state(id)));
      const absl::Status status = owner->worker->status(id);
      EXPECT_TRUE(status.ok() || absl::IsUnavailable(status)) << status;
    }
  }

  void reuse_all() {
    std::fill_n(a_.data(), kBytes, kReused);
    std::fill_n(b_.data(), kBytes, kReused);
  }
  void expect_still() {
    nudge(sim() ? 10'000 : 100);
    ASSERT_TRUE(holds(a_.data(), kBytes, kReused)) << "bytes moved after disconnect() was over";
    ASSERT_TRUE(holds(b_.data(), kBytes, kReused)) << "bytes moved at the peer after it was over";
  }

  void again() {
    until([&] { return down(a_) && down(b_); });
    for (const auto& [owner, id] : open_) (void)finish(*owner, id);
    open_.clear();
    std::tie(a_.peer, b_.peer) = connect(a_, b_);
  }

  std::mt19937_64 random_{16};
  std::vector<std::pair<Side*, TransferId>> open_;
};

// Promise(disconnect): After `disconnect()` returns OK no byte of any transfer with that peer
//   moves, on either side | both sides stop what is open and wait for its end (`kPart`)
TEST_P(Partings, NothingMovesWhenItIsOver) {
  for (int round = 0, all = rounds(20); round < all; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    submit_many(60);
    nudge(random_() % (sim() ? 300 : 30));
    Side& leaving = round % 2 ? b_ : a_;
    leaving.worker->begin_disconnect(leaving.peer);
    // What is submitted from now on fails, and does not move.
    Side& other = round % 2 ? a_ : b_;
    open_.emplace_back(&leaving, submit(leaving, request(Op::kWrite, leaving, other, 0, 100)));
    until([&] { return down(leaving); });
    EXPECT_TRUE(leaving.worker->disconnect(leaving.peer).ok())
        << leaving.worker->disconnect(leaving.peer);
    expect_ended(leaving);
    EXPECT_TRUE(absl::IsUnavailable(leaving.worker->status(open_.back().second)));
    reuse_all();
    expect_still();
    expect_ended(other);
    EXPECT_THAT(std::string(other.worker->peer_status(other.peer).message()),
                testing::HasSubstr("closed the connection"));
    EXPECT_TRUE(other.worker->disconnect(other.peer).ok()) << "it was asked, and agreed";
    again();
  }
}

TEST_P(Partings, BothAtOnce) {
  for (int round = 0, all = rounds(20); round < all; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    submit_many(30);
    nudge(random_() % (sim() ? 200 : 20));
    a_.worker->begin_disconnect(a_.peer);
    nudge(random_() % (sim() ? 100 : 10));
    b_.worker->begin_disconnect(b_.peer);
    Side& first = round % 2 ? b_ : a_;
    until([&] { return down(first); });
    EXPECT_TRUE(first.worker->disconnect(first.peer).ok());
    reuse_all();
    expect_still();
    until([&] { return down(a_) && down(b_); });
    EXPECT_TRUE(a_.worker->disconnect(a_.peer).ok()) << a_.worker->disconnect(a_.peer);
    EXPECT_TRUE(b_.worker->disconnect(b_.peer).ok()) << b_.worker->disconnect(b_.peer);
    expect_ended(a_);
    expect_ended(b_);
    again();
  }
}

// A transfer whose message waits for credit is open, and nobody has to read for it to end.
TEST_P(Partings, WhatWaitsForCreditEnds) {
  const std::string payload(kMaxNotification, 'n');
  for (int i = 0; i < 100; ++i) open_.emplace_back(&a_, *a_.worker->notify(a_.peer, payload));
  nudge(sim() ? 1000 : 100);
  a_.worker->begin_disconnect(a_.peer);
  until([&] { return down(a_); });
  EXPECT_TRUE(a_.worker->disconnect(a_.peer).ok()) << a_.worker->disconnect(a_.peer);
  expect_ended(a_);
}

// Nobody drives the peer: the end here does not wait longer than it may.
// Promise(disconnect): `disconnect()` ends in time although the peer is silent, and says so | the
//   rails are closed after the timeout or `peer.answer_ms`
TEST_P(Partings, ASilentPeerIsNotWaitedForBeyondTheTimeout) {
  submit_many(20);
  nudge(3);
  for (int i = 0; i < 3; ++i) a_.worker->progress();
  if (sim()) fabric_->detach(*b_.worker);
  EXPECT_TRUE(absl::IsDeadlineExceeded(a_.worker->disconnect(a_.peer, Time::zero())));
  EXPECT_TRUE(down(a_));
  // What a device has begun to copy, it copies: those transfers are kEnding until then.
  baton::until([&] { return !GetParam().near_device || a_.worker->stats().open_transfers == 0; },
               [&] { a_.worker->progress(); });
  for (const auto& [owner, id] : open_) {
    if (owner == &a_) {
      EXPECT_TRUE(baton::ended(*a_.worker->state(id)));
    }
  }
  EXPECT_TRUE(absl::IsDeadlineExceeded(a_.worker->disconnect(a_.peer))) << "it stays so";
  std::fill_n(a_.data(), kBytes, kReused);
  if (sim()) return;
  nudge(100);
  ASSERT_TRUE(holds(a_.data(), kBytes, kReused)) << "bytes moved here";
  until([&] { return down(b_); });
}

TEST_P(Partings, StaleIdsAreErrors) {
  EXPECT_TRUE(absl::IsNotFound(a_.worker->disconnect({}, Time::zero())));
  EXPECT_TRUE(absl::IsNotFound(a_.worker->disconnect({900, 1})));
  a_.worker->begin_disconnect({a_.peer.index, a_.peer.generation + 1});
  EXPECT_EQ(a_.worker->peer_state(a_.peer), PeerState::kUp);
}

INSTANTIATE_TEST_SUITE_P(Conformance, Partings, testing::ValuesIn(all_variants()),
                         [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace baton
