// Rings that are lent to more than one peer, of which one comes late, or stands still.
#include "tests/gpudirect/staging/lent_pair.h"
#include "tests/test.h"

namespace baton {
namespace {

class LentToOthers : public Lent {
 protected:
  // Another worker with memory of the device, with which `owner` does what it does with the first.
  class Third {
   public:
    Third(LentToOthers& test, Side& owner, Op op) : test_(test), owner_(owner), op_(op) {
      worker_ = *Worker::create({.name = "c",
                                 .providers = {"shm"},
                                 .key = *ClusterKey::from_bytes("a secret of the tests"),
                                 .settings = {{"staging.ring_mib", "16"}}});
      at_ = test.gpu_->allocate(kBytes);
      region_ = *worker_->register_memory(gpudirect::pointer_of<void>(at_), kBytes);
      peer_ = *initiator().connect(op == Op::kWrite ? worker_->address() : owner.worker->address());
    }
    Worker& initiator() { return op_ == Op::kWrite ? *owner_.worker : *worker_; }
    TransferId begin(size_t bytes = 600'000) {
      TransferRequest next = test_.request(op_, true, true, bytes);
      next.peer = peer_;
      next.local = op_ == Op::kWrite ? owner_.device_region : region_;
      next.remote = op_ == Op::kWrite ? *worker_->remote_region(region_)
                                      : *owner_.worker->remote_region(owner_.device_region);
      return *initiator().submit(next);
    }
    absl::Status finish(TransferId id) {
      until([&] { return ended(*initiator().state(id)); });
      absl::Status status = initiator().status(id);
      initiator().release(id).IgnoreError();
      return status;
    }
    // Until transfers go straight from the ring.
    void until_lent(CallSite from = CallSite::here()) {
      ASSERT_TRUE(finish(begin()).ok());
      const char* const how = op_ == Op::kWrite ? kByPeer : kFromPeer;
      until([&] { return initiator().explain(peer_).find(how) != std::string::npos; }, from);
    }
    void owner_alone() {
      // The question of a read has to come, the answer stays where it is.
      for (int i = 0; op_ == Op::kRead && i < 3; ++i) worker_->progress();
      for (int i = 0; i < 8; ++i) {
        owner_.worker->progress();
        test_.gpu_->run_all();
      }
    }
    bool got(const std::string& bytes) { return test_.gpu_->read(at_, bytes.size()) == bytes; }
    void end() {
      worker_.reset();
      test_.gpu_->free(at_);
    }

   private:
    template <typename Fact>
    void until(const Fact& fact, CallSite from = CallSite::here()) {
      const auto turn = [&] {
        owner_.worker->progress();
        worker_->progress();
      };
      const auto state = [&] {
        return state_of(owner_.worker->stats(), "owner") + state_of(worker_->stats(), "other");
      };
      baton::until(fact, turn, state, from);
    }
    LentToOthers& test_;
    Side& owner_;
    const Op op_;
    std::unique_ptr<Worker> worker_;
    gpudirect::DevicePointer at_ = 0;
    MemoryRegion region_;
    PeerId peer_;
  };
};

// What was lent to a peer that is gone is lent to another one: who comes late with words of the
// first time gets nothing of it, and takes nothing away.
TEST_F(LentToOthers, RelentPagesAreNotReadByThePreviousBorrower) {
  for (const Op op : {Op::kWrite, Op::kRead}) {
    size_t late = 0;
    for (size_t rounds = 1; rounds <= 10; ++rounds) {
      SCOPED_TRACE(testing::Message()
                   << rounds << " rounds, " << (op == Op::kWrite ? "written" : "read"));
      lend({.seed = rounds});
      Side& owner = op == Op::kWrite ? a_ : b_;  // of the ring that is lent
      Side& before = op == Op::kWrite ? b_ : a_;
      Third third(*this, owner, op);
      third.until_lent();
      gpu_->write(owner.at, pattern('s'));
      gpu_->write(before.at, std::string(600'000, '-'));
      const TransferId id = *a_.worker->submit(request(op, true, true));
      for (size_t i = 0; i < rounds; ++i) {
        a_.worker->progress();
        b_.worker->progress();
      }
      // From here on the first peer comes late.
      for (size_t i = 0; i < rounds % 7; ++i) owner.worker->progress();
      gpu_->run_all();
      for (int i = 0; i < 4; ++i) owner.worker->progress();
      owner.worker->disconnect(owner.peer, Time::zero()).IgnoreError();
      gpu_->write(owner.at, std::string(600'000, '!'));
      const TransferId next = third.begin();
      // Until it has been lent, but not read.
      third.owner_alone();
      for (int i = 0; i < 30; ++i) {
        before.worker->progress();
        gpu_->run_all();
      }
      EXPECT_EQ(gpu_->read(before.at, 600'000).find('!'), std::string::npos);
      const absl::Status status = third.finish(next);
      EXPECT_TRUE(status.ok()) << status;
      EXPECT_TRUE(third.got(std::string(600'000, '!')));
      late += gpu_->read(before.at, 600'000).find('s') == std::string::npos ? 1 : 0;
      finish(id).IgnoreError();
      third.end();
      if (HasFailure()) return;
      TearDown();
    }
    EXPECT_GT(late, 0u) << "the first peer always had it in time";
  }
  lend();
}

// A peer that stands still with all the room that it may have.
TEST_F(LentToOthers, AnIdlePeerLeavesRoomForOthers) {
  for (const Op op : {Op::kWrite, Op::kRead}) {
    SCOPED_TRACE(op == Op::kWrite ? "written" : "read");
    lend();
    Side& owner = op == Op::kWrite ? a_ : b_;
    Third third(*this, owner, op);
    third.until_lent();
    std::vector<TransferId> ids;
    for (int i = 0; i < 8; ++i) ids.push_back(*a_.worker->submit(request(op, true, true, kBytes)));
    for (int i = 0; i < 20; ++i) {
      a_.worker->progress();
      if (i < 10 || op == Op::kWrite) gpu_->run_all();
      if (op == Op::kRead) b_.worker->progress();
    }
    for (int i = 0; i < 20; ++i) {
      owner.worker->progress();
      gpu_->run_all();
    }
    const absl::Status status = third.finish(third.begin(kBytes));
    EXPECT_TRUE(status.ok()) << status;
    for (const TransferId id : ids) EXPECT_TRUE(finish(id).ok());
    third.end();
    if (HasFailure()) return;
    TearDown();
  }
  lend();
}

}  // namespace
}  // namespace baton
