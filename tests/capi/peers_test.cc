// Peers that are killed or stopped, memory that goes away under a list, messages that nobody reads,
// one transfer of many threads.
#include <baton/baton.h>

#include "tests/capi/side.h"
#include "tests/test.h"

namespace baton::capi_tests {
namespace {

struct Beside : ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Providers, Beside, ::testing::Values("shm", "tcp"),
                         [](const auto& param) { return std::string(param.param); });

// SIGPIPE would end this process.
TEST_P(Beside, APeerIsKilledInFlight) {
  for (const int32_t op : {BATON_WRITE, BATON_READ}) {
    Child child([](int in, int out) { return peer(GetParam(), in, out); });
    Side here("here", GetParam());
    ASSERT_TRUE(here.meet(child.hear())) << here.error.text;
    const uint64_t there = number(child.hear());
    ASSERT_EQ(baton_transfer_run(here.agent, here.make(op, "peer", there), kLong, &here.error),
              BATON_OK)
        << here.error.text;
    // One after the other until one of them is hit.
    std::thread killer([&] { child.kill_it(); });
    int32_t result = BATON_OK;
    while (result == BATON_OK) {
      const baton_transfer next = here.make(op, "peer", there);
      ASSERT_NE(next, 0U) << here.error.text;
      result = baton_transfer_run(here.agent, next, kLong, &here.error);
      EXPECT_EQ(baton_transfer_state(here.agent, next, nullptr), BATON_ERR_NOT_FOUND);
    }
    killer.join();
    EXPECT_EQ(result, BATON_ERR_REMOTE_DISCONNECT) << here.error.text;
    if (op == BATON_READ) {
      EXPECT_EQ(here.memory()[kBytes - 1], 'p');
    }
    EXPECT_EQ(baton_notify(here.agent, "peer", "x", 1, &here.error) >= 0 || here.error.text[0] != 0,
              true);
  }
}

TEST_P(Beside, APeerIsKilledBeforeItReadsAMessage) {
  Child child([](int in, int out) { return peer(GetParam(), in, out); });
  Side here("here", GetParam());
  ASSERT_TRUE(here.meet(child.hear())) << here.error.text;
  const uint64_t there = number(child.hear());
  ASSERT_EQ(
      baton_transfer_run(here.agent, here.make(BATON_WRITE, "peer", there), kLong, &here.error),
      BATON_OK)
      << here.error.text;
  child.stop();
  for (int i = 0; i < 5; ++i) {
    ASSERT_EQ(baton_notify(here.agent, "peer", "text", 4, &here.error), BATON_OK);
  }
  child.kill_it();
  // Each is told as lost, for nobody confirmed it; but over shm this side alone puts them into the
  // other's memory, and may have them as done.
  const int unconfirmed = std::string(GetParam()) == "tcp" ? 5 : 0;
  const int fd = baton_agent_event_fd(here.agent);
  baton_agent_stats stats{};
  stats.size = sizeof stats;
  do {
    pollfd one{fd, POLLIN, 0};
    ASSERT_EQ(poll(&one, 1, 60'000), 1) << "the event never came";
    uint64_t events = 0;
    ASSERT_EQ(read(fd, &events, sizeof events), 8);
    ASSERT_EQ(baton_agent_get_stats(here.agent, &stats, &here.error), BATON_OK);
  } while (stats.peers_lost == 0 || stats.messages_lost < uint64_t(unconfirmed));
  int lost = 0;
  baton_bytes to{}, message{}, why{};
  while (baton_next_lost_message(here.agent, &to, &message, &why, &here.error) == BATON_OK) {
    EXPECT_STREQ(to.data, "peer");
    EXPECT_STREQ(message.data, "text");
    EXPECT_GT(why.size, 0U);
    for (baton_bytes* each : {&to, &message, &why}) baton_bytes_free(each);
    ++lost;
  }
  EXPECT_GE(lost, unconfirmed);
  EXPECT_LE(lost, 5);
}

// It neither ends nor answers: what is run has its time, and is over.
TEST_P(Beside, APeerIsStopped) {
  Child child([](int in, int out) { return peer(GetParam(), in, out); });
  const std::string metadata = child.hear();
  const uint64_t there = number(child.hear());
  {
    Side here("here", GetParam());
    ASSERT_TRUE(here.meet(metadata)) << here.error.text;
    ASSERT_EQ(
        baton_transfer_run(here.agent, here.make(BATON_READ, "peer", there), kLong, &here.error),
        BATON_OK)
        << here.error.text;
    child.stop();
    const baton_transfer kept = here.make(BATON_WRITE, "peer", there);
    ASSERT_GE(baton_transfer_post(here.agent, kept, nullptr, 0, &here.error), 0);
    const int32_t waited = baton_transfer_wait(here.agent, kept, 20'000'000, &here.error);
    // Over shm one side does all of it, if the notification has room.
    EXPECT_TRUE(waited == BATON_ERR_TIMEOUT || waited == BATON_OK) << baton_result_name(waited);
    const int32_t released = baton_transfer_release(here.agent, kept, 20'000'000, &here.error);
    EXPECT_TRUE(released == BATON_ERR_TIMEOUT || released == BATON_OK)
        << baton_result_name(released) << ": " << here.error.text;
    const baton_transfer run = here.make(BATON_READ, "peer", there);
    const int32_t ran = baton_transfer_run(here.agent, run, 20'000'000, &here.error);
    EXPECT_TRUE(ran == BATON_ERR_TIMEOUT || ran == BATON_OK || ran == BATON_ERR_REMOTE_DISCONNECT)
        << baton_result_name(ran) << ": " << here.error.text;
    EXPECT_EQ(baton_transfer_state(here.agent, run, nullptr), BATON_ERR_NOT_FOUND);
    here.unmap();  // nothing of it moves here any more? see below
  }                // and the agent goes, whatever the peer does
  child.go_on();
  Side again("again", GetParam());
  ASSERT_TRUE(again.meet(metadata)) << again.error.text;
  EXPECT_EQ(
      baton_transfer_run(again.agent, again.make(BATON_WRITE, "peer", there), kLong, &again.error),
      BATON_OK)
      << again.error.text;
  child.let_end();
  EXPECT_EQ(child.ends(), 0);
}

// Its own memory, and the other's, is unmapped under a list: an error, and no crash on any side.
TEST_P(Beside, MemoryIsUnmappedUnderAList) {
  Child child([](int in, int out) { return peer(GetParam(), in, out); });
  const std::string metadata = child.hear();
  const uint64_t there = number(child.hear());
  for (const int32_t op : {BATON_WRITE, BATON_READ}) {
    Side here("here", GetParam());
    ASSERT_TRUE(here.meet(metadata)) << here.error.text;
    const baton_transfer transfer = here.make(op, "peer", there);
    ASSERT_NE(transfer, 0U);
    here.unmap();
    EXPECT_LT(baton_transfer_run(here.agent, transfer, kLong, &here.error), 0);
    EXPECT_STRNE(here.error.text, "");
  }
  child.let_end();
  EXPECT_EQ(child.ends(), 0) << "the peer's process lives";
}

TEST_P(Beside, ThePeersMemoryIsUnmappedUnderAList) {
  Side here("here", GetParam()), other("other", GetParam());
  ASSERT_TRUE(here.meet(other.metadata())) << here.error.text;
  const auto there = reinterpret_cast<uint64_t>(other.memory());
  ASSERT_EQ(
      baton_transfer_run(here.agent, here.make(BATON_WRITE, "other", there), kLong, &here.error),
      BATON_OK);
  other.unmap();
  for (const int32_t op : {BATON_WRITE, BATON_READ}) {
    EXPECT_LT(baton_transfer_run(here.agent, here.make(op, "other", there), kLong, &here.error), 0)
        << op;
  }
}

// A child reads what this process has, again and again; the agent goes and the memory with it.
TEST_P(Beside, MemoryMayGoWithItsAgent) {
  int share[2];
  ASSERT_EQ(pipe(share), 0);
  Child child([&](int in, int out) {
    char text[65536];
    uint64_t at = 0;
    Side reader("reader", GetParam());
    if (read(share[0], &at, sizeof at) != sizeof at) return 2;
    const ssize_t size = read(share[0], text, sizeof text);
    if (!reader.good() || size <= 0 || !reader.meet(std::string(text, size_t(size)))) return 3;
    int32_t result = BATON_OK;
    for (int done = 0; result == BATON_OK; ++done) {
      memset(reader.memory(), 0, kBytes);
      const baton_transfer next = reader.make(BATON_READ, "owner", at);
      result = baton_transfer_run(reader.agent, next, kLong, &reader.error);
      if (result == BATON_OK) {
        for (size_t i = 0; i < kBytes; ++i) {
          if (reader.memory()[i] != 'o') return 4;
        }
      }
      if (done == 3) say(out, "reads");
    }
    wait_for_end(in);
    return 0;
  });
  {
    Side owner("owner", GetParam());
    ASSERT_TRUE(owner.good());
    memset(owner.memory(), 'o', kBytes);
    const auto at = reinterpret_cast<uint64_t>(owner.memory());
    const std::string metadata = owner.metadata();
    ASSERT_EQ(write(share[1], &at, sizeof at), ssize_t(sizeof at));
    ASSERT_EQ(write(share[1], metadata.data(), metadata.size()), ssize_t(metadata.size()));
    ASSERT_EQ(child.hear(), "reads");
  }
  child.let_end();
  EXPECT_EQ(child.ends(), 0);
  close(share[0]);
  close(share[1]);
}

// Two threads post, wait for and release one transfer: each call ends, and one of them releases.
TEST_P(Beside, OneTransferIsManyThreads) {
  Side here("here", GetParam()), other("other", GetParam());
  ASSERT_TRUE(here.meet(other.metadata())) << here.error.text;
  const auto there = reinterpret_cast<uint64_t>(other.memory());
  for (int i = 0; i < 100; ++i) {
    const baton_transfer one = here.make(BATON_WRITE, "other", there, 4096);
    std::atomic<int> posted{0}, released{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        const int32_t post = baton_transfer_post(here.agent, one, nullptr, 0, nullptr);
        // Not allowed: it is being released.
        EXPECT_TRUE(post >= 0 || post == BATON_ERR_REPOST_ACTIVE || post == BATON_ERR_NOT_FOUND ||
                    post == BATON_ERR_NOT_ALLOWED)
            << baton_result_name(post);
        posted += post >= 0 ? 1 : 0;
        const int32_t waited = baton_transfer_wait(here.agent, one, kLong, nullptr);
        EXPECT_TRUE(waited == BATON_OK || waited == BATON_ERR_CANCELED ||
                    waited == BATON_ERR_NOT_FOUND)
            << baton_result_name(waited);
        const int32_t release = baton_transfer_release(here.agent, one, kLong, nullptr);
        EXPECT_TRUE(release == BATON_OK || release == BATON_ERR_NOT_FOUND)
            << baton_result_name(release);
        released += release == BATON_OK ? 1 : 0;
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_GE(posted, 1);
    EXPECT_GE(released, 1);
    EXPECT_EQ(baton_transfer_state(here.agent, one, nullptr), BATON_ERR_NOT_FOUND);
  }
  baton_agent_stats stats{};
  stats.size = sizeof stats;
  ASSERT_EQ(baton_agent_get_stats(here.agent, &stats, nullptr), BATON_OK);
  EXPECT_EQ(stats.transfers, 0U);
}

}  // namespace
}  // namespace baton::capi_tests
