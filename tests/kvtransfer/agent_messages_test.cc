// Messages between two agents, over every provider: of any length, in order, behind the bytes that
// they announce; and those that were lost with their agent, which are told.
#include "kvtransfer/internal/agent_messages.h"
#include "kvtransfer/agent.h"
#include "kvtransfer/internal/agent_outbox.h"
#include "tests/kvtransfer/agent_fixture.h"
#include "tests/manual_clock.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

TEST_P(AgentTest, MessagesOfAnyLengthAndBothWays) {
  EXPECT_EQ(introduce(*b_, *a_), "alpha");
  ASSERT_TRUE(a_->notify("beta", "").ok());
  ASSERT_TRUE(a_->notify("beta", std::string("\0 binary \xff", 10)).ok());
  ASSERT_TRUE(a_->notify("beta", std::string(1 << 20, 'x')).ok());
  ASSERT_TRUE(b_->notify("alpha", "and back").ok());
  std::vector<AgentMessage> got = heard(*b_, 3);
  EXPECT_EQ(got[0].payload, "");
  EXPECT_EQ(got[1].payload.size(), 10u);
  EXPECT_EQ(got[2].payload, std::string(1 << 20, 'x'));
  got = heard(*a_, 1);
  EXPECT_EQ(got[0].agent, "beta");
  EXPECT_EQ(got[0].payload, "and back");
  EXPECT_TRUE(absl::IsNotFound(a_->notify("gamma", "who?")));
  EXPECT_TRUE(absl::IsInvalidArgument(a_->notify("beta", std::string(kMaxAgentMessage + 1, 'x'))));
}

// Of an agent that does not answer a message is refused, until it does.
TEST(AgentMessages, ReachAReconnectedPeer) {
  AgentOptions options = agent_options("alpha", "tcp", false);
  options.worker.settings = {{"tcp.handshake_ms", "200"}};
  const auto a = make_agent(std::move(options));
  const auto b = make_agent(agent_options("beta", "tcp", false));
  introduce(*a, *b);
  EXPECT_TRUE(a->notify("beta", "first").ok()) << "nothing is known of it yet";
  run_agents(*a, *a, [&] { return !a->has_remote("beta"); });
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(absl::IsUnavailable(a->notify("beta", "second")));
    EXPECT_FALSE(a->has_remote("beta")) << "it is being called again";
  }
  run_agents(*a, *b, [&] { return a->notify("beta", "third").ok(); });
  EXPECT_TRUE(a->has_remote("beta"));
  std::vector<AgentMessage> got;
  run_agents(*a, *b, [&] { return !(got = b->messages()).empty(); });
  EXPECT_EQ(got[0].payload, "third");
}

// Also where there are several rails, and a backlog on them.
// Promise(agents): Messages of one thread arrive in the order sent, up to 60,000 bytes each |
//   messages under way keep one rail, and a rail keeps order
TEST_P(AgentTest, MessagesArriveInTheOrderSent) {
  for (const size_t large : {10, 1000, 50'000}) {
    constexpr size_t kCount = 400;
    for (size_t i = 0; i < kCount; ++i) {
      std::string message = std::to_string(i) + " ";
      message.resize(i % 4 == 3 ? large + 10 : 10 + i % 290, 'x');
      ASSERT_TRUE(a_->notify("beta", message).ok());
    }
    const std::vector<AgentMessage> all = heard(*b_, kCount);
    for (size_t i = 0; i < kCount; ++i) {
      ASSERT_EQ(std::stoul(all[i].payload), i) << "among those of " << large;
    }
  }
}

// Promise(agents): A message of a transfer is read only after the transfer's bytes are there | it
//   travels with the last byte or after all parts
TEST_P(AgentTest, AMessageComesAfterTheBytesOfAllParts) {
  AgentOptions slow = agent_options("slow", GetParam());
  slow.worker.shape = *LinkShape::parse("1Gb/s");  // on which small things overtake large ones
  const auto sender = make_agent(std::move(slow));
  AgentMemory from(*sender, 2 << 20, 5), more_from(*sender, 2 << 20, 7);
  AgentMemory to(*b_, 2 << 20, 6), more_to(*b_, 2 << 20, 8);
  introduce(*sender, *b_);
  const auto write = sender->make_transfer(Op::kWrite, {from.whole(), more_from.whole()},
                                           {to.whole(), more_to.whole()}, "beta", "all");
  ASSERT_TRUE(sender->post(*write).ok());
  EXPECT_EQ(heard(*b_, 1)[0].payload, "all");
  EXPECT_EQ(from.bytes, to.bytes);
  EXPECT_EQ(more_from.bytes, more_to.bytes);
  EXPECT_TRUE(sender->wait(*write, kLong).ok());
}

// Promise(agents): A message that was not confirmed before its agent left is reported once, with
//   its bytes | kept until its end; 1,024 messages and 16 MiB at most
TEST(Agent, MessagesThatAreLostWithTheirAgentAreTold) {
  const auto a = make_agent(agent_options("alpha", "tcp", false));
  const auto b = make_agent(agent_options("beta", "tcp", false));
  introduce(*a, *b);
  ASSERT_TRUE(a->notify("beta", "heard").ok());
  std::vector<AgentMessage> heard;
  run_agents(*a, *b, [&] {
    for (AgentMessage& message : b->messages()) heard.push_back(std::move(message));
    return !heard.empty() && a->stats().worker.open_transfers == 0;
  });
  EXPECT_TRUE(a->lost_messages().empty());
  // From here on beta stands still: nobody confirms anything.
  const std::string large(200'000, 'l');
  for (const std::string& text : {std::string("first"), large, std::string()}) {
    ASSERT_TRUE(a->notify("beta", text).ok());
  }
  EXPECT_TRUE(a->lost_messages().empty());
  a->remove_remote("beta");
  const std::vector<AgentLostMessage> lost = a->lost_messages();
  std::vector<std::string> texts;
  for (const AgentLostMessage& message : lost) {
    EXPECT_EQ(message.agent, "beta");
    EXPECT_TRUE(absl::IsUnavailable(message.why)) << message.why;
    texts.push_back(message.payload);
  }
  EXPECT_EQ(texts, (std::vector<std::string>{"first", large, ""}));
  EXPECT_EQ(a->stats().messages_lost, 3u);
  EXPECT_TRUE(a->lost_messages().empty()) << "told twice";
}

TEST(Agent, TheNewestUnreadLostMessagesAreKept) {
  AgentOptions options = agent_options("alpha", "tcp", false);
  options.worker.max_transfers = 256;
  const auto a = make_agent(options);
  const auto b = make_agent(agent_options("beta", "tcp", false));
  constexpr size_t kAll = 3000;
  for (size_t said = 0; said < kAll;) {
    introduce(*a, *b);
    // What is refused for want of room is not lost.
    while (said < kAll && a->notify("beta", std::to_string(said)).ok()) ++said;
    a->remove_remote("beta");
  }
  EXPECT_EQ(a->stats().messages_lost, kAll);
  const std::vector<AgentLostMessage> lost = a->lost_messages();
  ASSERT_EQ(lost.size(), 1024u);
  for (size_t i = 0; i < lost.size(); ++i) {
    EXPECT_EQ(lost[i].payload, std::to_string(kAll - lost.size() + i));
  }
}

TEST(Agent, LostMessagesAreKeptUpToTheSizeLimit) {
  const auto a = make_agent(agent_options("alpha", "tcp", false));
  const auto b = make_agent(agent_options("beta", "tcp", false));
  constexpr size_t kEach = 1 << 20, kKept = kMaxAgentMessage / kEach;
  char letter = 'a';
  for (int round = 0; round < 3; ++round) {
    introduce(*a, *b);
    for (int i = 0; i < 8; ++i) {
      ASSERT_TRUE(a->notify("beta", std::string(kEach, letter++)).ok());
    }
    a->remove_remote("beta");
  }
  EXPECT_EQ(a->stats().messages_lost, 24u);
  const std::vector<AgentLostMessage> lost = a->lost_messages();
  ASSERT_EQ(lost.size(), kKept);
  EXPECT_EQ(lost.front().payload, std::string(kEach, static_cast<char>(letter - kKept)));
}

// Another agent keeps parts of 64 MiB of messages at most: nobody may be sent more of them at once.
TEST(Agent, LargeMessagesOfManyThreadsAtOnceAllArrive) {
  const auto a = make_agent(agent_options("alpha", "tcp", true));
  const auto b = make_agent(agent_options("beta", "tcp", false));
  introduce(*a, *b);
  constexpr size_t kThreads = 8;
  std::vector<absl::Status> said(kThreads);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      const std::string message(kMaxAgentMessage, static_cast<char>('a' + i));
      do {  // it waits 10 s for room, and a busy machine may take longer
        said[i] = a->notify("beta", message);
      } while (absl::IsResourceExhausted(said[i]));
    });
  }
  std::set<char> heard;
  const auto listen = [&] {
    for (const AgentMessage& message : b->messages()) {
      EXPECT_EQ(message.payload.size(), kMaxAgentMessage);
      heard.insert(message.payload.front());
    }
    return heard.size() == kThreads;
  };
  run_agents(*a, *b, listen);
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : said) EXPECT_TRUE(status.ok()) << status;
}

// An agent whose time passes quickly while it waits.
struct HurriedAgent {
  explicit HurriedAgent(AgentOptions options) {
    options.worker.name = options.name;
    options.worker.clock = &clock;
    auto made = must(Worker::create(options.worker));
    worker = made.get();
    agent = *Agent::create(std::move(made), options);
  }
  absl::Status notify(std::string_view who, std::string_view message) {
    std::atomic<bool> over{false};
    std::thread hurry([&] {
      while (!over) {
        clock.advance(std::chrono::seconds(1));
        worker->wake();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
    absl::Status status = agent->notify(who, message);
    over = true;
    hurry.join();
    return status;
  }
  ManualClock clock;
  Worker* worker = nullptr;
  std::unique_ptr<Agent> agent;
};

// It has had 64 MiB, and says nothing.
TEST(Agent, ALargeMessageForWhichNoRoomComesIsRefused) {
  AgentOptions options = agent_options("alpha", "tcp", false);
  options.worker.settings = {{"tcp.stall_ms", "3600000"}, {"tcp.handshake_ms", "3600000"}};
  HurriedAgent a(options);
  const auto b = make_agent(agent_options("beta", "tcp", false));
  introduce(*a.agent, *b);
  for (size_t i = 0; i < AgentAssembler::kMaxHeld / kMaxAgentMessage; ++i) {
    ASSERT_EQ(a.agent->notify("beta", std::string(kMaxAgentMessage, 'l')), absl::OkStatus());
  }
  const absl::Status refused = a.notify("beta", std::string(kMaxAgentMessage, 'm'));
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_NE(refused.message().find("in flight to this agent"), std::string::npos) << refused;
}

TEST(Agent, WaitMessagesReturnsAtMostTheRequestedCount) {
  const auto a = make_agent(agent_options("alpha", "tcp", false));
  const auto b = make_agent(agent_options("beta", "tcp"));
  introduce(*b, *a);
  EXPECT_TRUE(a->wait_messages(Time::zero(), 5).empty());
  for (const char* words : {"one", "two", "three"}) ASSERT_TRUE(b->notify("alpha", words).ok());
  run_agents(*a, *a, [&] { return a->stats().worker.notifications_waiting == 3; });
  std::vector<AgentMessage> heard = a->wait_messages(kLong, 2);
  ASSERT_EQ(heard.size(), 2u);
  EXPECT_EQ(heard[1].payload, "two");
  heard = a->wait_messages(kLong, 2);
  ASSERT_EQ(heard.size(), 1u);
  EXPECT_EQ(heard[0].payload, "three");
  EXPECT_TRUE(a->wait_messages(Time::zero(), 5).empty());
  // It sleeps, and is told.
  std::thread waiting([&] { heard = a->wait_messages(kLong, 2); });
  ASSERT_TRUE(b->notify("alpha", "four").ok());
  waiting.join();
  ASSERT_EQ(heard.size(), 1u);
  EXPECT_EQ(heard[0].payload, "four");
}

// Of what was refused half-way the other agent keeps nothing, so that others find room there.
TEST(Agent, LargeMessagesArriveAfterSomeThatWereRefusedHalfWay) {
  AgentOptions options = agent_options("alpha", "tcp", false);
  options.worker.max_transfers = 16;
  options.worker.settings = {{"tcp.stall_ms", "3600000"}, {"tcp.handshake_ms", "3600000"}};
  HurriedAgent a(options);
  const auto b = make_agent(agent_options("beta", "tcp", false));
  introduce(*a.agent, *b);
  const std::string large(kMaxAgentMessage, 'l');
  std::vector<AgentMessage> came;
  const auto quiet = [&] {
    for (AgentMessage& message : b->messages()) came.push_back(std::move(message));
    return a.agent->stats().worker.open_transfers == 0;
  };
  constexpr size_t kKept = AgentAssembler::kMaxHeld / kMaxAgentMessage;
  for (size_t i = 0; i <= kKept; ++i) {
    // Beta stands still.
    const absl::Status refused = a.notify("beta", large);
    EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
    run_agents(*a.agent, *b, quiet);
  }
  EXPECT_TRUE(came.empty());
  absl::Status said;
  std::thread sender([&] { said = a.agent->notify("beta", large); });
  run_agents(*a.agent, *b, [&] { return quiet() && !came.empty(); });
  sender.join();
  EXPECT_TRUE(said.ok()) << said;
  ASSERT_EQ(came.size(), 1u);
  EXPECT_EQ(came[0].payload, large);
  EXPECT_TRUE(a.agent->lost_messages().empty());
}

// Transfers whose messages come in parts.
class LargeMessages : public ::testing::Test {
 protected:
  static constexpr size_t kFit = AgentAssembler::kMaxHeld / kMaxAgentMessage;

  LargeMessages() {
    a_ = make_agent(agent_options("alpha", "tcp", false));
    b_ = make_agent(agent_options("beta", "tcp", false));
    mine_.emplace(*a_, 4096, 1);
    theirs_.emplace(*b_, 4096, 2);
    introduce(*a_, *b_);
  }
  AgentTransferId make(char letter) {
    return *a_->make_transfer(Op::kWrite, {mine_->whole()}, {theirs_->whole()}, "beta",
                              std::string(kMaxAgentMessage, letter));
  }
  std::vector<AgentTransferId> post(size_t count, size_t first = 0) {
    std::vector<AgentTransferId> out;
    for (size_t i = first; i < first + count; ++i) {
      out.push_back(make(static_cast<char>('a' + i)));
      EXPECT_EQ(a_->post(out.back()), absl::OkStatus());
    }
    return out;
  }
  // As many as find room, and behind them `more` that do not. Beta reads nothing.
  std::vector<AgentTransferId> post_with_line(size_t more) {
    constexpr uint64_t kWindow = 256;  // what the worker has of one transfer
    std::vector<AgentTransferId> out = post(kFit);
    run_agents(*a_, *b_, [&] { return a_->stats().worker.open_transfers > (kFit - 1) * kWindow; });
    for (size_t i = 0; i < more; ++i) {  // one by one: they ask for room when their bytes are there
      out.push_back(post(1, out.size()).front());
      run_agents(*a_, *b_, [&] { return a_->stats().running == kFit; });
    }
    return out;
  }
  // Does not move it: nobody asks for a transfer that is in line.
  absl::Status status(AgentTransferId id) const { return a_->status(id); }
  bool runs(AgentTransferId id) const {
    return absl::IsUnavailable(status(id)) &&
           std::string(status(id).message()).find("is running") != std::string::npos;
  }
  void hear() {
    for (const AgentMessage& message : b_->messages()) {
      EXPECT_EQ(message.payload.size(), kMaxAgentMessage);
      EXPECT_EQ(message.payload.find_first_not_of(message.payload.front()), std::string::npos);
      heard_ += message.payload.front();
    }
  }
  // All that it is told has come, and nothing is on its way.
  void quiet() {
    run_agents(*a_, *b_, [&] {
      hear();
      return a_->stats().worker.open_transfers == 0;
    });
    hear();
  }

  std::optional<AgentMemory> mine_, theirs_;
  std::unique_ptr<Agent> a_, b_;
  std::string heard_;
};

// Promise(agents): Large messages all arrive, or `notify()` says that too many are under way | 64
//   MiB of incomplete parts per sender; transfers wait in turn
TEST_F(LargeMessages, MessagesOfConcurrentTransfersAllArrive) {
  const std::vector<AgentTransferId> all = post(kFit + 3);
  run_agents(*a_, *b_, [&] {
    hear();
    return heard_.size() == all.size();
  });
  quiet();
  for (const AgentTransferId id : all) EXPECT_EQ(status(id), absl::OkStatus());
  std::sort(heard_.begin(), heard_.end());
  EXPECT_EQ(heard_, "abcdefg");
}

TEST_F(LargeMessages, AnAbortHalfWayBlocksNothing) {
  AgentTransferId last;
  for (size_t i = 0; i <= kFit; ++i) {
    last = make('x');
    ASSERT_EQ(a_->post(last), absl::OkStatus());
    run_agents(*a_, *b_, [&] { return b_->stats().worker.notifications_waiting > 0; });
    ASSERT_EQ(a_->abort(last), absl::OkStatus());
    quiet();
    ASSERT_TRUE(absl::IsCancelled(status(last))) << status(last);
  }
  EXPECT_EQ(heard_, "");
  // Also the same one again.
  ASSERT_EQ(a_->post(last), absl::OkStatus());
  const std::vector<AgentTransferId> more = post(kFit);
  run_agents(*a_, *b_, [&] {
    hear();
    return heard_.size() == 1 + more.size();
  });
  quiet();
  EXPECT_EQ(status(last), absl::OkStatus());
}

// Whoever waits and gives up leaves the line, and those behind it move up.
TEST_F(LargeMessages, AbortingOneQueuedTransferSparesTheOthers) {
  const std::vector<AgentTransferId> all = post_with_line(3);
  for (const AgentTransferId id : all) EXPECT_TRUE(runs(id)) << status(id);
  ASSERT_EQ(a_->abort(all[kFit]), absl::OkStatus());
  EXPECT_TRUE(absl::IsCancelled(status(all[kFit]))) << status(all[kFit]);
  ASSERT_EQ(a_->release(all[kFit + 1]), absl::OkStatus());
  run_agents(*a_, *b_, [&] {
    hear();
    return heard_.size() == kFit + 1;
  });
  quiet();
  std::sort(heard_.begin(), heard_.end());
  EXPECT_EQ(heard_, "abcdg");
}

TEST_F(LargeMessages, MessagesOfQueuedTransfersFailWithTheirAgent) {
  const std::vector<AgentTransferId> all = post_with_line(3);
  b_ = nullptr;
  run_agents(*a_, *a_, [&] {
    return std::none_of(all.begin(), all.end(), [&](AgentTransferId id) { return runs(id); });
  });
  for (const AgentTransferId id : all) {
    EXPECT_EQ(*a_->state(id), AgentTransferState::kFailed);
  }
}

}  // namespace
}  // namespace baton::kvtransfer
