// Receives that the queue pairs of a device share: no more credits than receives, none lost, more
// for the busy, and room for everybody.
#include "verbs/device/receive_pool.h"

#include "tests/until.h"
#include "tests/verbs/verbs_pair.h"
#include "verbs/queue_pair.h"

namespace baton::verbs {
namespace {

using testing::IsEmpty;

struct Deaf final : QueuePairOwner {
  void sent(uint32_t, ibv_wc_status) override {}
  void received(std::string_view) override { ++messages; }
  void counted(uint32_t) override {}
  void overrun() override { ++overruns; }
  void unseen(const absl::Status&) override {}
  uint64_t messages = 0;
  int overruns = 0;
};

class Pool : public testing::Test {
 protected:
  void start(uint32_t limit) {
    tuning_.shared_receives = limit;
    devices_ = *open_devices(fake_.api(), tuning_);
    pool_ = devices_.devices[0]->receive_pool();
    ASSERT_NE(pool_, nullptr);
  }
  std::unique_ptr<QueuePair> make() {
    const Port& port = *devices_.ports[0];
    return must(QueuePair::create(port, *choose_gid(port.gids, -1, 0xff), tuning_));
  }
  ~Pool() override { EXPECT_THAT(fake_.violations(), IsEmpty()); }

  FakeVerbs fake_;
  Tuning tuning_;
  Devices devices_;
  ReceivePool* pool_ = nullptr;
};

TEST_F(Pool, GrowsWithCreditsAndNotWithQueuePairs) {
  start(512);
  EXPECT_EQ(pool_->capacity(), 0u) << "memory for nobody";
  std::vector<std::unique_ptr<QueuePair>> pairs;
  uint32_t credits = 0;
  for (int i = 0; i < 8; ++i) {
    pairs.push_back(make());
    credits += pairs.back()->window();
    EXPECT_GE(pairs.back()->window(), ReceivePool::kLeast);
    EXPECT_EQ(pool_->granted(), credits);
    EXPECT_LE(credits, pool_->capacity());
    EXPECT_LE(pool_->capacity() - credits, ReceivePool::kSlab);
    EXPECT_EQ(fake_.shared_receives(), pool_->capacity());
  }
  pairs.clear();
  EXPECT_EQ(pool_->granted(), 0u);
}

TEST_F(Pool, TheBusyGetMoreAndGiveItBackWhenItIsScarce) {
  start(512);
  auto busy = make();
  const uint32_t first = busy->window();
  EXPECT_EQ(first, 32u);
  EXPECT_EQ(busy->give_back(1), 1u) << "not busy";
  EXPECT_EQ(busy->give_back(first / 2), first / 2 + first);
  EXPECT_EQ(busy->give_back(first), 2 * first + first);
  EXPECT_EQ(busy->window(), tuning_.receive_depth);
  EXPECT_EQ(busy->give_back(100), 100u) << "never more than receive_depth";
  ASSERT_EQ(pool_->grant(350), 350u);
  EXPECT_TRUE(pool_->scarce());
  for (int i = 0; i < 20; ++i) EXPECT_LE(busy->give_back(10), 10u);
  EXPECT_FALSE(pool_->scarce());
  EXPECT_LT(busy->window(), tuning_.receive_depth);
  EXPECT_EQ(pool_->granted(), 350u + busy->window());
  pool_->take_back(350);
}

TEST_F(Pool, WhenItIsUsedUpQueuePairsHaveReceivesOfTheirOwn) {
  start(128);
  std::vector<std::unique_ptr<QueuePair>> pairs;
  for (int i = 0; i < 12; ++i) pairs.push_back(make());
  EXPECT_LE(pool_->granted(), 128u);
  EXPECT_EQ(pairs.back()->window(), tuning_.receive_depth);
}

TEST_F(Pool, APeerThatSendsMoreThanItMayIsCutOff) {
  start(512);
  auto honest = make();
  auto greedy = make();
  auto victim = make();
  ASSERT_TRUE(greedy->connect(victim->local()).ok());
  ASSERT_TRUE(victim->connect(greedy->local()).ok());
  Deaf here, there;
  const uint32_t may = victim->window();
  for (uint32_t i = 0; i < may + 5; ++i) {
    greedy->add_message("more", QueuePair::kNoTag);
    greedy->ring();
    until([&] { return greedy->idle() || greedy->broken(); }, [&] { greedy->poll(here); });
  }
  until([&] { return victim->broken(); }, [&] { victim->poll(there); });
  EXPECT_EQ(there.messages, may);
  EXPECT_GE(there.overruns, 1);
  EXPECT_EQ(fake_.stats().not_ready, 0u);
  victim->poll(there);
  victim.reset();
  EXPECT_EQ(fake_.shared_receives(), pool_->capacity()) << "receives were lost";
}

// Two workers, and so many queue pairs between them that the pool runs out: nobody notices.
TEST(SharedReceives, ServeManyQueuePairsUnderLoad) {
  VerbsPair pair({}, {{"verbs.qps", "40"}, {"verbs.shared_receives", "512"}});
  pair.connect();
  const CounterId counter = *pair.b.worker->allocate_counter();
  std::vector<TransferId> ids;
  uint64_t expected = 0;
  size_t notified = 0;
  Notification got;
  for (int round = 0; round < 20; ++round) {
    ids.clear();
    for (int i = 0; i < 200; ++i) {
      TransferRequest r = pair.request(Op::kWrite, 500);
      r.counter = pair.b.worker->remote_counter(counter);
      if (i % 3 == 0) r.notify = "a word";
      ids.push_back(*pair.a.worker->submit(r));
      ++expected;
    }
    for (TransferId id : ids) ASSERT_TRUE(pair.finish(id).ok());
    while (pair.b.worker->next_notification(got)) ++notified;
  }
  pair.until([&] {
    while (pair.b.worker->next_notification(got)) ++notified;
    return pair.b.worker->counter_value(counter) == expected && notified == 20 * 67;
  });
}

}  // namespace
}  // namespace baton::verbs
