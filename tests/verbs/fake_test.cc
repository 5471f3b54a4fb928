// The fake refuses what an adapter refuses, so that tests on it mean something.
#include "tests/test.h"
#include "tests/verbs/fake/fake_verbs.h"
#include "tests/verbs/verbs_pair.h"

namespace baton {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// Two joined queue pairs, made by hand.
class Fake : public testing::Test {
 protected:
  void SetUp() override { make({.clock = &clock_}); }
  void make(const FakeOptions& options) {
    fake_.emplace(options);
    const verbs::VerbsApi& api = fake_->api();
    api.ibv_fork_init();
    ibv_device** list = api.ibv_get_device_list(nullptr);
    context_ = api.ibv_open_device(list[0]);
    api.ibv_free_device_list(list);
    pd_ = api.ibv_alloc_pd(context_);
    memory_ = (api.ibv_reg_mr)(
        pd_, words_, sizeof words_,
        IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC);
    cq_ = api.ibv_create_cq(context_, 64, nullptr, nullptr, 0);
    for (ibv_qp*& qp : qps_) {
      ibv_qp_init_attr init{};
      init.send_cq = init.recv_cq = cq_;
      init.cap = {4, 4, 2, 1, 16};
      init.qp_type = IBV_QPT_RC;
      qp = api.ibv_create_qp(pd_, &init);
      ASSERT_NE(qp, nullptr);
    }
    for (int i = 0; i < 2; ++i) join(qps_[i], qps_[1 - i]->qp_num);
  }
  void TearDown() override {
    const verbs::VerbsApi& api = fake_->api();
    for (ibv_qp* qp : qps_) api.ibv_destroy_qp(qp);
    api.ibv_destroy_cq(cq_);
    api.ibv_dereg_mr(memory_);
    api.ibv_dealloc_pd(pd_);
    api.ibv_close_device(context_);
    EXPECT_EQ(fake_->objects(), 0u);
  }
  int modify(ibv_qp* qp, ibv_qp_attr attributes, int mask) {
    return fake_->api().ibv_modify_qp(qp, &attributes, mask | IBV_QP_STATE);
  }
  void join(ibv_qp* qp, uint32_t other) {
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_INIT;
    a.port_num = 1;
    a.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
    EXPECT_EQ(modify(qp, a, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), 0);
    a.qp_state = IBV_QPS_RTR;
    a.ah_attr.is_global = 1;
    a.ah_attr.grh.sgid_index = 3;
    a.ah_attr.grh.dgid = fake_->gids(0)[3].gid;
    a.path_mtu = IBV_MTU_1024;
    a.dest_qp_num = other;
    EXPECT_EQ(modify(qp, a,
                     IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                         IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
              0);
    a.qp_state = IBV_QPS_RTS;
    a.rnr_retry = 2;
    EXPECT_EQ(modify(qp, a,
                     IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                         IBV_QP_MAX_QP_RD_ATOMIC),
              0);
  }
  int post(ibv_wr_opcode opcode, uint32_t bytes, unsigned flags = IBV_SEND_SIGNALED,
           uint64_t remote = 0) {
    ibv_sge sge{reinterpret_cast<uintptr_t>(words_), bytes, memory_->lkey};
    ibv_send_wr request{};
    request.wr_id = ++posted_;
    request.sg_list = &sge;
    request.num_sge = 1;
    request.opcode = opcode;
    request.send_flags = flags;
    const uint64_t at = reinterpret_cast<uintptr_t>(words_ + 8) + remote;
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
      request.wr.atomic.remote_addr = at;
      request.wr.atomic.rkey = memory_->rkey;
      request.wr.atomic.compare_add = 5;
    } else {
      request.wr.rdma.remote_addr = at;
      request.wr.rdma.rkey = memory_->rkey;
    }
    ibv_send_wr* bad = nullptr;
    return ibv_post_send(qps_[0], &request, &bad);
  }
  std::vector<ibv_wc_status> poll() {
    ibv_wc all[16];
    const int count = ibv_poll_cq(cq_, 16, all);
    std::vector<ibv_wc_status> statuses;
    for (int i = 0; i < count; ++i) statuses.push_back(all[i].status);
    return statuses;
  }

  ManualClock clock_;
  std::optional<FakeVerbs> fake_;
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  ibv_mr* memory_ = nullptr;
  ibv_cq* cq_ = nullptr;
  ibv_qp* qps_[2] = {};
  alignas(8) uint64_t words_[16] = {};
  uint64_t posted_ = 0;
};

TEST_F(Fake, AFullQueueIsRefusedUntilACompletionIsPolled) {
  for (int i = 0; i < 4; ++i) EXPECT_EQ(post(IBV_WR_RDMA_WRITE, 8), 0);
  EXPECT_EQ(post(IBV_WR_RDMA_WRITE, 8), ENOMEM);
  EXPECT_THAT(fake_->violations(), ElementsAre(HasSubstr("overflows")));
  EXPECT_EQ(poll().size(), 4u);
  EXPECT_EQ(post(IBV_WR_RDMA_WRITE, 8), 0);
}

TEST_F(Fake, UnsignalledWorkNeverGivesItsSlotsBack) {
  for (int i = 0; i < 4; ++i) EXPECT_EQ(post(IBV_WR_RDMA_WRITE, 8, 0), 0);
  EXPECT_THAT(poll(), IsEmpty());
  EXPECT_EQ(post(IBV_WR_RDMA_WRITE, 8), ENOMEM);
  EXPECT_THAT(fake_->violations(), ElementsAre(HasSubstr("unsignalled")));
}

TEST_F(Fake, LimitsOfOneRequest) {
  EXPECT_EQ(post(IBV_WR_RDMA_WRITE, (8 << 20) + 1), EINVAL);
  EXPECT_EQ(post(IBV_WR_RDMA_WRITE, 17, IBV_SEND_INLINE), EINVAL);
  EXPECT_EQ(post(IBV_WR_ATOMIC_FETCH_AND_ADD, 8, IBV_SEND_SIGNALED, 4), EINVAL);
  EXPECT_EQ(fake_->violations().size(), 3u);
  words_[8] = 37;
  EXPECT_EQ(post(IBV_WR_ATOMIC_FETCH_AND_ADD, 8), 0);
  EXPECT_THAT(poll(), ElementsAre(IBV_WC_SUCCESS));
  EXPECT_EQ(words_[8], 42u);
  EXPECT_EQ(words_[0], 37u);
}

TEST_F(Fake, RightsAndBoundsAreTheAdapters) {
  EXPECT_EQ(post(IBV_WR_RDMA_READ, 8), 0);  // only writes were granted
  EXPECT_EQ(post(IBV_WR_RDMA_WRITE, 8), 0);
  EXPECT_THAT(poll(), ElementsAre(IBV_WC_REM_ACCESS_ERR, IBV_WC_WR_FLUSH_ERR));
  EXPECT_THAT(fake_->violations(), IsEmpty());
}

TEST_F(Fake, OutOfBoundsAtThePeer) {
  EXPECT_EQ(post(IBV_WR_RDMA_WRITE, 8, IBV_SEND_SIGNALED, 64), 0);
  EXPECT_THAT(poll(), ElementsAre(IBV_WC_REM_ACCESS_ERR));
}

TEST_F(Fake, AMessageWithoutAReceiveIsRetriedAndThenFails) {
  EXPECT_EQ(post(IBV_WR_SEND, 8), 0);
  EXPECT_THAT(poll(), IsEmpty());
  EXPECT_EQ(fake_->stats().not_ready, 1u);
  clock_.advance(std::chrono::milliseconds(2));
  EXPECT_THAT(poll(), ElementsAre(IBV_WC_RNR_RETRY_EXC_ERR));
}

TEST_F(Fake, ResetWithWorkOutstandingIsAViolation) {
  EXPECT_EQ(post(IBV_WR_RDMA_WRITE, 8), 0);
  ibv_qp_attr reset{};
  reset.qp_state = IBV_QPS_RESET;
  EXPECT_NE(modify(qps_[0], reset, 0), 0);
  EXPECT_THAT(fake_->violations(), ElementsAre(HasSubstr("drain it through ERR")));
  reset.qp_state = IBV_QPS_ERR;
  EXPECT_EQ(modify(qps_[0], reset, 0), 0);
  EXPECT_THAT(poll(), ElementsAre(IBV_WC_WR_FLUSH_ERR));
  reset.qp_state = IBV_QPS_RESET;
  EXPECT_EQ(modify(qps_[0], reset, 0), 0);
}

TEST_F(Fake, EventsReachEveryContext) {
  fake_->set_port(0, false);
  ibv_async_event event{};
  ASSERT_EQ(fake_->api().ibv_get_async_event(context_, &event), 0);
  EXPECT_EQ(event.event_type, IBV_EVENT_PORT_ERR);
  EXPECT_NE(fake_->api().ibv_get_async_event(context_, &event), 0);
  ibv_port_attr port{};
  EXPECT_EQ(verbs::query_port(context_, 1, &port), 0);
  EXPECT_EQ(port.state, IBV_PORT_DOWN);
}

}  // namespace
}  // namespace baton
