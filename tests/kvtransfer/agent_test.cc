// Two agents over every provider: memory, metadata, transfers by lists and indices, and the end of
// each. Messages: agent_messages_test.cc.
#include "kvtransfer/agent.h"

#include "tests/fails_with.h"
#include "tests/held_port.h"
#include "tests/kvtransfer/agent_fixture.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

TEST_P(AgentTest, ListsAndIndicesMoveThePagesTheyNameAndNoOthers) {
  constexpr size_t kPage = 1000;  // of 4096: gaps stay as they are
  const auto local = a_->prepare_local(mine_->pages(kPage, 256));
  const auto remote = a_->prepare_remote("beta", theirs_->pages(kPage, 256));
  ASSERT_TRUE(local.ok() && remote.ok()) << local.status() << remote.status();
  const std::vector<int64_t> from = {5, 0, 255, 17, 18, 19};
  const std::vector<int64_t> to = {9, 200, 1, 100, 101, 102};
  std::vector<uint8_t> expected = theirs_->bytes;
  for (size_t i = 0; i < from.size(); ++i) {
    std::memcpy(&expected[to[i] * 4096], &mine_->bytes[from[i] * 4096], kPage);
  }
  const auto write = must(a_->make_transfer(Op::kWrite, *local, from, *remote, to, "six pages"));
  EXPECT_EQ(*a_->state(write), AgentTransferState::kIdle);
  EXPECT_TRUE(absl::IsFailedPrecondition(a_->status(write)));
  EXPECT_TRUE(absl::IsFailedPrecondition(a_->telemetry(write).status()));
  ASSERT_TRUE(run(write).ok());
  EXPECT_EQ(theirs_->bytes, expected);
  const std::vector<AgentMessage> got = heard(*b_, 1);
  EXPECT_EQ(got[0].agent, "alpha");
  EXPECT_EQ(got[0].payload, "six pages");

  const auto telemetry = must(a_->telemetry(write));
  EXPECT_EQ(telemetry.bytes, 6 * kPage);
  EXPECT_EQ(telemetry.descriptors, 6u);
  EXPECT_GT(telemetry.transfer_duration, Time::zero());

  // Back, elsewhere.
  const auto read = a_->make_transfer(Op::kRead, *local, {77}, *remote, {9}, "read it");
  ASSERT_TRUE(run(*read).ok());
  EXPECT_EQ(std::memcmp(&mine_->bytes[77 * 4096], &expected[9 * 4096], kPage), 0);
  EXPECT_EQ(heard(*b_, 1)[0].payload, "read it");
  EXPECT_TRUE(a_->release(write).ok());
  EXPECT_TRUE(a_->release(*read).ok());
  EXPECT_TRUE(a_->release_list(*local).ok());
  EXPECT_TRUE(a_->release_list(*remote).ok());
  EXPECT_EQ(a_->stats().transfers + a_->stats().lists, 0u);
}

TEST_P(AgentTest, AFinishedTransferIsPostedAgain) {
  const auto local = a_->prepare_local(mine_->pages(4096, 64));
  const auto remote = a_->prepare_remote("beta", theirs_->pages(4096, 64));
  std::vector<int64_t> all(64);
  std::iota(all.begin(), all.end(), 0);
  const auto write = a_->make_transfer(Op::kWrite, *local, all, *remote, all);
  for (int round = 0; round < 20; ++round) {
    for (uint8_t& byte : mine_->bytes) byte = static_cast<uint8_t>(byte * 3 + 1);
    const std::string text = "round " + std::to_string(round);
    const std::string_view message = text;
    ASSERT_TRUE(a_->post(*write, &message).ok());
    ASSERT_TRUE(a_->wait(*write, kLong).ok());
    for (const Descriptor& page : theirs_->pages(4096, 64)) {
      const size_t at = page.address - theirs_->address();
      ASSERT_EQ(std::memcmp(&theirs_->bytes[at], &mine_->bytes[at], 4096), 0);
    }
    EXPECT_EQ(heard(*b_, 1)[0].payload, text);
  }
}

TEST_P(AgentTest, ToItself) {
  AgentMemory other(*a_, 8192, 9);
  const std::vector<Descriptor> from = {{mine_->address(100), 500, 0}};
  const std::vector<Descriptor> to = {{other.address(7), 500, 0}};
  const auto write = must(a_->make_transfer(Op::kWrite, from, to, "alpha", "me"));
  ASSERT_TRUE(run(write).ok());
  EXPECT_EQ(std::memcmp(&other.bytes[7], &mine_->bytes[100], 500), 0);
  EXPECT_EQ(heard(*a_, 1)[0].agent, "alpha");
}

// Promise(agents): Stale ids, gone memory and removed agents are errors that say so | ids are never
//   reused
TEST_P(AgentTest, StaleAndForeignIdsAreNotFound) {
  const auto local = a_->prepare_local({mine_->pages(64, 4)});
  const auto remote = a_->prepare_remote("beta", theirs_->pages(64, 4));
  const auto foreign = b_->prepare_local({theirs_->pages(64, 4)});
  const auto made = must(a_->make_transfer(Op::kWrite, *local, {0}, *remote, {0}));
  EXPECT_TRUE(absl::IsNotFound(b_->post(made)));
  EXPECT_TRUE(
      absl::IsNotFound(a_->make_transfer(Op::kWrite, *foreign, {0}, *remote, {0}).status()));
  EXPECT_TRUE(
      absl::IsInvalidArgument(a_->make_transfer(Op::kWrite, *remote, {0}, *local, {0}).status()));
  EXPECT_TRUE(absl::IsNotFound(a_->release_list({})));
  ASSERT_TRUE(a_->release_list(*local).ok());
  EXPECT_TRUE(absl::IsNotFound(a_->release_list(*local)));
  EXPECT_TRUE(run(made).ok()) << "it does not need its lists";
  ASSERT_TRUE(a_->release(made).ok());
  EXPECT_TRUE(absl::IsNotFound(a_->release(made)));
  EXPECT_TRUE(absl::IsNotFound(a_->post(made)));
  EXPECT_TRUE(absl::IsNotFound(a_->state(made).status()));
  EXPECT_TRUE(absl::IsNotFound(a_->status(made)));
  EXPECT_TRUE(absl::IsNotFound(a_->wait(made)));
  EXPECT_TRUE(absl::IsNotFound(a_->abort(made)));
  EXPECT_TRUE(absl::IsNotFound(a_->telemetry(made).status()));
  a_->abandon(made);
}

TEST_P(AgentTest, MemoryThatIsGoneUnderAListFailsTheTransfer) {
  const auto local = a_->prepare_local(mine_->pages(64, 4));
  const auto remote = a_->prepare_remote("beta", theirs_->pages(64, 4));
  const auto made = a_->make_transfer(Op::kWrite, *local, {0}, *remote, {0});
  const auto reading = a_->make_transfer(Op::kRead, *local, {0}, *remote, {0});
  ASSERT_TRUE(b_->deregister_memory({theirs_->whole()}).ok());
  const std::vector<uint8_t> before = theirs_->bytes;
  EXPECT_FALSE(run(*made).ok());
  EXPECT_EQ(*a_->state(*made), AgentTransferState::kFailed);
  EXPECT_FALSE(run(*reading).ok());
  EXPECT_EQ(theirs_->bytes, before);
  ASSERT_TRUE(a_->deregister_memory({mine_->whole()}).ok());
  EXPECT_TRUE(absl::IsNotFound(a_->deregister_memory({mine_->whole()})));
  EXPECT_FALSE(run(*made).ok());
  EXPECT_TRUE(absl::IsNotFound(a_->prepare_local(mine_->pages(64, 4)).status()));
}

TEST_P(AgentTest, AnAgentThatWasRemovedAndOneThatTookItsName) {
  const auto local = a_->prepare_local(mine_->pages(64, 4));
  const auto remote = a_->prepare_remote("beta", theirs_->pages(64, 4));
  const auto made = a_->make_transfer(Op::kWrite, *local, {0}, *remote, {0});
  EXPECT_TRUE(a_->has_remote("beta", theirs_->pages(64, 4)));
  EXPECT_FALSE(a_->has_remote("beta", mine_->pages(64, 4)));
  EXPECT_EQ(introduce(*a_, *b_), "beta") << "again: nothing changes";
  EXPECT_TRUE(run(*made).ok());
  a_->remove_remote("beta");
  a_->remove_remote("beta");
  EXPECT_FALSE(a_->has_remote("beta"));
  EXPECT_TRUE(absl::IsNotFound(a_->post(*made)));
  EXPECT_TRUE(absl::IsNotFound(a_->prepare_remote("beta", theirs_->pages(64, 4)).status()));
  EXPECT_EQ(introduce(*a_, *b_), "beta");
  EXPECT_TRUE(absl::IsNotFound(a_->post(*made))) << "its list is of before";

  const auto again = a_->prepare_remote("beta", theirs_->pages(64, 4));
  b_ = nullptr;
  b_ = make_agent(agent_options("beta", GetParam()));
  EXPECT_EQ(introduce(*a_, *b_), "beta");
  EXPECT_TRUE(absl::IsNotFound(a_->make_transfer(Op::kWrite, *local, {0}, *again, {0}).status()));
}

TEST_P(AgentTest, TwoAgentsOfOneNameAndOnesOwnMetadata) {
  const auto twin = make_agent(agent_options("alpha", GetParam()));
  EXPECT_THAT(a_->add_remote(*twin->metadata()).status(),
              fails_with(Code::kInvalidArgument, {"different names"}));
  EXPECT_THAT(a_->add_remote(*a_->metadata()).status(),
              fails_with(Code::kInvalidArgument, {"the agent's own metadata"}));
}

TEST_P(AgentTest, PartialMetadataAddsToWhatIsKnown) {
  const auto c = make_agent(agent_options("gamma", GetParam()));
  AgentMemory first(*c, 4096, 1);
  AgentMemory second(*c, 4096, 2);
  const auto bare = must(c->partial_metadata({first.whole()}, false));
  EXPECT_TRUE(absl::IsNotFound(a_->add_remote(bare).status())) << "how to reach it?";
  ASSERT_TRUE(a_->add_remote(*c->partial_metadata({first.whole()}, true)).ok());
  EXPECT_TRUE(a_->has_remote("gamma", {first.whole()}));
  EXPECT_FALSE(a_->has_remote("gamma", {second.whole()}));
  ASSERT_TRUE(a_->add_remote(*c->partial_metadata({second.whole()}, false)).ok());
  EXPECT_TRUE(a_->has_remote("gamma", {{first.whole(), second.whole()}}));
  const auto write = a_->make_transfer(Op::kWrite, {{mine_->address(), 99, 0}},
                                       {{second.address(), 99, 0}}, "gamma");
  ASSERT_TRUE(run(*write).ok());
  EXPECT_EQ(std::memcmp(second.bytes.data(), mine_->bytes.data(), 99), 0);
  EXPECT_TRUE(absl::IsNotFound(c->partial_metadata({mine_->whole()}, true).status()));
  // Of what it names again the last counts, here and in one part.
  ASSERT_TRUE(c->deregister_memory({second.whole()}).ok());
  ASSERT_TRUE(c->register_memory({second.whole()}).ok());
  ASSERT_TRUE(
      a_->add_remote(*c->partial_metadata({second.whole(), first.whole(), second.whole()}, false))
          .ok());
  const auto again = a_->make_transfer(Op::kWrite, {{mine_->address(9), 99, 0}},
                                       {{second.address(), 99, 0}}, "gamma");
  ASSERT_TRUE(run(*again).ok());
  EXPECT_EQ(std::memcmp(second.bytes.data(), mine_->bytes.data() + 9, 99), 0);
}

// Promise(agents): After `release()` of a running transfer returns OK, no byte of it moves | it
//   cancels and waits for the target's word
TEST_P(AgentTest, ReleaseFencesWhatRuns) {
  AgentOptions slow = agent_options("slow", GetParam());
  slow.worker.shape = *LinkShape::parse("1Mb/s");
  const auto sender = make_agent(std::move(slow));
  AgentMemory from(*sender, 8 << 20, 5);
  AgentMemory to(*b_, 8 << 20, 6);
  introduce(*sender, *b_);
  const auto local = sender->prepare_local(from.pages(2048, 4096));
  const auto remote = sender->prepare_remote("beta", to.pages(2048, 4096));
  std::vector<int64_t> all(4096);
  std::iota(all.begin(), all.end(), 0);
  const auto write = sender->make_transfer(Op::kWrite, *local, all, *remote, all, "never");
  ASSERT_TRUE(sender->post(*write).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(sender->post(*write)));
  // A minute's worth of bytes.
  EXPECT_TRUE(absl::IsFailedPrecondition(sender->deregister_memory({from.whole()})));
  ASSERT_TRUE(sender->release(*write).ok());
  // Every page may be used again at once, on both sides.
  EXPECT_TRUE(sender->deregister_memory({from.whole()}).ok());
  std::fill(to.bytes.begin(), to.bytes.end(), 0xee);
  const auto probe = a_->make_transfer(Op::kWrite, {{mine_->address(), 8, 0}},
                                       {{theirs_->address(), 8, 0}}, "beta");
  ASSERT_TRUE(run(*probe).ok());
  EXPECT_EQ(std::count(to.bytes.begin(), to.bytes.end(), 0xee), 8 << 20);
  EXPECT_TRUE(b_->messages().empty());
}

TEST_P(AgentTest, AbortEndsAsCancelledAndMayBePostedAgain) {
  // Without a thread of its own nothing moves between post() and abort(), however long that takes.
  AgentOptions slow = agent_options("slow", GetParam(), false);
  slow.worker.shape = *LinkShape::parse("50Mb/s");
  auto sender = make_agent(std::move(slow));
  AgentMemory from(*sender, 8 << 20, 5);
  AgentMemory to(*b_, 8 << 20, 6);
  introduce(*sender, *b_);
  const auto write =
      sender->make_transfer(Op::kWrite, from.pages(16384, 512), to.pages(16384, 512), "beta");
  ASSERT_TRUE(sender->post(*write).ok());
  ASSERT_TRUE(sender->abort(*write).ok());
  EXPECT_TRUE(absl::IsCancelled(sender->wait(*write, kLong)));
  EXPECT_EQ(*sender->state(*write), AgentTransferState::kCancelled);
  ASSERT_TRUE(sender->post(*write).ok());
  ASSERT_TRUE(sender->wait(*write, kLong).ok());
  EXPECT_EQ(from.bytes, to.bytes);
  ASSERT_TRUE(sender->post(*write).ok());
  sender->abandon(*write);
  EXPECT_TRUE(absl::IsNotFound(sender->status(*write)));
  // The fence comes later: until then its bytes may move, and both memories must stay.
  ASSERT_TRUE(b_->deregister_memory({to.whole()}).ok());
  sender.reset();
}

TEST_P(AgentTest, MemoryThatCannotBeWrittenCanBeRead) {
  void* page = mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(page, MAP_FAILED);
  const std::vector<Descriptor> read_only = {{reinterpret_cast<uint64_t>(page), 4096, 0}};
  ASSERT_TRUE(b_->register_memory(read_only).ok());
  introduce(*a_, *b_);
  const std::vector<Descriptor> local = {{mine_->address(), 4096, 0}};
  const auto read = a_->make_transfer(Op::kRead, local, read_only, "beta");
  ASSERT_TRUE(run(*read).ok());
  EXPECT_EQ(mine_->bytes[5], 0);
  const auto write = a_->make_transfer(Op::kWrite, local, read_only, "beta");
  EXPECT_TRUE(absl::IsPermissionDenied(run(*write)));
  ASSERT_TRUE(b_->deregister_memory(read_only).ok());
  munmap(page, 4096);
}

TEST_P(AgentTest, WithoutAThreadBytesMoveInsideTheCalls) {
  const auto c = make_agent(agent_options("gamma", GetParam(), false));
  const auto d = make_agent(agent_options("delta", GetParam(), false));
  AgentMemory from(*c, 1 << 16, 5);
  AgentMemory to(*d, 1 << 16, 6);
  introduce(*c, *d);
  const auto write =
      c->make_transfer(Op::kWrite, from.pages(1 << 12, 16), to.pages(1 << 12, 16), "delta", "here");
  ASSERT_TRUE(c->post(*write).ok());
  std::vector<AgentMessage> got;
  until([&] {
    for (AgentMessage& message : d->messages()) got.push_back(message);
    return *c->state(*write) != AgentTransferState::kRunning && !got.empty();
  });
  EXPECT_TRUE(c->status(*write).ok()) << c->status(*write);
  ASSERT_EQ(got.size(), 1u);
  EXPECT_EQ(from.bytes, to.bytes);
}

INSTANTIATE_TEST_SUITE_P(Providers, AgentTest, ::testing::ValuesIn(every_provider()),
                         [](const auto& param) { return param.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AgentTest);

// --- what does not depend on the route ----------------------------------------------------------

TEST(Agent, MetadataByListener) {
  const auto a = make_agent(agent_options("alpha"));
  const auto server = make_server();
  AgentMemory memory(*server, 4096, 1);
  const std::string where = listener_of(*server);
  ASSERT_TRUE(a->fetch_metadata("server", where).ok());
  run_agents(*a, *server, [&] { return a->has_remote("server", {memory.whole()}); });

  ASSERT_TRUE(a->send_metadata(where).ok());
  run_agents(*a, *server, [&] { return server->has_remote("alpha"); });
  ASSERT_TRUE(server->notify("alpha", "hello").ok());

  // Nobody takes another agent's metadata back.
  const auto other = make_agent(agent_options("other"));
  ASSERT_TRUE(other->invalidate_metadata(where).ok());
  ASSERT_TRUE(other->send_metadata(where).ok());
  run_agents(*other, *server, [&] { return server->has_remote("other"); });
  EXPECT_TRUE(server->has_remote("alpha"));
  ASSERT_TRUE(a->invalidate_metadata(where).ok());
  run_agents(*a, *server, [&] { return !server->has_remote("alpha"); });
}

TEST(Agent, AListenerThatIsStartedLaterIsCalledAgain) {
  const uint16_t port = quiet_port();  // nobody is there now
  const auto a = make_agent(agent_options("alpha"));
  const std::string where = "127.0.0.1:" + std::to_string(port);
  ASSERT_TRUE(a->send_metadata(where).ok());
  ASSERT_TRUE(a->fetch_metadata("server", where).ok());
  // Refused, the one and the other.
  run_agents(*a, *a, [&] { return a->stats().worker.transfers_ended >= 2; });
  const auto server = make_server("", true, port);
  ASSERT_NE(server, nullptr);
  run_agents(*a, *server, [&] { return a->has_remote("server") && server->has_remote("alpha"); });
}

TEST(Agent, UnsolicitedMetadataIsDropped) {
  const auto a = make_agent(agent_options("alpha"));
  const auto b = make_agent(agent_options("beta"));
  ASSERT_TRUE(a->send_metadata(listener_of(*b)).ok());
  // Acknowledged: it is in the other's inbox.
  run_agents(*a, *b, [&] { return a->stats().worker.transfers_ended == 1; });
  EXPECT_TRUE(b->messages().empty());
  EXPECT_FALSE(b->has_remote("alpha"));
}

TEST(Agent, OneThatIsGoneIsSaidToBe) {
  const auto a = make_agent(agent_options("alpha"));
  auto b = make_agent(agent_options("beta"));
  AgentMemory mine(*a, 4096, 1);
  auto theirs = std::make_unique<AgentMemory>(*b, 4096, 2);
  introduce(*a, *b);
  const auto write = a->make_transfer(Op::kWrite, {mine.whole()}, {theirs->whole()}, "beta");
  ASSERT_TRUE(a->post(*write).ok());
  ASSERT_TRUE(a->wait(*write, kLong).ok());
  b = nullptr;
  run_agents(*a, *a, [&] { return !a->has_remote("beta"); });
  const absl::Status posted = a->post(*write);
  EXPECT_TRUE(absl::IsUnavailable(posted.ok() ? a->wait(*write, kLong) : posted));
  EXPECT_TRUE(a->release(*write).ok());
}

// Two agents over tcp with memory of one size each, which this test's thread drives.
struct Pair {
  explicit Pair(size_t bytes, SettingValues settings = {}) {
    AgentOptions options = agent_options("alpha", "tcp", false);
    options.worker.settings = std::move(settings);
    a = make_agent(std::move(options));
    mine.emplace(*a, bytes, 1);
    theirs.emplace(*b, bytes, 2);
    introduce(*a, *b);
  }
  AgentTransferId make() const {
    return *a->make_transfer(Op::kWrite, {mine->whole()}, {theirs->whole()}, "beta");
  }
  bool runs(AgentTransferId id) const { return *a->state(id) == AgentTransferState::kRunning; }
  void run_to_end(AgentTransferId id, CallSite from = CallSite::here()) {
    run_agents(
        *a, *b, [&] { return !runs(id); }, from);
  }
  // Once whole, so that there is a connection; then once more, and beta stands still.
  AgentTransferId post_to_silent() {
    const AgentTransferId id = make();
    EXPECT_TRUE(a->post(id).ok());
    run_to_end(id);
    EXPECT_EQ(*a->state(id), AgentTransferState::kDone);
    EXPECT_TRUE(a->post(id).ok());
    return id;
  }
  std::unique_ptr<Agent> a, b = make_agent(agent_options("beta", "tcp", false));
  std::optional<AgentMemory> mine, theirs;
};

TEST(Agent, OneThatIsRemovedHasNoTransferCalledEndedThatMayLandThere) {
  Pair pair(16 << 20, {{"peer.answer_ms", "3600000"}});
  Agent& a = *pair.a;
  const AgentTransferId first = pair.post_to_silent();
  a.remove_remote("beta");
  EXPECT_FALSE(a.has_remote("beta"));
  const absl::Status early = a.release(first, std::chrono::milliseconds(50));
  EXPECT_TRUE(absl::IsDeadlineExceeded(early)) << early;
  EXPECT_TRUE(pair.runs(first));
  // Who is met again meanwhile is called anew.
  introduce(a, *pair.b);
  const AgentTransferId second = pair.make();
  ASSERT_TRUE(a.post(second).ok());
  pair.run_to_end(first);
  EXPECT_FALSE(a.status(first).ok());
  EXPECT_TRUE(a.release(first, Time::zero()).ok());
  pair.run_to_end(second);
  EXPECT_TRUE(a.status(second).ok()) << a.status(second);
  EXPECT_EQ(pair.mine->bytes, pair.theirs->bytes);
}

// How its agent went later is nothing to a transfer that had ended with the agent's word.
TEST(Agent, WhatEndedBeforeItsAgentWasRemovedIsReleasedWithoutDoubt) {
  Pair pair(16 << 20);
  const AgentTransferId write = pair.post_to_silent();
  ASSERT_TRUE(pair.a->abort(write).ok());
  pair.run_to_end(write);
  EXPECT_EQ(*pair.a->state(write), AgentTransferState::kCancelled);
  pair.a->remove_remote("beta");
  EXPECT_EQ(pair.a->release(write), absl::OkStatus());
}

// It is used again while the other agent says nothing, and none of that arrives.
TEST(Agent, LocalMemoryOfWhatWasAbortedIsFreeBeforeTheOtherAgentSpeaks) {
  Pair pair(16 << 20);
  Agent& a = *pair.a;
  const auto sent = pair.mine->bytes, before = pair.theirs->bytes;
  EXPECT_TRUE(*a.local_free(pair.make())) << "nothing runs";
  const AgentTransferId write = pair.post_to_silent();
  pair.theirs->bytes = before;
  for (int i = 0; i < 100; ++i) a.progress();
  EXPECT_FALSE(*a.local_free(write));
  ASSERT_TRUE(a.abort(write).ok());
  for (int i = 0; i < 1000 && !*a.local_free(write); ++i) a.progress();
  EXPECT_TRUE(*a.local_free(write));
  EXPECT_TRUE(pair.runs(write)) << "the other agent has not spoken";
  std::fill(pair.mine->bytes.begin(), pair.mine->bytes.end(), 0);
  pair.run_to_end(write);
  size_t wrong = 0;
  for (size_t i = 0; i < sent.size(); ++i) {
    wrong += pair.theirs->bytes[i] != sent[i] && pair.theirs->bytes[i] != before[i];
  }
  EXPECT_EQ(wrong, 0u) << "bytes arrived that came after the transfer";
  EXPECT_TRUE(a.release(write).ok());
  EXPECT_FALSE(a.local_free(write).ok());
}

// Posted, waited for and released in one call; not where it runs already.
TEST(Agent, RunIsPostWaitAndRelease) {
  const auto a = make_agent(agent_options("alpha", "tcp"));
  const auto b = make_agent(agent_options("beta", "tcp", false));
  AgentMemory mine(*a, 4096, 1);
  AgentMemory theirs(*b, 4096, 2);
  introduce(*a, *b);
  const auto make = [&] {
    return a->make_transfer(Op::kWrite, {mine.whole()}, {theirs.whole()}, "beta");
  };
  const auto runs = make();  // beta stands still
  ASSERT_TRUE(a->post(*runs).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(a->run(*runs, Time::zero())));
  EXPECT_EQ(*a->state(*runs), AgentTransferState::kRunning) << "it was aborted";
  const auto late = make();
  EXPECT_TRUE(absl::IsDeadlineExceeded(a->run(*late, Time::zero())));
  run_agents(*a, *b, [&] { return *a->state(*runs) == AgentTransferState::kDone; });
  a->release(*late, kLong).IgnoreError();
  const auto whole = make();
  absl::Status ran;
  std::thread runner([&] { ran = a->run(*whole, kLong); });
  run_agents(*b, *b, [&] { return absl::IsNotFound(a->status(*whole)); });
  runner.join();
  EXPECT_TRUE(ran.ok()) << ran;
  EXPECT_EQ(theirs.bytes, mine.bytes);
  a->remove_remote("beta");
  const auto gone = make();
  EXPECT_TRUE(absl::IsNotFound(gone.status()));
}

// With another agent, or with the one that had the name before, a transfer may run: that holds up
// no word that this one is given up.
TEST(Agent, RemovingAPeerWaitsOnlyForItsRunningTransfers) {
  AgentOptions options = agent_options("alpha", "tcp", false);
  options.worker.settings = {{"peer.answer_ms", "3600000"}};
  const auto a = make_agent(options);
  const auto b = make_agent(agent_options("beta", "tcp", false));
  const auto c = make_agent(agent_options("gamma", "tcp", false));
  AgentMemory mine(*a, 4096, 1), at_beta(*b, 4096, 2), at_gamma(*c, 4096, 3);
  const auto meet = [&](Agent& other) {
    const size_t up = a->stats().worker.peers_up;
    const std::string name = introduce(*a, other);
    ASSERT_TRUE(a->notify(name, "hello").ok());
    run_agents(*a, other, [&] { return a->stats().worker.peers_up == up + 1; });
    run_agents(*a, other, [&] { return !other.messages().empty(); });
  };
  const auto post = [&](const AgentMemory& to, const char* agent) {
    const auto id = a->make_transfer(Op::kWrite, {mine.whole()}, {to.whole()}, agent);
    EXPECT_TRUE(a->post(*id).ok());
    return *id;
  };
  // Those that are up when beta, who says nothing, has been removed.
  const auto up_without_beta = [&] {
    EXPECT_TRUE(a->notify("beta", "words").ok());
    a->remove_remote("beta");
    for (int i = 0; i < 100; ++i) a->progress();
    return a->stats().worker.peers_up;
  };
  ASSERT_NO_FATAL_FAILURE(meet(*b));
  ASSERT_NO_FATAL_FAILURE(meet(*c));
  const auto with_gamma = post(at_gamma, "gamma");
  EXPECT_EQ(up_without_beta(), 1U);
  ASSERT_NO_FATAL_FAILURE(meet(*b));
  const auto with_beta = post(at_beta, "beta");
  EXPECT_EQ(up_without_beta(), 2U) << "its bytes may still move";
  const auto heir = make_agent(agent_options("beta", "tcp", false));
  ASSERT_NO_FATAL_FAILURE(meet(*heir));
  EXPECT_EQ(up_without_beta(), 2U) << "nothing runs with this one";
  EXPECT_EQ(*a->state(with_beta), AgentTransferState::kRunning) << "beta has not spoken";
  EXPECT_EQ(*a->state(with_gamma), AgentTransferState::kRunning);
  run_agents(*a, *b, [&] { return *a->state(with_beta) != AgentTransferState::kRunning; });
  run_agents(*a, *c, [&] { return *a->state(with_gamma) == AgentTransferState::kDone; });
}

// What was found to be quiet stays so, whichever thread posts it meanwhile.
// Promise(agents): A transfer that is being released cannot be posted by another thread | release
//   closes it first
TEST(Agent, WhatIsBeingReleasedIsNotPostedAgain) {
  Pair pair(16 << 20);
  const AgentTransferId write = pair.post_to_silent();
  const absl::Status early = pair.a->release(write, std::chrono::milliseconds(50));
  EXPECT_TRUE(absl::IsDeadlineExceeded(early)) << early;
  pair.run_to_end(write);
  const absl::Status posted = pair.a->post(write);
  EXPECT_TRUE(absl::IsFailedPrecondition(posted)) << posted;
  EXPECT_FALSE(pair.runs(write));
  EXPECT_TRUE(pair.a->release(write).ok());
}

// 600 regions, each a part of a transfer: the worker has 256 at a time, and knows of no others.
struct ManyParts : ::testing::Test {
  void SetUp() override {
    std::vector<Descriptor> remote;
    for (size_t i = 0; i < 600; ++i) {
      mine.push_back(std::make_unique<AgentMemory>(*a, 256, static_cast<int>(i)));
      local.push_back(mine.back()->whole());
      remote.push_back({theirs.address(i * 256), 256, 0});
    }
    introduce(*a, *b);
    write = must(a->make_transfer(Op::kWrite, local, remote, "beta"));
    ASSERT_TRUE(a->post(write).ok());
  }
  void run_to_end() {
    run_agents(*a, *b, [&] { return *a->state(write) != AgentTransferState::kRunning; });
  }
  std::unique_ptr<Agent> a = make_agent(agent_options("alpha", "tcp", false));
  std::unique_ptr<Agent> b = make_agent(agent_options("beta", "tcp", false));
  AgentMemory theirs{*b, 600 * 256, 2};
  std::vector<std::unique_ptr<AgentMemory>> mine;
  std::vector<Descriptor> local;
  AgentTransferId write;
};

// Promise(agents): Memory of a running transfer cannot be deregistered, nor can parts still queued
//   | all parts are looked through
TEST_F(ManyParts, MemoryWhosePartsWaitIsNotDeregistered) {
  for (const size_t i : {size_t{0}, size_t{599}}) {
    const absl::Status gone = a->deregister_memory({local[i]});
    EXPECT_TRUE(absl::IsFailedPrecondition(gone)) << i << ": " << gone;
  }
  run_to_end();
  EXPECT_TRUE(a->status(write).ok()) << a->status(write);
  EXPECT_TRUE(a->deregister_memory({local[599]}).ok());
}

TEST_F(ManyParts, AbortSubmitsNoMoreParts) {
  EXPECT_EQ(a->stats().worker.transfers_submitted, 256u) << "others need slots too";
  ASSERT_TRUE(a->abort(write).ok());
  run_to_end();
  EXPECT_TRUE(absl::IsCancelled(a->status(write))) << a->status(write);
  EXPECT_EQ(a->stats().worker.transfers_submitted, 256u);
}

}  // namespace
}  // namespace baton::kvtransfer
