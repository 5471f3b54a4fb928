// Messages that are too large for one notification, without the agents: who may send parts of them
// to another agent, which keeps so many bytes of them, and who waits in line; what becomes of them
// where a worker has no room, and where the other agent goes.
#include "kvtransfer/internal/agent_messages.h"
#include "kvtransfer/internal/agent_outbox.h"
#include "kvtransfer/internal/agent_transfer.h"
#include "tests/manual_clock.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

constexpr size_t kRoomThere = AgentAssembler::kMaxHeld;

WorkerOptions options_of(const std::string& name, uint32_t max_transfers = 4096) {
  WorkerOptions out;
  out.name = name;
  out.providers = {"tcp"};
  out.key = *ClusterKey::from_bytes("a secret of the tests");
  out.max_transfers = max_transfers;
  return out;
}

// A worker with an outbox, and another one, which nobody drives: no word of it comes.
struct LineOf {
  explicit LineOf(uint32_t max_transfers = 4096) {
    WorkerOptions options = options_of("speaks", max_transfers);
    options.clock = &clock;  // stands still: a call that waited would not return
    worker = *Worker::create(std::move(options));
    outbox.emplace(*worker);
    peer = *worker->connect(silent->address());
  }
  ~LineOf() { worker = nullptr; }  // what it ends is the outbox's
  // All that is on its way ends.
  void hang_up() {
    worker->begin_disconnect(peer, Time::zero());
    worker->progress();
  }
  bool has_room(size_t bytes) {
    const bool has = outbox->reserve(peer, bytes, nobody);
    if (has) {
      outbox->give_back(peer, bytes);
    } else {
      outbox->leave_line(peer, *nobody);
    }
    return has;
  }

  ManualClock clock;
  std::unique_ptr<Worker> silent = *Worker::create(options_of("silent"));
  std::unique_ptr<Worker> worker;
  std::optional<AgentOutbox> outbox;
  PeerId peer;
  std::shared_ptr<AgentTransfer> nobody;
};

// A transfer that waits for room.
class Waiting final : public AgentTransfer {
 public:
  Waiting() : AgentTransfer("silent", 1, mutex_, Clock::steady(), {}) { begin({}); }
  bool needs_peer() const override { return true; }
  absl::Status post(PeerId /*peer*/, const std::string_view* /*message*/) override { return {}; }
  void feed() override { on_feed(); }
  void abort() override {}
  bool quiet() const override { return true; }

  std::function<void()> on_feed = [] {};

 private:
  std::mutex mutex_;
};

class AgentLine : public ::testing::Test, protected LineOf {
 protected:
  AgentLine() {
    nobody = std::make_shared<Waiting>();
    for (auto& [name, who] : {std::pair('a', &a_), std::pair('b', &b_)}) {
      (*who)->on_feed = [this, name = name] { fed_ += name; };
    }
  }
  bool takes(const std::shared_ptr<Waiting>& who, size_t bytes) {
    return outbox->reserve(peer, bytes, who);
  }
  std::shared_ptr<Waiting> a_ = std::make_shared<Waiting>(), b_ = std::make_shared<Waiting>();
  std::string fed_;
};

TEST_F(AgentLine, TheFirstTransferIsServedFirst) {
  const auto holder = std::make_shared<Waiting>();
  ASSERT_TRUE(takes(holder, kRoomThere - 100'000));
  EXPECT_FALSE(takes(a_, 200'000));
  EXPECT_FALSE(takes(a_, 200'000)) << "it waits once";
  EXPECT_FALSE(takes(b_, 5)) << "there is room, but not before a's";
  const std::string large(kMaxWholeAgentMessage + 1, 'l');
  EXPECT_TRUE(absl::IsResourceExhausted(outbox->send(peer, AgentFrameKind::kMetadata, large)));
  outbox->give_back(peer, 100'000);
  a_->on_feed = [&] {
    fed_ += 'a';
    EXPECT_TRUE(takes(a_, 200'000));
  };
  outbox->room_came(peer);
  EXPECT_EQ(fed_, "ab") << "perhaps there is room for b too";
  EXPECT_FALSE(takes(b_, 5));
  // Whom it is not enough for is not asked again until there is more.
  fed_.clear();
  outbox->room_came(peer);
  EXPECT_EQ(fed_, "b");
  outbox->leave_line(peer, *b_);
  outbox->room_came(peer);
  EXPECT_EQ(fed_, "b") << "it has gone";
}

// One thread feeds, so that nobody's feed() is called in the midst of another's: not where room
// comes in it, and not where all has been given back and others have asked meanwhile.
TEST_F(AgentLine, FeedIsNotReentered) {
  for (const bool all : {false, true}) {
    SCOPED_TRACE(all);
    fed_.clear();
    const auto holder = std::make_shared<Waiting>();
    ASSERT_TRUE(takes(holder, kRoomThere));
    EXPECT_FALSE(takes(a_, 1));
    if (!all) {
      EXPECT_FALSE(takes(b_, 1));
    }
    a_->on_feed = [&] {
      fed_ += "(a";
      EXPECT_TRUE(takes(a_, 1));
      if (all) {
        outbox->give_back(peer, 1);
        EXPECT_FALSE(takes(b_, kRoomThere + 1));
      }
      outbox->room_came(peer);
      fed_ += ")";
    };
    outbox->give_back(peer, kRoomThere);
    outbox->room_came(peer);
    EXPECT_EQ(fed_, "(a)b");
    outbox->leave_line(peer, *b_);
    if (!all) outbox->give_back(peer, 1);
  }
}

struct AgentLost : ::testing::Test, LineOf {
  AgentLost() : LineOf(2) { nobody = std::make_shared<Waiting>(); }
  // So that there is no room for anything else.
  void fill() {
    while (outbox->send_message("silent", peer, "words").ok()) {
    }
  }
};

// Of what agents say among themselves nobody is told.
TEST_F(AgentLost, OnlyMessagesAreLost) {
  ASSERT_TRUE(outbox->send(peer, AgentFrameKind::kMetadata, "metadata").ok());
  EXPECT_TRUE(outbox->is_sending(peer, AgentFrameKind::kMetadata));
  hang_up();
  EXPECT_FALSE(outbox->is_sending(peer, AgentFrameKind::kMetadata));
  EXPECT_EQ(outbox->lost(), 0u);
  EXPECT_TRUE(outbox->take_lost().empty());
  outbox->send_message("silent", peer, "to nobody").IgnoreError();
  worker->progress();
  EXPECT_EQ(outbox->lost(), 1u);
}

// The word that no more parts come has found no room, and is of no use any more.
TEST_F(AgentLost, WhatAPeerThatWentKeptIsNotWaitedFor) {
  const std::string part = agent_frames(AgentFrameKind::kMessage, std::string(70'000, 'p'))[0];
  ASSERT_TRUE(outbox->reserve(peer, kRoomThere, nobody));
  fill();
  outbox->abandon(peer, part, kRoomThere);
  outbox->flush_control_messages();
  EXPECT_FALSE(has_room(1));
  hang_up();
  EXPECT_TRUE(has_room(kRoomThere));
  // Nor where it has gone before.
  ASSERT_TRUE(outbox->reserve(peer, kRoomThere, nobody));
  outbox->abandon(peer, part, kRoomThere);
  outbox->flush_control_messages();
  worker->progress();
  EXPECT_TRUE(has_room(kRoomThere));
}

// Transfers by themselves.
struct AgentParts : AgentLost {
  std::shared_ptr<AgentWorkerTransfer> make(AgentPlan plan, std::string_view message = {}) {
    return std::make_shared<AgentWorkerTransfer>(*worker, *outbox, Op::kWrite, std::move(plan),
                                                 "silent", 1, message);
  }
  AgentPart part(const MemoryRegion& local) {
    return {local, theirs, Layout::contiguous(0, 8), Layout::contiguous(0, 8)};
  }
  MemoryRegion region(char* data) { return *worker->register_memory(data, 64, Access::kLocal); }
  char mine[64]{}, more[64]{}, there[64]{};
  RemoteRegion theirs = *silent->remote_region(
      *silent->register_memory(there, sizeof there, Access::kRemoteReadWrite));
};

TEST_F(AgentParts, WhatFoundNoRoomIsNotDoneWhenItIsAborted) {
  fill();
  AgentPlan plan;
  plan.parts = {part(region(mine))};
  const auto transfer = make(std::move(plan));
  ASSERT_TRUE(transfer->post(peer, nullptr).ok());
  EXPECT_EQ(transfer->state(), AgentTransferState::kRunning);
  EXPECT_FALSE(transfer->local_free()) << "it will be read";
  transfer->feed();
  EXPECT_EQ(transfer->state(), AgentTransferState::kRunning);
  transfer->abort();
  EXPECT_EQ(transfer->state(), AgentTransferState::kCancelled);
  EXPECT_TRUE(transfer->local_free());
  // A message of which nothing was sent takes no room at the other agent.
  for (const size_t bytes : {size_t{5}, kMaxAgentMessage}) {
    const auto message = make({}, std::string(bytes, 'm'));
    ASSERT_TRUE(message->post(peer, nullptr).ok());
    EXPECT_EQ(message->state(), AgentTransferState::kRunning);
    EXPECT_EQ(has_room(kRoomThere), bytes == 5);
    message->abort();
    EXPECT_EQ(message->state(), AgentTransferState::kCancelled);
    EXPECT_TRUE(has_room(kRoomThere));
  }
}

// It runs as long as a part of it does, and says then what went wrong first.
TEST_F(AgentParts, APartThatIsRefusedEndsItWhenTheOthersHaveEnded) {
  AgentPart odd = part(region(mine));
  odd.remote_layout = Layout::contiguous(0, 16);
  AgentPlan plan;
  plan.parts = {part(region(more)), odd};
  const auto transfer = make(std::move(plan));
  EXPECT_EQ(transfer->post(peer, nullptr), absl::OkStatus());
  EXPECT_EQ(transfer->state(), AgentTransferState::kRunning);
  transfer->abort();
  hang_up();
  EXPECT_EQ(transfer->state(), AgentTransferState::kFailed);
  EXPECT_TRUE(absl::IsInvalidArgument(transfer->outcome().status)) << transfer->outcome().status;
  // By itself it is refused at once.
  AgentPlan bad;
  bad.parts = {odd};
  const auto refused = make(std::move(bad));
  EXPECT_TRUE(absl::IsInvalidArgument(refused->post(peer, nullptr)));
  EXPECT_EQ(refused->state(), AgentTransferState::kFailed);
}

}  // namespace
}  // namespace baton::kvtransfer
