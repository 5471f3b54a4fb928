// What an agent keeps for others does not grow with what they say, nor with time.
#include "kvtransfer/internal/agent_impl.h"
#include "kvtransfer/internal/agent_messages.h"
#include "kvtransfer/metadata/agent_metadata.h"
#include "tests/fails_with.h"
#include "tests/kvtransfer/agent_pair.h"
#include "tests/test.h"
#include "tests/transport/scripted_peers.h"

namespace baton::kvtransfer {
namespace {

using ::testing::HasSubstr;

// A member of the cluster who is no agent, and says to one what it likes.
class Liar {
 public:
  Liar(const std::string& name, const Agent& to)
      : name_(name), key_(*agent_options(name).worker.key) {
    WorkerOptions options = agent_options(name, "tcp").worker;
    options.name = name;
    worker = *Worker::create(std::move(options));
    peer = *worker->connect(to.address());
  }
  void say(AgentFrameKind kind, std::string_view payload) {
    const std::string frame = agent_frame(kind, payload);
    ++said_;
    ASSERT_TRUE(worker
                    ->wait_until([&] { return worker->notify_detached(peer, frame).ok(); },
                                 patient(std::chrono::seconds(60)))
                    .ok());
  }
  // All of it is in the agent's inbox.
  void wait_until_heard() const {
    ASSERT_TRUE(
        worker->wait_until([&] { return all_heard(); }, patient(std::chrono::seconds(60))).ok());
  }
  // It is driven too.
  template <typename Fact>
  void until(Agent& agent, Fact fact, CallSite from = CallSite::here()) const {
    const auto turned = [&] { return worker->progress(), fact(); };
    run_agents(agent, agent, turned, from);
  }
  bool all_heard() const { return worker->stats().transfers_ended == said_; }
  AgentMetadata metadata(std::string agent) const {
    AgentMetadata out;
    out.name = std::move(agent);
    out.uid = Address::decode(worker->address())->uid;
    out.address = worker->address();
    return out;
  }
  void send(const AgentMetadata& metadata) {
    say(AgentFrameKind::kMetadata, metadata.encode(key_));
  }

  std::unique_ptr<Worker> worker;
  PeerId peer;

 private:
  std::string name_;
  ClusterKey key_;
  uint64_t said_ = 0;
};

// It looks for metadata only, and what comes meanwhile fills its inbox: until then it is credit
// that its senders have.
// Promise(limits): An agent keeps at most 64 MiB of unread messages; later ones wait at their
//   senders | it stops reading from its worker
TEST(AgentBounds, UnreadMessagesWaitAtTheSender) {
  const auto a = make_agent(agent_options("alpha", "tcp", false));
  const auto b = make_agent(agent_options("beta", "tcp", false));
  introduce(*a, *b);
  constexpr size_t kAll = 2500;  // 150 MB
  const std::string message(60'000, 'x');
  size_t sent = 0, quiet = 0;
  while (sent < kAll && quiet < 2000) {
    const bool taken = a->stats().worker.open_transfers < 64 && a->notify("beta", message).ok();
    sent += taken;
    bool moved = taken || a->progress();
    moved |= b->progress();
    b->has_remote("absent");
    quiet = moved ? 0 : quiet + 1;
  }
  EXPECT_LT(sent * message.size(), size_t{100} << 20);
  size_t read = 0;
  run_agents(*a, *b, [&] {
    read += b->messages().size();
    return read >= sent;
  });
  EXPECT_EQ(read, sent) << "none is lost";
}

// What it does not read waits at its sender in no more than its share of the transfers.
TEST(AgentBounds, ASlowReaderDelaysNoOtherPeer) {
  const auto a = make_agent(agent_options("alpha", "tcp", false));
  const auto deaf = make_agent(agent_options("deaf", "tcp", false));
  const auto other = make_agent(agent_options("other", "tcp", false));
  const AgentMemory mine(*a, 4096, 1), at_deaf(*deaf, 4096, 2), at_other(*other, 4096, 3);
  introduce(*a, *deaf);
  introduce(*a, *other);
  const std::string message(8'000, 'x');
  std::string why;
  size_t sent = 0;
  for (int quiet = 0; quiet < 200;) {
    const absl::Status said = a->notify("deaf", message);
    sent += said.ok();
    if (!said.ok()) why = std::string(said.message());
    bool moved = said.ok();
    moved |= a->progress();
    moved |= deaf->progress();
    quiet = moved ? 0 : quiet + 1;
  }
  EXPECT_THAT(why, HasSubstr("peer \"deaf\" has its share of the 4096 transfers"));
  EXPECT_EQ(a->stats().worker.open_transfers, 4096u / 3 + 1);

  const auto write = [&](const AgentMemory& to, const std::string& agent, Agent& driven) {
    const auto transfer = must(a->make_transfer(Op::kWrite, {mine.whole()}, {to.whole()}, agent));
    ASSERT_TRUE(a->post(transfer).ok());
    run_agents(*a, driven, [&] { return *a->state(transfer) == AgentTransferState::kDone; });
    EXPECT_EQ(to.bytes, mine.bytes);
    EXPECT_TRUE(a->release(transfer).ok());
  };
  write(at_other, "other", *other);
  write(at_deaf, "deaf", *deaf);
  ASSERT_TRUE(a->notify("other", "words").ok());
  std::vector<AgentMessage> heard;
  run_agents(*a, *other, [&] {
    heard = other->messages();
    return !heard.empty();
  });
  EXPECT_EQ(heard.front().payload, "words");

  // When it reads, all of it comes, and there is room.
  size_t read = 0;
  run_agents(*a, *deaf, [&] { return (read += deaf->messages().size()) == sent; });
  EXPECT_TRUE(a->notify("deaf", message).ok());
}

// Each answer is a copy of all metadata, and takes one of the agent's transfers.
TEST(AgentBounds, ARequesterThatReadsNothingHasOneAnswerInFlight) {
  const auto served = make_server("tcp");
  std::vector<uint8_t> bytes(64 * 600);
  std::vector<Descriptor> ranges;
  for (size_t i = 0; i < 600; ++i) {
    ranges.push_back({reinterpret_cast<uint64_t>(bytes.data()) + 64 * i, 64, 0});
  }
  ASSERT_TRUE(served->register_memory(ranges).ok());
  Liar asker("asker", *served);
  for (int i = 0; i < 5000; ++i) asker.say(AgentFrameKind::kFetch, "server");
  asker.wait_until_heard();
  // Another one is answered behind all that.
  const auto friendly = make_agent(agent_options("friend", "tcp"));
  ASSERT_TRUE(friendly->fetch_metadata("server", listener_of(*served)).ok());
  run_agents(*friendly, *served, [&] { return friendly->has_remote("server", ranges); });
  EXPECT_LE(served->stats().worker.open_transfers, 2u);
  // What was asked while an answer was under way is answered, by what is true then.
  std::vector<uint8_t> late(64);
  ASSERT_TRUE(
      served->register_memory({{reinterpret_cast<uint64_t>(late.data()), late.size(), 0}}).ok());
  asker.say(AgentFrameKind::kFetch, "server");
  size_t newest = 0;
  Notification note;
  ASSERT_TRUE(asker.worker
                  ->wait_until(
                      [&] {
                        while (asker.worker->next_notification(note)) {
                          AgentAssembler parts;
                          AgentFrame frame;
                          if (!parts.add(note.payload, frame).value_or(false)) continue;
                          const auto told = AgentMetadata::decode(frame.payload,
                                                                  *agent_options("any").worker.key);
                          newest = told.ok() ? told->ranges.size() : 0;
                        }
                        return newest == 601;
                      },
                      patient(std::chrono::seconds(60)))
                  .ok());
  ASSERT_TRUE(served->deregister_memory(ranges).ok());
}

// Promise(limits): Metadata from members of the cluster cannot fill an agent | uid and name must be
//   the connection's; ranges and departed agents are counted
TEST(AgentBounds, AnAgentGivesOnlyItsOwnMetadata) {
  const auto served = make_server("tcp");
  Liar liar("liar", *served);
  AgentMetadata others = liar.metadata("somebody");
  others.uid = WorkerUid::random();
  liar.send(others);
  AgentMetadata anothers = liar.metadata("liar");  // of a process that it is not
  anothers.uid = WorkerUid::random();
  liar.send(anothers);
  liar.wait_until_heard();
  EXPECT_FALSE(served->has_remote("liar"));
  // Nor under ever new names: it has one.
  for (int i = 0; i < 20; ++i) liar.send(liar.metadata("liar-" + std::to_string(i)));
  liar.send(liar.metadata("liar"));
  liar.until(*served, [&] { return served->has_remote("liar"); });
  EXPECT_FALSE(served->has_remote("somebody"));
  EXPECT_EQ(served->stats().remotes, 1u);
}

// Nobody speaks for the one whose name he has, and none is answered in another's place.
TEST(AgentBounds, AnAgentOfTheSameNameCannotWithdrawMetadata) {
  const auto served = make_server("tcp", false);
  Liar first("twin", *served), second("twin", *served);
  first.send(first.metadata("twin"));
  first.until(*served, [&] { return served->has_remote("twin"); });
  const auto until_heard = [&](const Liar& liar) {
    liar.until(*served, [&] { return served->has_remote("absent"), liar.all_heard(); });
  };
  second.say(AgentFrameKind::kInvalidate, "");
  until_heard(second);
  EXPECT_TRUE(served->has_remote("twin"));
  // What it answers comes before what it says later.
  first.say(AgentFrameKind::kFetch, "another");
  until_heard(first);
  ASSERT_TRUE(served->notify("twin", "marker").ok());
  Notification note;
  first.until(*served, [&] { return first.worker->next_notification(note); });
  EXPECT_EQ(note.payload, agent_frame(AgentFrameKind::kMessage, "marker"));
}

// Who takes its metadata back and gives it again is one agent all the same, and takes no place from
// those that have gone.
TEST(AgentBounds, RepeatedMetadataIsStoredOnce) {
  const auto served = make_server("tcp");
  Liar faithful("faithful", *served);
  const auto again = [&](size_t times) {
    for (size_t i = 0; i < times; ++i) {
      faithful.send(faithful.metadata("faithful"));
      faithful.say(AgentFrameKind::kInvalidate, "");
    }
    faithful.wait_until_heard();
  };
  again(kMostGoneRemotes + 100);
  {
    Liar gone("gone", *served);
    gone.send(gone.metadata("gone"));
    gone.wait_until_heard();
  }
  again(400);
  faithful.send(faithful.metadata("faithful"));
  faithful.until(*served, [&] { return served->has_remote("faithful"); });
  EXPECT_TRUE(served->has_remote("gone"));
}

TEST(AgentBounds, AnAgentHasSoManyRanges) {
  const auto a = make_agent(agent_options("alpha", "tcp", false));
  const auto b = make_agent(agent_options("beta", "tcp", false));
  AgentMetadata part = *AgentMetadata::decode(*b->metadata(), *agent_options("any").worker.key);
  part.partial = true;
  RemoteRegion region{.owner = part.uid, .key = 1, .size = 64, .generation = 1};
  region.access = Access::kRemoteReadWrite;
  size_t ranges = 0;
  absl::Status status;
  for (uint64_t at = 64; status.ok() && ranges < 2 * kMostRemoteRanges; ranges += 60'000) {
    part.ranges.clear();
    for (int i = 0; i < 60'000; ++i, at += 64) part.ranges.push_back({{at, 64, 0}, region});
    status = a->add_remote(part.encode(*agent_options("any").worker.key)).status();
  }
  EXPECT_THAT(status, fails_with(Code::kResourceExhausted, {"whole"}));
  EXPECT_LE(ranges, kMostRemoteRanges + 60'000);
  // What is said again takes no place, nor twice in one part.
  const auto b2 = make_agent(agent_options("gamma", "tcp", false));
  AgentMetadata same = *AgentMetadata::decode(*b2->metadata(), *agent_options("any").worker.key);
  same.partial = true;
  region.owner = same.uid;
  for (uint64_t i = 0; i < 60'000; ++i) same.ranges.push_back({{64 + i / 2 * 64, 64, 0}, region});
  const std::string bytes = same.encode(*agent_options("any").worker.key);
  for (size_t i = 0; i < kMostRemoteRanges / 30'000 + 1; ++i) {
    ASSERT_EQ(a->add_remote(bytes).status(), absl::OkStatus());
  }
  part.partial = false;  // takes the place of all the others
  EXPECT_TRUE(a->add_remote(part.encode(*agent_options("any").worker.key)).ok());
}

// Also where they are so few that nobody counts them.
TEST(AgentBounds, ADepartedPeerIsForgotten) {
  const auto a = make_agent(agent_options("alpha", "tcp", false));
  auto b = make_agent(agent_options("beta", "tcp", false));
  introduce(*b, *a);
  ASSERT_TRUE(b->notify("alpha", "words").ok());
  run_agents(*a, *b, [&] { return a->messages().size() == 1; });
  EXPECT_EQ(a->stats().senders, 1u);
  b = nullptr;
  run_agents(*a, *a, [&] {
    a->has_remote("absent");
    return a->stats().senders == 0;
  });
}

TEST(AgentBounds, WhatIsNoFrameIsPassedOver) {
  const auto a = make_agent(agent_options("alpha", "tcp", false));
  Liar liar("liar", *a);
  liar.say(static_cast<AgentFrameKind>(77), "what is this?");
  liar.say(AgentFrameKind::kFetch, "alpha");  // which serves nobody
  liar.say(AgentFrameKind::kMessage, "words");
  liar.until(*a, [&] { return liar.all_heard(); });
  const std::vector<AgentMessage> heard = a->messages();
  ASSERT_EQ(heard.size(), 1u);
  EXPECT_EQ(heard[0].payload, "words");
  EXPECT_EQ(a->stats().worker.transfers_submitted, 0u) << "it answered";
}

TEST(AgentBounds, OneRequestGetsOneAnswer) {
  const auto served = make_server("tcp", false);
  Liar asker("asker", *served);
  asker.say(AgentFrameKind::kFetch, "server");
  asker.until(*served, [&] {
    return served->has_remote("absent"), served->stats().worker.transfers_ended == 1;
  });
  for (int i = 0; i < 10; ++i) {
    served->has_remote("absent");
    served->progress();
    asker.worker->progress();
  }
  EXPECT_EQ(served->stats().worker.transfers_submitted, 1u);
}

// A worker remembers 1,024 peers that have gone. Of others it tells no more, also where the agent
// had heard that they had come.
TEST(AgentBounds, APeerThatLeftUnnoticedIsForgotten) {
  const auto a = make_agent(agent_options("alpha", "tcp"));
  WorkerOptions options = agent_options("caller", "tcp").worker;
  options.name = "caller";
  options.settings = {{"tcp.sockets", "1"}};
  const auto caller = *Worker::create(std::move(options));
  // It is the agent's word that is waited for: nothing wakes the caller for it.
  const auto until_up = [&](uint64_t count) {
    run_agents(*a, *a, [&] {
      caller->progress();
      return a->stats().worker.peers_up == count;
    });
  };
  const auto come = [&](size_t count) {
    std::vector<PeerId> peers;
    for (size_t i = 0; i < count; ++i) peers.push_back(*caller->connect(a->address()));
    until_up(count);
    return peers;
  };
  const auto go = [&](const std::vector<PeerId>& peers) {
    for (const PeerId peer : peers) caller->begin_disconnect(peer, Time::zero());
    until_up(0);
  };
  constexpr size_t kAtATime = 60, kRemembered = 1024;
  std::vector<PeerId> peers = come(kAtATime);
  a->has_remote("absent");
  EXPECT_EQ(a->stats().senders, kAtATime);
  go(peers);
  // Their rows are others' then.
  for (size_t gone = 0; gone < kRemembered + 2 * kAtATime; gone += kAtATime) {
    go(come(kAtATime));
    if (testing::Test::HasFailure()) return;
  }
  peers = come(kAtATime);
  a->has_remote("absent");
  EXPECT_EQ(a->stats().senders, kAtATime);
}

// Agents come, say a word and go, while nobody asks for messages.
class ManyWent : public ScriptedPeers {};

TEST_F(ManyWent, WhatTheySaidIsKeptWithTheirNames) {
  const auto hub = *Agent::create(std::move(worker_), agent_options("hub", "", false));
  constexpr uint64_t kAll = 1024 + 200;
  for (uint64_t i = 1; i <= kAll; ++i) {
    HelloInfo who = caller(i, i);
    who.name = "agent-" + std::to_string(i);
    ScriptedRail& rail = provider_->call_in(who);
    for (int turn = 0; turn < 2; ++turn) hub->progress();
    notify(rail, agent_frame(AgentFrameKind::kMessage, who.name));
    rail.close(absl::AbortedError("it leaves"), *provider_->sink);
    hub->progress();
  }
  const std::vector<AgentMessage> all = hub->messages();
  ASSERT_EQ(all.size(), kAll);
  for (uint64_t i = 1; i <= kAll; ++i) {
    EXPECT_EQ(all[i - 1].agent, "agent-" + std::to_string(i));
    EXPECT_EQ(all[i - 1].payload, all[i - 1].agent);
  }
  EXPECT_EQ(hub->stats().senders, 0u) << "they are kept for ever";
}

// Those who gave their metadata unasked, and have gone: the oldest are forgotten.
TEST(AgentBounds, AgentsThatCameAndWentAreForgotten) {
  const auto served = make_server("tcp");
  const size_t all = kMostGoneRemotes + 20;
  const auto name = [](size_t i) { return "agent-" + std::to_string(i); };
  Liar faithful("faithful", *served);
  faithful.send(faithful.metadata("faithful"));
  faithful.wait_until_heard();
  for (size_t i = 0; i < all; ++i) {
    Liar one(name(i), *served);
    one.send(one.metadata(name(i)));
    one.wait_until_heard();
    if (testing::Test::HasFatalFailure()) return;
  }
  faithful.until(*served, [&] { return served->has_remote(name(all - 1)); });
  EXPECT_TRUE(served->has_remote("faithful")) << "it is still there";
  EXPECT_LE(served->stats().remotes, kMostGoneRemotes + 10);
  EXPECT_FALSE(served->has_remote(name(0)));
}

}  // namespace
}  // namespace baton::kvtransfer
