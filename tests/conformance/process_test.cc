// Workers in different processes: a peer that is killed, stopped, has the wrong key, or is no peer
// at all. The survivor ends every transfer, leaks nothing and keeps serving the others.
#include <arpa/inet.h>
#include <netinet/in.h>

#include "tests/conformance/children.h"
#include "tests/held_port.h"
#include "tests/sanitized.h"
#include "tests/test.h"
#include "tests/usable_provider.h"
#include "tests/used.h"
#include "transport/pool.h"

namespace baton {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

class Processes : public OverEveryProvider<std::string> {
 protected:
  void SetUp() override {
    OverEveryProvider::SetUp();
    if (IsSkipped()) return;
    other_ = std::make_unique<Child>(GetParam(), "other", 77);
    ASSERT_TRUE(other_->started());
  }
  void start_worker(SettingValues settings = {}) {
    WorkerOptions options = process_options(GetParam(), "survivor");
    options.settings = std::move(settings);
    worker_ = Worker::create(std::move(options)).value();
    pool_ = MemoryPool::create(*worker_, {.slab_bytes = 2 * kChildBytes}).value();
    block_ = *pool_->allocate(2 * kChildBytes);
    other_peer_ = connect(*other_);
  }
  void TearDown() override {
    pool_.reset();
    worker_.reset();
  }

  // The worker goes on meanwhile.
  bool comes(const std::function<bool()>& fact) {
    return worker_->wait_until(fact, patient(seconds(20))).ok();
  }
  PeerId connect(const Child& child) {
    auto peer = worker_->connect(child.address()).value();
    EXPECT_TRUE(comes([&] { return worker_->peer_state(peer) != PeerState::kConnecting; }));
    return peer;
  }
  TransferRequest request(Op op, PeerId peer, const Child& child, size_t at, size_t bytes) {
    return {.op = op,
            .peer = peer,
            .local = block_.region,
            .local_layout = Layout::contiguous(block_.offset + at, bytes),
            .remote = child.region(),
            .remote_layout = Layout::contiguous(at, bytes)};
  }
  absl::Status run(const TransferRequest& r) {
    auto id = worker_->submit(r);
    return id.ok() ? worker_->wait(*id, patient(seconds(20))) : id.status();
  }
  // The other peer is served as ever: what is written there can be read back.
  void expect_serving(uint8_t value) {
    std::memset(block_.data, value, 1 << 20);
    absl::Status status = run(request(Op::kWrite, other_peer_, *other_, 0, 1 << 20));
    ASSERT_TRUE(status.ok()) << status;
    std::memset(block_.data, 0, 1 << 20);
    status = run(request(Op::kRead, other_peer_, *other_, 0, 1 << 20));
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(std::count(block_.data, block_.data + (1 << 20), std::byte(value)), 1 << 20);
  }

  std::unique_ptr<Child> other_;
  std::unique_ptr<Worker> worker_;
  std::unique_ptr<MemoryPool> pool_;
  Block block_;
  PeerId other_peer_;
};

TEST_P(Processes, APeerKilledAtAnyPointFailsItsTransfersAndLeaksNothing) {
  const int rounds = rounds_of(20, 6);
  start_worker();
  std::mt19937_64 random(1);
  std::optional<Used> baseline;
  size_t failed = 0;
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    Child victim(GetParam(), "victim", 5);
    ASSERT_TRUE(victim.started());
    const PeerId peer = connect(victim);
    ASSERT_EQ(worker_->peer_state(peer), PeerState::kUp) << worker_->peer_status(peer);
    // Thousands of transfers; new ones follow those that end, until the knife falls.
    const size_t kill_after = random() % 3000;
    std::vector<TransferId> open;
    size_t submitted = 0;
    size_t ended_well = 0;
    bool killed = false;
    const Time start = Clock::steady().now();
    while (!open.empty() || !killed) {
      while (!killed && open.size() < 200) {
        const size_t sizes[] = {100, 5000, 200'000};
        const size_t bytes = sizes[random() % 3];
        auto id = worker_->submit(request(random() % 2 ? Op::kRead : Op::kWrite, peer, victim,
                                          random() % (kChildBytes - bytes), bytes));
        if (!id.ok()) break;
        open.push_back(*id);
        ++submitted;
      }
      worker_->progress();
      std::erase_if(open, [&](TransferId id) {
        if (!ended(*worker_->state(id))) return false;
        const absl::Status status = worker_->status(id);
        EXPECT_TRUE(status.ok() || absl::IsUnavailable(status)) << status;
        status.ok() ? ++ended_well : ++failed;
        EXPECT_TRUE(worker_->release(id).ok());
        return true;
      });
      if (!killed && ended_well >= kill_after) {
        victim.kill();
        killed = true;
      }
      ASSERT_LT(Clock::steady().now() - start, patient(seconds(60)))
          << open.size() << " never ended";
    }
    EXPECT_TRUE(comes([&] { return worker_->peer_state(peer) == PeerState::kDown; }));
    EXPECT_FALSE(worker_->peer_status(peer).ok());
    expect_serving(static_cast<uint8_t>(round + 1));
    if (HasFatalFailure()) return;
    while (worker_->next_peer_event()) {
    }
    if (round == 2) baseline.emplace();
  }
  EXPECT_GT(failed, 0u);
  // What has gone is noticed by progress(), a little later at most.
  EXPECT_TRUE(comes([&] { return Used().within(*baseline); }))
      << Used().text() << "; once " << baseline->text();
  EXPECT_EQ(worker_->stats().open_transfers, 0u);
  EXPECT_EQ(worker_->stats().peers_up, 1u);
}

// The port that a child listens on.
uint16_t port_of(const Child& child, const std::string& provider) {
  const auto address = Address::decode(child.address());
  for (const auto& [name, where] : address->providers) {
    if (name != provider) continue;
    const std::string first = where.substr(0, where.find(','));
    return static_cast<uint16_t>(std::stoi(first.substr(first.rfind(':') + 1)));
  }
  return 0;
}

// Killed with writes and reads open, and another process listens at its address.
TEST_P(Processes, AnotherProcessAtTheAddressOfAKilledOneIsAnotherPeer) {
  if (GetParam() != "tcp") GTEST_SKIP() << "only tcp listens on a port of one's choice";
  Child victim(GetParam(), "victim", 5);
  ASSERT_TRUE(victim.started());
  start_worker();
  const PeerId peer = connect(victim);
  ASSERT_EQ(worker_->peer_state(peer), PeerState::kUp) << worker_->peer_status(peer);
  std::memset(block_.data, 0x11, kChildBytes);
  ASSERT_TRUE(run(request(Op::kWrite, peer, victim, 0, 1000)).ok());
  victim.signal(SIGSTOP);  // so that what is submitted now is open
  std::vector<TransferId> ids;
  for (int i = 0; i < 20; ++i) {
    auto id = worker_->submit(request(i % 2 ? Op::kRead : Op::kWrite, peer, victim, 0, kChildBytes))
                  .value();
    ids.push_back(id);
  }
  for (int i = 0; i < 100; ++i) worker_->progress();
  const uint16_t port = port_of(victim, GetParam());
  victim.kill();
  std::optional<HeldPort> held(port);  // until the heir has it
  Child heir(GetParam(), "heir", 66, "a secret of the process tests", port);
  held.reset();
  ASSERT_TRUE(heir.started());
  for (const TransferId id : ids) {
    const absl::Status status = worker_->wait(id, patient(seconds(30)));
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_THAT(status.message(), testing::Not(testing::IsEmpty()));
  }
  EXPECT_EQ(worker_->peer_state(peer), PeerState::kDown);

  // All of the new one's memory is as it has filled it; and it takes what is for it.
  const PeerId again = connect(heir);
  ASSERT_EQ(worker_->peer_state(again), PeerState::kUp) << worker_->peer_status(again);
  std::memset(block_.data, 0x11, kChildBytes);
  ASSERT_TRUE(run(request(Op::kRead, again, heir, 0, kChildBytes)).ok());
  EXPECT_EQ(std::count(block_.data, block_.data + kChildBytes, std::byte{66}),
            static_cast<ptrdiff_t>(kChildBytes));
  ASSERT_TRUE(run(request(Op::kWrite, again, heir, 0, kChildBytes)).ok());
  expect_serving(12);
}

TEST_P(Processes, AStoppedPeerDoesNotHoldATransferBeyondItsDeadline) {
  Child frozen(GetParam(), "frozen", 5);
  ASSERT_TRUE(frozen.started());
  // What is frozen shall be given up before this test is.
  SettingValues impatient = {{"peer.redial_ms", "500"}};
  if (GetParam() != "shm") impatient.emplace_back(GetParam() + ".stall_ms", "2000");
  start_worker(std::move(impatient));
  const PeerId peer = connect(frozen);
  ASSERT_EQ(worker_->peer_state(peer), PeerState::kUp) << worker_->peer_status(peer);
  ASSERT_TRUE(run(request(Op::kRead, peer, frozen, 0, 1000)).ok());
  frozen.signal(SIGSTOP);
  std::vector<TransferId> ids;
  for (int i = 0; i < 20; ++i) {
    TransferRequest r = request(i % 2 ? Op::kRead : Op::kWrite, peer, frozen, 0, kChildBytes);
    r.timeout = milliseconds(200);
    auto id = worker_->submit(r).value();
    ids.push_back(id);
  }
  for (TransferId id : ids) {
    const absl::Status status = worker_->wait(id, patient(seconds(30)));
    EXPECT_EQ(worker_->state(id).status().code(), absl::StatusCode::kNotFound) << "never ended";
    // Shared memory needs nobody at the other end; a rail on which nothing moves may be given up.
    EXPECT_TRUE(status.ok() || absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status))
        << status;
  }
  // Its memory here is free: whatever the peer does when it wakes up, these bytes stay.
  std::memset(block_.data, 0x33, kChildBytes);
  expect_serving(9);
  std::memset(block_.data, 0x33, kChildBytes);
  frozen.signal(SIGCONT);
  for (int i = 0; i < 20; ++i) {
    (void)worker_->wait_until([] { return false; }, milliseconds(5));
  }
  EXPECT_EQ(std::count(block_.data, block_.data + kChildBytes, std::byte{0x33}),
            static_cast<ptrdiff_t>(kChildBytes));
}

TEST_P(Processes, AnAddressWithoutAListenerIsAnError) {
  std::string address;
  {
    Child gone(GetParam(), "gone", 1);
    ASSERT_TRUE(gone.started());
    address = gone.address();
  }
  start_worker();
  auto peer = worker_->connect(address).value();
  ASSERT_TRUE(comes([&] { return worker_->peer_state(peer) == PeerState::kDown; }));
  EXPECT_THAT(worker_->peer_status(peer).message(), testing::Not(testing::IsEmpty()));
  expect_serving(4);
}

TEST_P(Processes, ForeignBytesAtThePortAreHarmless) {
  if (GetParam() == "shm") GTEST_SKIP() << "shm listens on no port";
  // A second socket may come up while descriptors are counted.
  SettingValues settings;
  if (GetParam() == "tcp") settings.emplace_back("tcp.sockets", "1");
  start_worker(std::move(settings));
  ASSERT_NE(worker_->port(), 0);
  // Whatever is mapped on first use.
  for (int i = 0; i < 20; ++i) expect_serving(7);
  const Used baseline;
  std::mt19937_64 random(3);
  for (int round = 0; round < 60; ++round) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in to{.sin_family = AF_INET, .sin_port = htons(worker_->port())};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ASSERT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to), 0);
    std::string junk(round % 4 == 0 ? 0 : random() % 5000, '\0');
    for (char& c : junk) c = static_cast<char>(random());
    if (round % 3 == 1) junk = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    if (round % 7 == 2) junk.insert(0, "BATON\r\n\x1a");
    (void)!send(fd, junk.data(), junk.size(), MSG_NOSIGNAL);
    if (round % 2) shutdown(fd, SHUT_WR);
    for (int i = 0; i < 20; ++i) worker_->progress();
    close(fd);
  }
  expect_serving(8);
  EXPECT_TRUE(comes([&] { return Used().within(baseline); }))
      << Used().text() << "; once " << baseline.text();
}

// Those that this build has and that cross processes.
std::vector<std::string> providers() {
  std::vector<std::string> out;
  for (const auto& [name, factory] : registered_providers()) out.push_back(name);
  return out;
}

TEST(WorkerPort, IsOneThatAProviderListensOn) {
  WorkerOptions options;
  options.providers = {"shm"};
  options.listen_port = 18999;
  const auto worker = Worker::create(options);
  ASSERT_FALSE(worker.ok());
  EXPECT_TRUE(absl::IsInvalidArgument(worker.status())) << worker.status();
  EXPECT_NE(worker.status().message().find("shm listens on port 18999"), std::string::npos)
      << worker.status();
}

INSTANTIATE_TEST_SUITE_P(Integration, Processes, testing::ValuesIn(providers()),
                         [](const auto& each) { return each.param; });

}  // namespace
}  // namespace baton

int main(int argc, char** argv) {
  baton::Child::serve_if_asked(argc, argv);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
