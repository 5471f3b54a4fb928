// disconnect() beside threads that submit, against a peer that does the same, is stopped, or is
// killed.
#include "tests/test.h"
#include "transport/base/child.h"
#include "transport/progress_thread.h"
#include "transport/worker.h"

namespace baton {
namespace {

using std::chrono::milliseconds;

constexpr size_t kBytes = 1 << 20;
constexpr auto kStill = std::byte{0xdd};

struct Side {
  explicit Side(const std::string& provider) {
    worker = *Worker::create({.name = "side",
                              .providers = {provider},
                              .key = *ClusterKey::from_bytes("0123456789abcdef"),
                              .settings = {{"peer.answer_ms", "3600000"}}});
    pool = *MemoryPool::create(*worker);
    block = *pool->allocate(kBytes);
    remote = *worker->remote_region(block.region);
  }
  ~Side() {
    thread.reset();
    pool.reset();
  }
  void drive() { thread = std::make_unique<ProgressThread>(*worker); }
  bool wait_for_peer() {
    return worker
        ->wait_until([&] {
          if (auto event = worker->next_peer_event()) peer = event->peer;
          return peer.generation != 0 && worker->peer_state(peer) == PeerState::kUp;
        })
        .ok();
  }
  TransferRequest write(const RemoteRegion& to, size_t at) const {
    return {.op = Op::kWrite,
            .peer = peer,
            .local = block.region,
            .local_layout = Layout::contiguous(block.offset, kBytes),
            .remote = to,
            .remote_layout = Layout::contiguous(at, kBytes),
            .detached = true};
  }

  std::unique_ptr<Worker> worker;
  std::unique_ptr<MemoryPool> pool;
  Block block;
  RemoteRegion remote;
  PeerId peer;
  std::unique_ptr<ProgressThread> thread;
};

class PartingOver : public testing::TestWithParam<std::string> {};

TEST_P(PartingOver, SeveralThreadsOfBothSidesAtOnce) {
  for (int round = 0; round < 5; ++round) {
    Side sides[2] = {Side(GetParam()), Side(GetParam())};
    for (Side& side : sides) side.drive();
    sides[0].peer = *sides[0].worker->connect(sides[1].worker->address());
    ASSERT_TRUE(sides[1].wait_for_peer());
    std::atomic<bool> over{false};
    std::vector<std::thread> threads;
    for (size_t i = 0; i < 2; ++i) {
      threads.emplace_back([&, i] {  // goes on submitting, and is refused from some moment on
        while (!over) {
          (void)sides[i].worker->submit(
              sides[i].write(sides[1 - i].remote, sides[1 - i].block.offset));
          std::this_thread::yield();
        }
      });
    }
    std::array<absl::Status, 4> how;
    std::vector<std::thread> leaving;
    for (size_t i = 0; i < how.size(); ++i) {
      leaving.emplace_back([&, i] {
        Side& side = sides[i % 2];
        how[i] = side.worker->disconnect(side.peer);
        // This side's memory is its own.
        if (i < 2) std::fill_n(side.block.data, kBytes, kStill);
      });
    }
    for (std::thread& each : leaving) each.join();
    for (const absl::Status& status : how) EXPECT_TRUE(status.ok()) << status;
    over = true;
    for (std::thread& each : threads) each.join();
    for (Side& side : sides) {
      EXPECT_EQ(side.worker->peer_state(side.peer), PeerState::kDown);
      EXPECT_EQ(std::count(side.block.data, side.block.data + kBytes, kStill),
                static_cast<ptrdiff_t>(kBytes));
    }
  }
}

// A process of its own, which does what it is told by signals.
class Child {
 public:
  explicit Child(const std::string& provider) {
    EXPECT_EQ(pipe(ends_), 0);
    pid_ = base::fork_child();
    if (pid_ != 0) return;
    Side side(provider);
    const std::string offer = side.remote.encode() + side.worker->address();
    if (write(ends_[1], offer.data(), offer.size()) < 0) _exit(1);
    side.worker->wait_until([] { return false; }).IgnoreError();
    _exit(0);
  }
  ~Child() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    close(ends_[0]);
    close(ends_[1]);
  }
  std::string offer() {
    std::string out(4096, '\0');
    const ssize_t got = read(ends_[0], out.data(), out.size());
    out.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
    return out;
  }
  void signal(int number) {
    kill(pid_, number);
    int status = 0;
    if (number == SIGSTOP) waitpid(pid_, &status, WUNTRACED);
  }

 private:
  int ends_[2] = {-1, -1};
  pid_t pid_ = -1;
};

class PartingFromAProcess : public PartingOver {
 protected:
  void SetUp() override {
    const std::string offer = child_.offer();
    ASSERT_GT(offer.size(), RemoteRegion::kEncodedBytes);
    side_ = std::make_unique<Side>(GetParam());
    far_ = *RemoteRegion::decode(offer.substr(0, RemoteRegion::kEncodedBytes));
    side_->peer = *side_->worker->connect(offer.substr(RemoteRegion::kEncodedBytes));
    ASSERT_TRUE(side_->wait_for_peer());
  }
  Child child_{GetParam()};  // first: libraries that have begun do not survive a fork
  std::unique_ptr<Side> side_;
  RemoteRegion far_;
};

TEST_P(PartingFromAProcess, ThatIsStoppedEndsInTime) {
  child_.signal(SIGSTOP);
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(side_->worker->submit(side_->write(far_, 0)).ok());
  const absl::Status how = side_->worker->disconnect(side_->peer, milliseconds(50));
  EXPECT_TRUE(absl::IsDeadlineExceeded(how)) << how;
  EXPECT_EQ(side_->worker->peer_state(side_->peer), PeerState::kDown);
  EXPECT_EQ(side_->worker->stats().open_transfers, 0u);
  EXPECT_TRUE(absl::IsUnavailable(side_->worker->peer_status(side_->peer)));
}

TEST_P(PartingFromAProcess, ThatIsKilledMeanwhile) {
  child_.signal(SIGSTOP);
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(side_->worker->submit(side_->write(far_, 0)).ok());
  side_->worker->begin_disconnect(side_->peer);
  child_.signal(SIGKILL);
  const absl::Status how = side_->worker->disconnect(side_->peer);
  EXPECT_TRUE(how.ok()) << "who is gone moves nothing: " << how;
  EXPECT_EQ(side_->worker->stats().open_transfers, 0u);
}

TEST_P(PartingFromAProcess, ThatKnowsNothingOfIt) {
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(side_->worker->submit(side_->write(far_, 0)).ok());
  const absl::Status how = side_->worker->disconnect(side_->peer);
  EXPECT_TRUE(how.ok()) << how;
  EXPECT_TRUE(side_->worker->disconnect(side_->peer).ok()) << "asked once more, the same";
}

INSTANTIATE_TEST_SUITE_P(Providers, PartingOver, testing::Values("shm", "tcp"));
INSTANTIATE_TEST_SUITE_P(Providers, PartingFromAProcess, testing::Values("shm", "tcp"));

}  // namespace
}  // namespace baton
