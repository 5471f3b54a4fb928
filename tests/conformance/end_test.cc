// Every transfer ends, once, and afterwards its pages are free: cancel, deadline, disconnect,
// reconnect, slots and stale ids.
#include <algorithm>
#include <string>
#include <vector>

#include "tests/conformance/harness.h"

namespace baton {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using testing::HasSubstr;

class Ends : public Conformance {
 protected:
  static constexpr size_t kPage = 4096;
  static constexpr size_t kBytes = 2 << 20;

  void shuffle_pages() {
    for (std::vector<uint32_t>* list : {&from_, &to_}) {
      list->resize(kBytes / kPage);
      std::iota(list->begin(), list->end(), 0);
      std::shuffle(list->begin(), list->end(), random_);
    }
  }
  TransferRequest paged(Op op) {
    TransferRequest r = request(op, a_, b_, 0, 0);
    r.local_layout = Layout::paged(a_.offset(0), from_, kPage, kPage);
    r.remote_layout = Layout::paged(b_.offset(0), to_, kPage, kPage);
    return r;
  }
  // The transfer has ended. If it was done all is there; otherwise both sides' pages are reused,
  // and stay as their new owners left them.
  void check_end(Op op, TransferId id, TransferState expected, uint64_t seed) {
    const TransferState state = *a_.worker->state(id);
    const std::vector<uint32_t>& sources = op == Op::kWrite ? from_ : to_;
    const std::vector<uint32_t>& targets = op == Op::kWrite ? to_ : from_;
    const Side& source = op == Op::kWrite ? a_ : b_;
    const Side& target = op == Op::kWrite ? b_ : a_;
    if (state == TransferState::kDone) {
      ++done_;
      for (size_t i = 0; i < targets.size(); ++i) {
        for (size_t k = 0; k < kPage; k += 97) {
          ASSERT_EQ(target.data()[targets[i] * kPage + k], filled(seed, sources[i] * kPage + k));
        }
      }
    } else {
      ++stopped_;
      ASSERT_EQ(state, expected);
    }
    std::fill_n(source.data(), kBytes, kReused);
    std::fill_n(target.data(), kBytes, kPoison);
    settle();
    ASSERT_TRUE(holds(source.data(), kBytes, kReused)) << "the source changed after the end";
    ASSERT_TRUE(holds(target.data(), kBytes, kPoison)) << "bytes moved after the end";
  }

  // Transfers of scattered pages, which `begin` submits and has stopped.
  void stop(int all, TransferState expected,
            const std::function<TransferId(int round, const TransferRequest&)>& begin) {
    all = rounds(all);
    for (int round = 0; round < all; ++round) {
      SCOPED_TRACE(testing::Message() << "round " << round);
      const Op op = round % 2 ? Op::kRead : Op::kWrite;
      shuffle_pages();
      fill((op == Op::kWrite ? a_ : b_).data(), kBytes, static_cast<uint64_t>(round));
      const TransferId id = begin(round, paged(op));
      until([&] { return ended(a_, id); });
      check_end(op, id, expected, static_cast<uint64_t>(round));
      if (HasFatalFailure()) return;
      ASSERT_TRUE(a_.worker->release(id).ok());
    }
  }

  std::mt19937_64 random_{11};
  std::vector<uint32_t> from_;
  std::vector<uint32_t> to_;
  size_t done_ = 0;
  size_t stopped_ = 0;
};

// Promise(transfers): After a transfer ends, cancelled at any point or not, none of its bytes move;
//   both sides may reuse its memory | the target stops it and confirms before it ends
TEST_P(Ends, CancelledAtAnyPointNothingMovesAfterwards) {
  stop(80, TransferState::kCancelled, [&](int round, const TransferRequest& request) {
    const TransferId id = submit(a_, request);
    const size_t limit = sim() ? 150 : 40;
    nudge(random_() % (round % 4 == 0 ? 4 : limit));
    EXPECT_TRUE(a_.worker->cancel(id).ok());
    return id;
  });
  EXPECT_GT(stopped_, 0u);
}

// Promise(transfers): A transfer past its deadline ends, and none of its bytes land later | the
//   abort waits for the target's word; tcp drains bytes that the kernel already took
TEST_P(Ends, PastItsDeadlineNothingMovesAfterwards) {
  stop(40, TransferState::kDeadline, [&](int round, TransferRequest request) {
    request.timeout = round < 4 ? Time(0) : microseconds(random_() % 600);
    return submit(a_, request);
  });
  EXPECT_GE(stopped_, 4u);
}

// The local side is used again as soon as it is said to be free, and not a byte of that arrives.
// Promise(transfers): Local memory of a transfer that is cancelled, late or failed can be reused as
//   soon as `local_free()` says so, even while its target is silent | reads end at once; writes
//   copy what was gathered for the kernel, or wait for the adapter
TEST_P(Ends, LocalMemoryIsFreeWhenItIsSaidToBe) {
  std::mt19937_64 random(14);
  std::vector<std::byte> sent(kBytes);
  size_t early = 0;
  for (int round = 0, all = rounds(48); round < all; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    const Op op = round % 4 == 3 ? Op::kRead : Op::kWrite;
    fill(sent.data(), kBytes, static_cast<uint64_t>(round));
    std::copy(sent.begin(), sent.end(), (op == Op::kWrite ? a_ : b_).data());
    std::fill_n((op == Op::kWrite ? b_ : a_).data(), kBytes, kPoison);
    const TransferId id = submit(a_, request(op, a_, b_, 0, kBytes));
    // Half of the time the target is silent all along, while this side has begun.
    const bool silent = round % 2 == 0;
    if (silent && !sim()) {
      for (uint64_t i = 2 + random() % 4; i > 0; --i) a_.worker->progress();
    } else {
      nudge(random() % (sim() ? 150 : 40));
    }
    ASSERT_TRUE(a_.worker->cancel(id).ok());
    for (int i = 0; silent && i < 20 && !*a_.worker->local_free(id); ++i) {
      a_.worker->progress();
    }
    until([&] { return *a_.worker->local_free(id); });
    early += !ended(a_, id);
    std::fill_n(a_.data(), kBytes, kReused);
    until([&] { return ended(a_, id); });
    settle();
    ASSERT_TRUE(*a_.worker->local_free(id));
    ASSERT_TRUE(holds(a_.data(), kBytes, kReused)) << "bytes came after they were not wanted";
    size_t wrong = 0;
    for (size_t i = 0; op == Op::kWrite && i < kBytes; ++i) {
      wrong += b_.data()[i] != kPoison && b_.data()[i] != sent[i];
    }
    ASSERT_EQ(wrong, 0u) << "bytes arrived that came after the transfer";
    ASSERT_TRUE(a_.worker->release(id).ok());
    EXPECT_FALSE(a_.worker->local_free(id).ok());
  }
  // What is staged of a device is let go of at the end.
  const std::string provider = GetParam().provider;
  if ((provider == "tcp" || provider == "ucx") && !GetParam().decorated &&
      !GetParam().near_device) {
    EXPECT_GT(early, 0u) << "it was said at the end only";
  }
}

TEST_P(Ends, MemoryThatIsFreeCanBeDeregistered) {
  std::vector<std::byte> memory(kBytes);
  const auto region = a_.worker->register_memory(memory.data(), kBytes, Access::kLocal).value();
  TransferRequest r = request(Op::kWrite, a_, b_, 0, kBytes);
  r.local = region;
  r.local_layout = Layout::contiguous(0, kBytes);
  const TransferId id = submit(a_, r);
  nudge(2);
  ASSERT_TRUE(a_.worker->cancel(id).ok());
  for (int i = 0; i < 20; ++i) a_.worker->progress();
  until([&] { return *a_.worker->local_free(id); });
  EXPECT_TRUE(a_.worker->deregister_memory(region).ok());
  until([&] { return ended(a_, id); });
  const absl::Status next = run(a_, request(Op::kWrite, a_, b_, 0, kBytes));
  EXPECT_TRUE(next.ok()) << next;
}

TEST_P(Ends, ThousandsOfCancelledTransfersLeaveNothingBehind) {
  // More than a target may keep half arrived.
  std::mt19937_64 random(13);
  const size_t bytes = GetParam().slow ? kBytes / 16 : kBytes;
  for (int round = 0, all = rounds_of(60, 20); round < all; ++round) {
    std::vector<TransferId> ids;
    for (int i = 0; i < 200; ++i) ids.push_back(submit(a_, request(Op::kWrite, a_, b_, 0, bytes)));
    nudge(random() % 30);
    for (TransferId id : ids) ASSERT_TRUE(a_.worker->cancel(id).ok());
    for (TransferId id : ids) (void)finish(a_, id);
  }
  EXPECT_EQ(a_.worker->stats().open_transfers, 0u);
  fill(a_.data(), kBytes, 1);
  const absl::Status status = run(a_, request(Op::kWrite, a_, b_, 0, kBytes));
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(memcmp(a_.data(), b_.data(), kBytes), 0);
}

TEST_P(Ends, TheCallbackComesOnceBeforeTheEndIsSeen) {
  struct Seen {
    Conformance* test;
    Worker* worker;
    int calls = 0;
    absl::Status status;
    TransferState state = TransferState::kDone;
  } seen{this, a_.worker.get()};
  TransferRequest r = request(Op::kWrite, a_, b_, 0, 100'000);
  r.on_end = [](void* context, TransferId id, const absl::Status& status) {
    Seen& s = *static_cast<Seen*>(context);
    ++s.calls;
    s.status = status;
    s.state = *s.worker->state(id);
  };
  r.context = &seen;
  EXPECT_TRUE(run(a_, r).ok());
  EXPECT_EQ(seen.calls, 1);
  EXPECT_TRUE(seen.status.ok());
  EXPECT_EQ(seen.state, TransferState::kActive);
}

TEST_P(Ends, SlotsRunOutCleanlyAndComeBack) {
  std::vector<TransferId> ids;
  std::string refused;
  const auto submit_all = [&] {
    while (true) {
      auto id = a_.worker->submit(request(Op::kWrite, a_, b_, 0, 1000));
      if (id.ok()) {
        ids.push_back(*id);
        continue;
      }
      EXPECT_TRUE(absl::IsResourceExhausted(id.status())) << id.status();
      refused = std::string(id.status().message());
      return;
    }
  };
  submit_all();
  EXPECT_EQ(ids.size(), max_transfers_ / 2) << "one peer has half of them";
  EXPECT_THAT(refused, HasSubstr("has its share of the"));
  // Ended, but not released: still in use.
  while (ids.size() < max_transfers_) {
    until([&] {
      return std::all_of(ids.begin(), ids.end(), [&](TransferId id) { return ended(a_, id); });
    });
    const size_t before = ids.size();
    submit_all();
    ASSERT_GT(ids.size(), before) << refused;
  }
  EXPECT_THAT(refused, HasSubstr("ended and wait to be released"));
  for (TransferId id : ids) EXPECT_TRUE(finish(a_, id).ok());
  EXPECT_TRUE(run(a_, request(Op::kRead, a_, b_, 0, 1000)).ok());
}

// Promise(transfers): A stale handle is an error and never touches the transfer that reuses its
//   slot | handles carry a generation
TEST_P(Ends, StaleIdsAreErrors) {
  const TransferId id = submit(a_, request(Op::kWrite, a_, b_, 0, 1 << 20));
  EXPECT_EQ(a_.worker->status(id).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(a_.worker->release(id).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(finish(a_, id).ok());
  for (const TransferId stale : {id, TransferId{}, TransferId{999'999, 1}, TransferId{0, 77'777}}) {
    EXPECT_EQ(a_.worker->state(stale).status().code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(a_.worker->status(stale).code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(a_.worker->cancel(stale).code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(a_.worker->release(stale).code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(a_.worker->wait(stale).code(), absl::StatusCode::kNotFound);
  }
  TransferRequest r = request(Op::kWrite, a_, b_, 0, 10);
  for (const PeerId stale : {PeerId{}, PeerId{a_.peer.index, a_.peer.generation + 1},
                             PeerId{900, 1}, PeerId{100'000, 1}}) {
    r.peer = stale;
    EXPECT_EQ(a_.worker->submit(r).status().code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(a_.worker->peer_state(stale), PeerState::kDown);
    EXPECT_EQ(a_.worker->peer_status(stale).code(), absl::StatusCode::kNotFound);
    a_.worker->disconnect(stale, Time::zero()).IgnoreError();
  }
  for (const CounterId stale : {CounterId{}, CounterId{3, 9999}, CounterId{1'000'000, 1}}) {
    EXPECT_EQ(a_.worker->counter_value(stale), 0u);
    EXPECT_EQ(a_.worker->free_counter(stale).code(), absl::StatusCode::kNotFound);
  }
  // A cancel that comes after the slot has a new owner does not touch it.
  const TransferId next = submit(a_, request(Op::kWrite, a_, b_, 0, 1 << 20));
  (void)a_.worker->cancel(id);
  EXPECT_TRUE(finish(a_, next).ok());
}

TEST_P(Ends, DisconnectInTheMiddleAndConnectAnew) {
  std::mt19937_64 random(14);
  for (int round = 0; round < 12; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    std::vector<std::pair<Side*, TransferId>> open;
    for (size_t i = 0; i < 60; ++i) {
      Side& from = i % 3 == 0 ? b_ : a_;
      Side& to = i % 3 == 0 ? a_ : b_;
      open.emplace_back(
          &from, submit(from, request(i % 2 ? Op::kRead : Op::kWrite, from, to, 0, 200'000)));
    }
    nudge(random() % (sim() ? 300 : 30));
    Side& leaving = round % 2 ? b_ : a_;
    const PeerId old_a = a_.peer;
    const PeerId old_b = b_.peer;
    leaving.worker->disconnect(leaving.peer, Time::zero()).IgnoreError();
    EXPECT_EQ(leaving.worker->peer_state(leaving.peer), PeerState::kDown);
    for (auto& [side, id] : open) {
      until([&, s = side, i = id] { return ended(*s, i); });
      const absl::Status status = side->worker->status(id);
      EXPECT_TRUE(status.ok() || absl::IsUnavailable(status)) << status;
      EXPECT_TRUE(side->worker->release(id).ok());
    }
    until([&] {
      return a_.worker->peer_state(old_a) == PeerState::kDown &&
             b_.worker->peer_state(old_b) == PeerState::kDown;
    });
    EXPECT_FALSE(a_.worker->peer_status(old_a).ok());
    // The old ids stay dead.
    TransferRequest r = request(Op::kWrite, a_, b_, 0, 1000);
    auto late = a_.worker->submit(r);
    if (late.ok()) {
      EXPECT_FALSE(finish(a_, *late).ok());
    }

    Side& caller = round % 3 ? a_ : b_;
    Side& callee = round % 3 ? b_ : a_;
    std::tie(caller.peer, callee.peer) = connect(caller, callee);
    EXPECT_NE(a_.peer, old_a);
    EXPECT_NE(b_.peer, old_b);
    fill(a_.data(), 1 << 20, static_cast<uint64_t>(round));
    ASSERT_TRUE(run(a_, request(Op::kWrite, a_, b_, 0, 1 << 20)).ok());
    ASSERT_EQ(memcmp(a_.data(), b_.data(), 1 << 20), 0);
    ASSERT_TRUE(run(b_, request(Op::kRead, b_, a_, 0, 1 << 20)).ok());
  }
}

TEST_P(Ends, AfterADisconnectItsOwnMemoryStaysAsItIs) {
  std::mt19937_64 random(15);
  for (int round = 0, all = rounds(20); round < all; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    fill(b_.data(), kBytes, static_cast<uint64_t>(round));
    const TransferId id = submit(a_, request(Op::kRead, a_, b_, 0, kBytes));
    if (sim() || round % 2 == 0) {
      nudge(random() % (sim() ? 150 : 20));
    } else {
      a_.worker->progress();  // asked for, and the other side has not looked yet
    }
    a_.worker->disconnect(a_.peer, Time::zero()).IgnoreError();
    until([&] { return ended(a_, id); });
    (void)finish(a_, id);
    std::fill_n(a_.data(), kBytes, kReused);
    nudge(sim() ? 10'000 : 100);
    ASSERT_TRUE(holds(a_.data(), kBytes, kReused)) << "bytes moved after the end";
    std::tie(a_.peer, b_.peer) = connect(a_, b_);
  }
}

TEST_P(Ends, AWorkerThatIsDestroyedEndsItsPeersTransfers) {
  std::vector<TransferId> ids;
  for (int i = 0; i < 50; ++i) {
    ids.push_back(submit(a_, request(i % 2 ? Op::kRead : Op::kWrite, a_, b_, 0, 1 << 20)));
  }
  nudge(5);
  if (sim()) fabric_->detach(*b_.worker);
  b_.pool.reset();
  b_.worker.reset();
  for (TransferId id : ids) {
    const absl::Status status = finish(a_, id);
    EXPECT_TRUE(status.ok() || absl::IsUnavailable(status) || absl::IsNotFound(status)) << status;
  }
  until([&] { return a_.worker->peer_state(a_.peer) == PeerState::kDown; });
  EXPECT_EQ(a_.worker->stats().open_transfers, 0u);
}

INSTANTIATE_TEST_SUITE_P(Conformance, Ends, testing::ValuesIn(all_variants()),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace baton
