// Turns: whatever is queued, small work passes large work, large work goes on all the same, and
// what one peer is sent does not wait for all that another one is.
#include <algorithm>
#include <vector>

#include "tests/conformance/harness.h"

namespace baton {
namespace {

class Turns : public Conformance {
 protected:
  static constexpr size_t kSmall = 4 << 10;
  static constexpr size_t kLarge = 1 << 20;

  // Keeps so many small transfers with b under way, for ever.
  struct Flood {
    size_t open = 200;
    size_t bytes = kSmall;
  };
  // More than rails have room for.
  static constexpr Flood kDeep = {.open = 1000, .bytes = 64 << 10};
  void SetUp() override {
    max_transfers_ = 4096;  // half of them for one peer
    Conformance::SetUp();
  }
  void flood(const Flood& flood) {
    for (; small_open_ < flood.open; ++small_open_) {
      TransferRequest r = request(op_, a_, b_, 0, flood.bytes);
      r.detached = true;
      r.context = this;
      r.on_end = [](void* context, TransferId, const absl::Status& status) {
        auto& test = *static_cast<Turns*>(context);
        EXPECT_TRUE(status.ok()) << status;
        --test.small_open_;
        ++test.small_done_;
      };
      ASSERT_TRUE(a_.worker->submit(r).ok());
    }
  }
  void queue_large(PeerId peer, size_t count, std::vector<TransferId>& ids) {
    for (size_t i = 0; i < count; ++i) {
      TransferRequest r = request(op_, a_, b_, (2 + i % 4) * kLarge, kLarge);
      r.peer = peer;
      ids.push_back(submit(a_, r));
    }
  }
  size_t ended_of(const std::vector<TransferId>& ids) {
    return static_cast<size_t>(
        std::count_if(ids.begin(), ids.end(), [&](TransferId id) { return ended(a_, id); }));
  }

  void large_work_goes_on(const Flood& small);
  void small_work_passes();
  void peers_take_turns(PeerId second);
  void both_ways(const std::function<void()>& test) {
    for (const Op op : {Op::kWrite, Op::kRead}) {
      SCOPED_TRACE(op == Op::kWrite ? "writes" : "reads");
      op_ = op;
      test();
    }
  }

  Op op_ = Op::kWrite;
  size_t small_open_ = 0;
  size_t small_done_ = 0;
};

// 4 MiB beside small work that never ends: at most so many times as much of that goes before.
void Turns::large_work_goes_on(const Flood& small) {
  constexpr size_t kBytes = 4 << 20;
  const size_t most = (small.bytes > kSmall ? 64 : 16) * kBytes / small.bytes;
  small_done_ = 0;
  until([&] { return flood(small), small_done_ > small.open; });
  const TransferId large = submit(a_, request(op_, a_, b_, 2 * kLarge, kBytes));
  const size_t before = small_done_;
  until([&] {
    flood(small);
    return ended(a_, large) || small_done_ - before > most;
  });
  EXPECT_TRUE(ended(a_, large)) << "it waits for the end of the flood";
  until([&] { return small_open_ == 0 && ended(a_, large); });
  EXPECT_TRUE(finish(a_, large).ok());
}

void Turns::small_work_passes() {
  std::vector<TransferId> large;
  queue_large(a_.peer, 64, large);
  nudge(3);
  const TransferId small = submit(a_, request(op_, a_, b_, 0, kSmall));
  until([&] { return ended(a_, small); });
  EXPECT_LT(ended_of(large), 48u) << "it waited for all that was queued";
  for (TransferId id : large) EXPECT_TRUE(finish(a_, id).ok());
  EXPECT_TRUE(finish(a_, small).ok());
}

void Turns::peers_take_turns(PeerId second) {
  std::vector<TransferId> many;
  std::vector<TransferId> few;
  queue_large(a_.peer, 64, many);
  nudge(3);
  queue_large(second, 4, few);
  until([&] { return ended_of(few) == few.size(); });
  EXPECT_LT(ended_of(many), 48u) << "it waited for all that was queued for the other";
  for (TransferId id : many) EXPECT_TRUE(finish(a_, id).ok());
  for (TransferId id : few) EXPECT_TRUE(finish(a_, id).ok());
}

// Promise(transfers): Large work still advances behind a stream of small work | after 1 MiB of
//   small slices one large slice has its turn
TEST_P(Turns, LargeWorkGoesOnUnderAFloodOfSmall) {
  both_ways([&] { large_work_goes_on({}); });
}
TEST_P(Turns, LargeWorkGoesOnUnderAFloodThatFillsTheRails) {
  both_ways([&] { large_work_goes_on(kDeep); });
}
// Promise(transfers): Small work (up to 64 KiB, and messages) overtakes queued large work | small
//   slices go first in the worker's and each rail's queues
TEST_P(Turns, SmallWorkPassesLarge) {
  both_ways([&] { small_work_passes(); });
}
// Promise(transfers): Work for one peer does not wait for work queued for another | each peer has
//   its own queues, rails and share of a round
TEST_P(Turns, WorkWithAPeerDoesNotWaitForAllOfAnothers) {
  if (GetParam().decorated) GTEST_SKIP() << "a shaped link is one queue for all peers";
  const PeerId second = connect(a_, b_).first;
  both_ways([&] { peers_take_turns(second); });
}

INSTANTIATE_TEST_SUITE_P(Conformance, Turns, testing::ValuesIn(all_variants()),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace baton
