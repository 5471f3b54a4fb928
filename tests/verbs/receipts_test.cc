// Counters that immediates raise, when a rail is lost and what had come over it is found out later:
// each is raised once, and its transfer ends well.
#include <algorithm>
#include <functional>

#include "tests/until.h"
#include "tests/verbs/verbs_pair.h"

namespace baton {
namespace {

class Receipts : public testing::Test {
 protected:
  void start(size_t devices) {
    pair_.emplace(FakeOptions{.devices = devices},
                  VerbsPair::Settings{{"peer.redial_ms", "600000"},
                                      {"verbs.timeout", "8"},
                                      {"verbs.retry_count", "2"},
                                      {"verbs.hold_ms", "5"},
                                      {"verbs.port_grace_ms", "50"}});
    pair_->tick = std::chrono::microseconds(250);
    pair_->connect();
    pair_->expect_ready = false;  // a rail that is lost may have used them up
    counter_ = *pair_->b.worker->allocate_counter();
  }
  TransferId count_one(size_t bytes) {
    TransferRequest one = pair_->request(Op::kWrite, bytes);
    one.counter = pair_->b.worker->remote_counter(counter_);
    auto id = pair_->a.worker->submit(one);
    EXPECT_TRUE(id.ok()) << id.status();
    ++submitted_;
    return *id;
  }
  uint64_t value() { return pair_->b.worker->counter_value(counter_); }
  // One region is asked about once, and its answer comes before what is counted here.
  void warm() { EXPECT_TRUE(pair_->finish(count_one(3000)).ok()); }

  std::optional<VerbsPair> pair_;
  CounterId counter_;
  uint64_t submitted_ = 0;
};

// By the size of the transfer: the smallest go a way of their own.
class OfASize : public Receipts, public testing::WithParamInterface<size_t> {
 protected:
  TransferId one() { return count_one(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Receipts, OfASize, testing::Values(8, 3000));

// What landed without its acknowledgement is not raised again; what did not land goes on.
TEST_P(OfASize, WhatIsInDoubtIsRaisedOnce) {
  for (const bool lands : {true, false}) {
    SCOPED_TRACE(lands);
    submitted_ = 0;
    start(1);
    warm();
    const auto set_lost = [&](bool lost) {
      lands ? pair_->fake->set_mute(0, lost) : pair_->fake->set_cable(0, !lost);
    };
    set_lost(true);
    const TransferId id = one();
    pair_->until([&] { return pair_->a.worker->stats().peers_lost > 0; });
    ASSERT_EQ(value() == submitted_, lands);
    set_lost(false);
    EXPECT_EQ(pair_->finish(id), absl::OkStatus());
    EXPECT_EQ(value(), submitted_);
    pair_.reset();
  }
}

void alone_at_a(VerbsPair& pair) {
  pair.a.worker->progress();
  pair.clock.advance(std::chrono::microseconds(10));
}

// Acknowledged to its sender by an adapter whose program had not yet seen the rail come up.
class BeforeTheRail : public Receipts {
 protected:
  bool told(VerbsPair::Side& side) {
    Notification got;
    return side.worker->next_notification(got);
  }
  TransferId notify(VerbsPair::Side& side, absl::string_view text) {
    return must(side.worker->notify(side.peer, std::string(text)));
  }
  bool ended_at(VerbsPair::Side& side, TransferId id) { return ended(*side.worker->state(id)); }
};

// The caller's word that it is ready has arrived, but not the acknowledgement of that.
// Promise(rdma): What the sender knows as acknowledged is told at the target although the rail then
//   broke | completions are drained before questions about a rail are answered
TEST_F(BeforeTheRail, WhatComesWhileTheAcknowledgementIsLateCounts) {
  start(1);
  pair_->fake->break_queue_pairs(0);
  pair_->until([&] { return pair_->b.worker->stats().peers_lost > 0; });
  const TransferId id = notify(pair_->b, "are you there?");
  pair_->fake->set_mute(0, true);
  pair_->until([&] { return pair_->b.worker->stats().peers_resumed > 0; });
  pair_->steps(4);
  pair_->fake->set_mute(0, false);
  pair_->until([&] { return ended_at(pair_->b, id); });
  EXPECT_TRUE(pair_->b.worker->status(id).ok()) << pair_->b.worker->status(id);
  EXPECT_TRUE(pair_->within(std::chrono::seconds(1), [&] { return told(pair_->a); }));
}

// Whatever a target that was busy finds first: its port, its queue pair, the control connection, or
// the peer's goodbye.
using End = std::function<void(VerbsPair&)>;
class EndsUnseen : public BeforeTheRail,
                   public testing::WithParamInterface<std::pair<const char*, End>> {};

TEST_P(EndsUnseen, WhatCameOverItCounts) {
  start(1);
  pair_->fake->break_queue_pairs(0);
  pair_->until([&] { return pair_->a.worker->stats().peers_lost > 0; });
  const TransferId id = notify(pair_->a, "while you were busy");
  // B answers the call, and from then on does nothing.
  const auto alone = [&] {
    for (int i = 0; i < 10 && !ended_at(pair_->a, id); ++i) alone_at_a(*pair_);
    return ended_at(pair_->a, id);
  };
  pair_->until(alone);
  ASSERT_TRUE(pair_->a.worker->status(id).ok()) << pair_->a.worker->status(id);
  ASSERT_EQ(pair_->b.worker->stats().peers_resumed, 0u) << "it has not seen the rail";
  GetParam().second(*pair_);
  EXPECT_TRUE(pair_->within(std::chrono::seconds(1), [&] { return told(pair_->b); }));
}

INSTANTIATE_TEST_SUITE_P(
    Receipts, EndsUnseen,
    testing::Values(
        std::pair<const char*, End>("Port",
                                    [](VerbsPair& pair) {
                                      pair.fake->set_port(0, false);
                                      pair.steps(20);
                                      pair.fake->set_port(0, true);
                                    }),
        std::pair<const char*, End>("QueuePair",
                                    [](VerbsPair& pair) { pair.fake->break_queue_pairs(0); }),
        std::pair<const char*, End>("ControlConnection",
                                    [](VerbsPair& pair) {
                                      pair.fake->break_queue_pairs(0);
                                      const uint64_t lost = pair.a.worker->stats().peers_lost;
                                      until(
                                          [&] { return pair.a.worker->stats().peers_lost > lost; },
                                          [&] { alone_at_a(pair); });
                                    }),
        std::pair<const char*, End>("Goodbye", [](VerbsPair& pair) { pair.a.worker.reset(); })),
    [](const auto& of) { return of.param.first; });

}  // namespace
}  // namespace baton
