// disconnect() beside threads that submit, against a peer that does the same.
#include "tests/test.h"
#include "transport/progress_thread.h"
#include "transport/worker.h"

namespace baton {
namespace {

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

INSTANTIATE_TEST_SUITE_P(Providers, PartingOver, testing::Values("shm", "tcp"));

}  // namespace
}  // namespace baton
