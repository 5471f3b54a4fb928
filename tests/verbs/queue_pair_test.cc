// A queue pair keeps its own accounts: what is posted, what is known to be complete, what came back
// when it broke.
#include "verbs/queue_pair.h"

#include "tests/test.h"
#include "tests/until.h"
#include "tests/verbs/fake/fake_verbs.h"
#include "tests/verbs/verbs_pair.h"

namespace baton::verbs {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

struct Log final : QueuePairOwner {
  void sent(uint32_t tag, ibv_wc_status status) override { done.emplace_back(tag, status); }
  void received(std::string_view message) override { messages.emplace_back(message); }
  void counted(uint32_t immediate) override { immediates.push_back(immediate); }
  void overrun() override { ++overruns; }
  void unseen(const absl::Status&) override {}
  std::vector<std::pair<uint32_t, ibv_wc_status>> done;
  std::vector<std::string> messages;
  std::vector<uint32_t> immediates;
  int overruns = 0;
};

// With receives of their own (0), or shared ones.
class QueuePairs : public testing::TestWithParam<uint32_t> {
 protected:
  QueuePairs() {
    tuning_.send_depth = 32;
    tuning_.receive_depth = 16;
    tuning_.shared_receives = GetParam();
    devices_ = *open_devices(fake_.api(), tuning_);
    const Port& port = *devices_.ports[0];
    const GidChoice gid = *choose_gid(port.gids, -1, 0xff);
    a_ = *QueuePair::create(port, gid, tuning_);
    b_ = *QueuePair::create(port, gid, tuning_);
    EXPECT_TRUE(a_->connect(b_->local()).ok());
    EXPECT_TRUE(b_->connect(a_->local()).ok());
    RegionEntry entry{.base = memory_.data(),
                      .size = memory_.size(),
                      .key = 1,
                      .index = 0,
                      .generation = 1,
                      .access = Access::kRemoteReadWrite};
    EXPECT_TRUE(devices_.devices[0]->add_region(entry).ok());
    region_ = devices_.devices[0]->region(0);
  }
  ~QueuePairs() override {
    a_.reset();
    b_.reset();
    EXPECT_THAT(fake_.violations(), IsEmpty());
    if (ReceivePool* pool = devices_.devices[0]->receive_pool(); pool != nullptr) {
      EXPECT_EQ(fake_.shared_receives(), pool->capacity()) << "receives were lost";
      EXPECT_EQ(pool->granted(), 0u);
    }
  }

  QueuePair::Work write(uint32_t tag, uint32_t bytes = 1000) const {
    QueuePair::Work work;
    work.tag = tag;
    work.remote = reinterpret_cast<uintptr_t>(memory_.data() + (1 << 16));
    work.rkey = region_->rkey;
    work.bytes = bytes;
    work.sges = 1;
    work.sge[0] = {reinterpret_cast<uintptr_t>(memory_.data()), bytes, region_->lkey};
    return work;
  }
  void poll(int rounds = 5) {
    for (int i = 0; i < rounds; ++i) {
      Device::Event event;
      while (devices_.devices[0]->next_event(event)) {
        if (event.type != IBV_EVENT_QP_LAST_WQE_REACHED) continue;
        for (const auto& each : {a_.get(), b_.get()}) {
          if (each->is(event.queue_pair)) each->set_last_receive();
        }
      }
      a_->poll(at_a_);
      b_->poll(at_b_);
    }
  }

  ManualClock clock_;
  FakeVerbs fake_{{.clock = &clock_}};
  Tuning tuning_ = Tuning().for_session(true);
  std::vector<std::byte> memory_ = std::vector<std::byte>(1 << 17);
  Devices devices_;
  const ibv_mr* region_ = nullptr;
  std::unique_ptr<QueuePair> a_;
  std::unique_ptr<QueuePair> b_;
  Log at_a_;
  Log at_b_;
};

TEST_P(QueuePairs, AfterARefusedAccessTheRestIsFlushedInOrder) {
  a_->add(write(0));
  a_->add(write(1));
  QueuePair::Work bad = write(2);
  bad.rkey += 1000;
  a_->add(bad);
  a_->add(write(3));
  a_->add_message("never", 4);
  a_->ring();
  poll();
  EXPECT_THAT(at_a_.done,
              ElementsAre(std::pair(0u, IBV_WC_SUCCESS), std::pair(1u, IBV_WC_SUCCESS),
                          std::pair(2u, IBV_WC_REM_ACCESS_ERR), std::pair(3u, IBV_WC_WR_FLUSH_ERR),
                          std::pair(4u, IBV_WC_WR_FLUSH_ERR)));
  EXPECT_TRUE(a_->broken());
  if (GetParam() == 0) {
    // The other end broke as well, and has its receives back.
    EXPECT_TRUE(a_->drained());
    EXPECT_TRUE(b_->broken());
  } else {
    // Shared receives do not flush: the owner hears of it by an event, or by its peer.
    a_->break_off();
    b_->break_off();
    poll(2);
    EXPECT_TRUE(a_->drained());
  }
  EXPECT_TRUE(b_->drained());
  EXPECT_THAT(at_b_.messages, IsEmpty());
}

TEST_P(QueuePairs, BrokenOffEverythingComesBackOnce) {
  for (uint32_t i = 0; i < 20; ++i) a_->add(write(i, 60'000));
  a_->ring();
  poll(2);
  const size_t before = at_a_.done.size();
  EXPECT_LT(before, 20u);
  a_->break_off();
  a_->add(write(20));  // too late: never handed over
  a_->ring();
  poll();
  ASSERT_EQ(at_a_.done.size(), 21u);
  for (uint32_t i = 0; i < 21; ++i) EXPECT_EQ(at_a_.done[i].first, i);
  EXPECT_EQ(at_a_.done[20].second, IBV_WC_WR_FLUSH_ERR);
  EXPECT_TRUE(a_->drained());
}

TEST_P(QueuePairs, WhatComesAfterABreakHasNotArrived) {
  a_->add_message("in time", 1);
  a_->ring();
  poll();
  a_->add_message("too late", 2);
  a_->ring();
  a_->poll(at_a_);  // it is at the other end, which has not looked
  b_->break_off();
  b_->poll(at_b_);
  const uint64_t reported = b_->received();
  until([&] { return b_->drained(); }, [&] { b_->poll(at_b_); });
  EXPECT_EQ(at_b_.messages.size(), b_->received());
  EXPECT_GE(b_->received(), reported);
}

INSTANTIATE_TEST_SUITE_P(Receives, QueuePairs, testing::Values(0, 256));

}  // namespace
}  // namespace baton::verbs
