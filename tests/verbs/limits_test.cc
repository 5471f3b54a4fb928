// What the provider asks of the adapter: few doorbells and completions, gathered pages, credits,
// limits kept; and what it says when it cannot have what it needs.
#include "tests/verbs/verbs_pair.h"

namespace baton {
namespace {

// Not behind all that is queued: behind what is posted (4 MiB), a slice until there is room for
// another, and the one that is posted in the same moment.
// Promise(rdma): A small transfer waits for `verbs.inflight_kib` and two slices at most | its own
//   queue, which goes first
TEST(Urgent, OvertakesBulk) {
  VerbsPair pair({.devices = 1});
  pair.connect();
  ASSERT_TRUE(pair.run(pair.request(Op::kWrite)).ok());
  std::vector<TransferId> bulk;
  for (int i = 0; i < 20; ++i) bulk.push_back(*pair.a.worker->submit(pair.request(Op::kWrite)));
  pair.steps(2);
  const CounterId counter = *pair.b.worker->allocate_counter();
  const uint64_t before = pair.fake->moved(0);
  TransferRequest small = pair.request(Op::kWrite, 8);
  small.counter = pair.b.worker->remote_counter(counter);
  TransferRequest told = pair.request(Op::kWrite, 8);
  told.notify = "look";
  const TransferId ids[] = {*pair.a.worker->submit(small), *pair.a.worker->submit(told)};
  for (TransferId id : ids) EXPECT_TRUE(pair.finish(id).ok());
  EXPECT_LT(pair.fake->moved(0) - before, 7u << 20);
  EXPECT_EQ(*pair.a.worker->state(bulk.back()), TransferState::kActive);
  for (TransferId id : bulk) EXPECT_TRUE(pair.finish(id).ok());
}

// The flags of a client are the client's: the server has none.
class ClientSettings : public testing::Test {
 protected:
  // Connected, by `ends` queue pairs at both ends together.
  static std::unique_ptr<VerbsPair> client_with(VerbsPair::Settings settings, size_t devices = 1,
                                                size_t ends = 2) {
    auto pair = std::make_unique<VerbsPair>(FakeOptions{.devices = devices});
    pair->a.worker.reset();
    pair->settings = std::move(settings);
    pair->start(pair->a, "a");
    pair->connect();
    pair->until([&] { return pair->fake->connected().size() >= ends; });
    pair->steps(200);
    EXPECT_EQ(pair->fake->connected().size(), ends);
    return pair;
  }
};

TEST_F(ClientSettings, ReadsOutstandingAreThoseThatItAsks) {
  const auto asks = [](int reads) { return testing::Field(&ibv_qp_attr::max_rd_atomic, reads); };
  EXPECT_THAT(client_with({{"verbs.rd_atomic", "4"}})->fake->connected(),
              testing::UnorderedElementsAre(asks(4), asks(16)));
  EXPECT_THAT(client_with({})->fake->connected(), testing::ElementsAre(asks(16), asks(16)));
}

TEST_F(ClientSettings, TheTrafficClassIsThatOfBothWays) {
  auto pair = client_with({{"verbs.traffic_class", "104"}, {"verbs.service_level", "3"}});
  ASSERT_EQ(pair->fake->connected().size(), 2u);
  for (const ibv_qp_attr& each : pair->fake->connected()) {
    EXPECT_EQ(each.ah_attr.grh.traffic_class, 104);
    EXPECT_EQ(each.ah_attr.sl, 3);
  }
}

TEST_F(ClientSettings, PairsOfPortsAreNoMoreThanItWants) {
  client_with({{"verbs.devices", "fake0"}}, 3, 6);
  client_with({{"verbs.devices", "fake0"}, {"verbs.pairs", "1"}}, 3, 2);
  client_with({{"verbs.pairs", "2"}, {"verbs.qps", "2"}}, 3, 8);
}

// Its owner gives away what is in it and nothing around it, though all of that is registered too.
TEST(Regions, ABlockMayBeOneOfItsOwn) {
  VerbsPair pair({.devices = 1});
  pair.connect();
  constexpr size_t kAt = 1 << 20, kBlock = 64 << 10;
  const auto block = must(pair.b.worker->register_memory(pair.b.memory.data() + kAt, kBlock));
  pair.fill(4);
  TransferRequest request = pair.request(Op::kWrite, kBlock);
  request.remote = *pair.b.worker->remote_region(block);
  EXPECT_TRUE(pair.run(request).ok());
  EXPECT_EQ(memcmp(pair.b.memory.data() + kAt, pair.a.memory.data(), kBlock), 0);
  EXPECT_EQ(std::count(pair.b.memory.begin(), pair.b.memory.end(), std::byte{0}),
            static_cast<ptrdiff_t>(pair.b.memory.size()) - static_cast<ptrdiff_t>(kBlock) +
                std::count(pair.a.memory.begin(), pair.a.memory.begin() + kBlock, std::byte{0}));
  request.remote.size = VerbsPair::kBytes;  // says the peer
  request.remote_layout = Layout::contiguous(4096, kBlock);
  const absl::Status status = pair.run(request);
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange) << status;
  // The larger region goes on when it is gone.
  ASSERT_TRUE(pair.b.worker->deregister_memory(block).ok());
  EXPECT_TRUE(pair.run(pair.request(Op::kWrite)).ok());
}

// The kernel takes its time for each, and other peers wait meanwhile.
TEST(Progress, MakesOneQueuePairAtATime) {
  VerbsPair pair({.devices = 2}, {{"verbs.qps", "16"}});
  auto peer = must(pair.a.worker->connect(pair.b.worker->address()));
  uint64_t made = 0;
  // However long the sockets take.
  const Time end = pair.clock.now() + std::chrono::seconds(60);
  while (pair.clock.now() < end && pair.fake->connected().size() < 64) {
    for (VerbsPair::Side* side : {&pair.a, &pair.b}) {
      side->worker->progress();
      const uint64_t now = pair.fake->stats().queue_pairs;
      EXPECT_LE(now - made, 1u);
      made = now;
    }
    pair.clock.advance(pair.tick);
  }
  EXPECT_EQ(made, 64u);
  EXPECT_EQ(pair.a.worker->peer_state(peer), PeerState::kUp);
}

// Its notification has gone out in part: what comes after it is not mixed up with that.
TEST(Urgent, ANotificationThatIsCancelledHalfWayLeavesNothingBehind) {
  for (const bool region : {false, true}) {
    SCOPED_TRACE(region);
    VerbsPair pair({.devices = 1}, {{"verbs.receive_depth", "16"}});
    pair.connect();
    ASSERT_TRUE(pair.run(pair.request(Op::kWrite)).ok());
    pair.steps(100);
    TransferRequest large = pair.request(Op::kWrite, region ? 1 << 20 : 0);
    if (!region) large.local = {};
    const std::string text(60'000, 'x');
    large.notify = text;
    const TransferId id = *pair.a.worker->submit(large);
    for (int i = 0; i < 100; ++i) pair.a.worker->progress();  // as far as credits reach
    TransferRequest small = pair.request(Op::kWrite, 8);
    small.notify = "small";
    const TransferId next = *pair.a.worker->submit(small);
    pair.a.worker->progress();
    pair.a.worker->cancel(id).IgnoreError();
    pair.a.worker->progress();
    EXPECT_TRUE(pair.finish(next).ok());
    pair.finish(id).IgnoreError();
    pair.steps(100);
    Notification note;
    int small_ones = 0;
    while (pair.b.worker->next_notification(note)) {
      EXPECT_TRUE(note.payload == "small" || note.payload == text) << note.payload.size();
      small_ones += note.payload == "small";
    }
    EXPECT_EQ(small_ones, 1);
  }
}

// Each has an address of its own on a network that the other does not know, and it comes first.
TEST(Addresses, AreThoseOfTheSubnetThatBothSidesShare) {
  VerbsPair pair({.devices = 2});
  const auto restart = [&](VerbsPair::Side& side, const char* name, const char* device) {
    side.worker.reset();
    pair.settings = {{"verbs.devices", device}};
    pair.start(side, name);
  };
  for (const uint8_t device : {0, 1}) {
    std::vector<ibv_gid_entry> gids = pair.fake->gids(device);
    gids.push_back(gids[3]);
    gids[4].gid_index = 4;
    gids[4].gid.raw[14] = 77;
    gids[4].gid.raw[15] = static_cast<uint8_t>(1 + device);
    pair.fake->set_gids(device, gids);
  }
  restart(pair.a, "a", "fake0");
  restart(pair.b, "b", "fake1");
  pair.connect();
  ASSERT_EQ(pair.fake->connected().size(), 2u);
  for (const ibv_qp_attr& each : pair.fake->connected()) {
    EXPECT_EQ(each.ah_attr.grh.sgid_index, 4);
    EXPECT_EQ(each.ah_attr.grh.dgid.raw[14], 77);
  }
  EXPECT_TRUE(pair.run(pair.request(Op::kWrite)).ok());
}

using testing::HasSubstr;

std::vector<uint32_t> evens(uint32_t count) {
  std::vector<uint32_t> pages(count);
  for (uint32_t i = 0; i < count; ++i) pages[i] = 2 * i;
  return pages;
}

TEST(Limits, ScatteredPagesShareDoorbellsAndCompletions) {
  VerbsPair pair({});
  pair.connect();
  ASSERT_TRUE(pair.run(pair.request(Op::kWrite, 100)).ok());
  const std::vector<uint32_t> pages = evens(1024);
  TransferRequest r = pair.request(Op::kWrite);
  r.local_layout = r.remote_layout = Layout::paged(0, pages, 4096, 4096);
  const FakeStats before = pair.fake->stats();
  pair.fill(1);
  ASSERT_TRUE(pair.run(r).ok());
  const FakeStats after = pair.fake->stats();
  EXPECT_EQ(after.work - before.work, 1024u);
  EXPECT_LE(after.doorbells - before.doorbells, 1024u / 8);
  EXPECT_EQ(after.signalled - before.signalled, after.doorbells - before.doorbells);
  for (uint32_t page : pages) {
    ASSERT_EQ(memcmp(&pair.a.memory[page * 4096], &pair.b.memory[page * 4096], 4096), 0);
  }
}

TEST(Limits, NeighboursAtThePeerAreGathered) {
  VerbsPair pair({});
  pair.connect();
  const std::vector<uint32_t> pages = evens(512);
  for (Op op : {Op::kWrite, Op::kRead}) {
    TransferRequest r = pair.request(op);
    r.local_layout = Layout::paged(0, pages, 4096, 4096);
    r.remote_layout = Layout::contiguous(4096, 512 * 4096);
    pair.fill(2);
    if (op == Op::kRead) {
      std::copy(pair.a.memory.begin(), pair.a.memory.end(), pair.b.memory.begin());
      std::fill(pair.a.memory.begin(), pair.a.memory.end(), std::byte{0});
    }
    const FakeStats before = pair.fake->stats();
    ASSERT_TRUE(pair.run(r).ok());
    const FakeStats after = pair.fake->stats();
    EXPECT_GE(after.gathered - before.gathered, 512u / 16);
    EXPECT_LE(after.work - before.work, 512u / 16 + 8);
    for (size_t i = 0; i < pages.size(); ++i) {
      ASSERT_EQ(memcmp(&pair.a.memory[pages[i] * 4096], &pair.b.memory[4096 + i * 4096], 4096), 0);
    }
  }
}

TEST(Limits, ReadsMayBeGatheredLess) {
  VerbsPair pair({.max_sge = 8, .max_sge_rd = 3});
  pair.connect();
  const std::vector<uint32_t> pages = evens(96);
  for (const auto& [op, sges] : {std::pair(Op::kWrite, 8u), std::pair(Op::kRead, 3u)}) {
    TransferRequest r = pair.request(op);
    r.local_layout = Layout::paged(0, pages, 4096, 4096);
    r.remote_layout = Layout::contiguous(4096, 96 * 4096);
    ASSERT_TRUE(pair.run(r).ok());  // asks for the region
    const FakeStats before = pair.fake->stats();
    ASSERT_TRUE(pair.run(r).ok());
    EXPECT_EQ(pair.fake->stats().work - before.work, 96 / sges);
  }
}

TEST(Limits, ACountingWriteIsOneMessage) {
  VerbsPair pair({});
  pair.connect();
  const CounterId counter = *pair.b.worker->allocate_counter();
  TransferRequest r = pair.request(Op::kWrite, 64);
  r.counter = pair.b.worker->remote_counter(counter);
  ASSERT_TRUE(pair.run(r).ok());
  const FakeStats before = pair.fake->stats();
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(pair.run(r).ok());
  const FakeStats after = pair.fake->stats();
  EXPECT_EQ(after.work - before.work, 10u);
  EXPECT_EQ(after.immediates - before.immediates, 10u);
  EXPECT_EQ(after.inlined - before.inlined, 10u);
  pair.until([&] { return pair.b.worker->counter_value(counter) == 11; });
}

TEST(Limits, SmallQueuesAndFewCreditsAreEnough) {
  VerbsPair pair({.max_work = 32, .max_sge = 2, .max_inline = 16, .max_reads = 1},
                 {{"verbs.receive_depth", "16"}, {"verbs.send_depth", "16"}});
  pair.connect();
  const CounterId there = *pair.b.worker->allocate_counter();
  const CounterId here = *pair.a.worker->allocate_counter();
  const std::string payload(5000, 'n');
  size_t got = 0;
  Notification notification;
  for (int round = 0; round < 5; ++round) {
    std::vector<TransferId> ids;
    for (int i = 0; i < 100; ++i) {
      TransferRequest r = pair.request(i % 2 ? Op::kWrite : Op::kRead, 20'000);
      if (i % 2) {
        r.counter = pair.b.worker->remote_counter(there);
        if (i % 20 == 1) r.notify = payload;
      }
      ids.push_back(*pair.a.worker->submit(r));
      TransferRequest back = {.op = Op::kWrite,
                              .peer = pair.b.peer,
                              .local = pair.b.region,
                              .local_layout = Layout::contiguous(1 << 20, 300),
                              .remote = pair.a.remote,
                              .remote_layout = Layout::contiguous(1 << 20, 300),
                              .counter = pair.a.worker->remote_counter(here),
                              .detached = true};
      ASSERT_TRUE(pair.b.worker->submit(back).ok());
    }
    for (TransferId id : ids) {
      ASSERT_EQ(pair.finish(id), absl::OkStatus());
    }
  }
  pair.until([&] {
    while (pair.b.worker->next_notification(notification)) {
      EXPECT_EQ(notification.payload, payload);
      ++got;
    }
    return pair.a.worker->counter_value(here) == 500 &&
           pair.b.worker->counter_value(there) == 250 && got == 25;
  });
}

TEST(Limits, MessagesStayBelowTheAdaptersMaximum) {
  VerbsPair pair({.mtu = IBV_MTU_256, .max_message = 4096});
  pair.connect();
  pair.fill(5);
  ASSERT_TRUE(pair.run(pair.request(Op::kWrite, 1 << 20)).ok());
  EXPECT_EQ(memcmp(pair.a.memory.data(), pair.b.memory.data(), 1 << 20), 0);
}

absl::StatusOr<std::unique_ptr<Worker>> create(const FakeVerbs& fake, SettingValues settings) {
  return Worker::create({.key = *ClusterKey::from_bytes("a secret of the tests"),
                         .settings = std::move(settings),
                         .extra_providers = {verbs::verbs_over(fake.api())}});
}

TEST(Limits, MemoryThatCannotBePinnedNamesBytesLimitAndRemedy) {
  FakeVerbs fake({.pinnable_bytes = 4 << 20});
  const auto worker = create(fake, {}).value();
  std::vector<std::byte> memory(8 << 20);
  ASSERT_TRUE(worker->register_memory(memory.data(), 3 << 20).ok());
  const absl::Status status = worker->register_memory(memory.data(), 8 << 20).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  for (const char* part : {"8.0 MiB", "3.0 MiB", "RLIMIT_MEMLOCK", "ulimit -l unlimited"}) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  }
}

TEST(Limits, WrongSettingsAreNamed) {
  FakeVerbs fake({.devices = 2});
  const auto message = [&](const char* key, const char* value) {
    const absl::Status status = create(fake, {{key, value}}).status();
    EXPECT_FALSE(status.ok()) << key << "=" << value;
    return std::string(status.message());
  };
  EXPECT_THAT(message("verbs.devices", "mlx5_7"), HasSubstr("no RDMA device or port \"mlx5_7\""));
  EXPECT_THAT(message("verbs.gid_index", "900"), HasSubstr("out of range"));
  EXPECT_THAT(message("verbs.mtu", "9000"), HasSubstr("256 to 4096"));
  EXPECT_THAT(message("verbs.qps", "none"), HasSubstr("verbs.qps=none"));
  EXPECT_TRUE(create(fake, {{"verbs.devices", "fake1:1"}}).ok());
  fake.set_port(0, false);
  fake.set_port(1, false);
  EXPECT_THAT(message("verbs.mtu", "1024"), HasSubstr("fake0:1 is down"));
}

TEST(Limits, AMachineWithoutDevicesSaysHowToGetOne) {
  FakeVerbs fake({.devices = 0});
  EXPECT_THAT(std::string(create(fake, {}).status().message()), HasSubstr("rdma link add"));
}

}  // namespace
}  // namespace baton
