// disconnect() beside threads that submit, against a peer that does the same.
#include "tests/hostile/worker_side.h"
#include "tests/test.h"

namespace baton {
namespace {

using hostile::kSideBytes;
using hostile::WorkerSide;

constexpr auto kStill = std::byte{0xdd};

class PartingOver : public testing::TestWithParam<std::string> {};

TEST_P(PartingOver, SeveralThreadsOfBothSidesAtOnce) {
  for (int round = 0; round < 5; ++round) {
    const SettingValues settings = {{"peer.answer_ms", "3600000"}};
    WorkerSide a(GetParam(), settings), b(GetParam(), settings);
    WorkerSide* const sides[] = {&a, &b};
    for (WorkerSide* side : sides) side->drive();
    a.peer = *a.worker->connect(b.worker->address());
    ASSERT_TRUE(b.worker
                    ->wait_until([&] {
                      if (auto event = b.worker->next_peer_event()) b.peer = event->peer;
                      return b.peer.generation != 0 &&
                             b.worker->peer_state(b.peer) == PeerState::kUp;
                    })
                    .ok());
    std::atomic<bool> over{false};
    std::vector<std::thread> threads;
    for (size_t i = 0; i < 2; ++i) {
      threads.emplace_back([&, i] {  // goes on submitting, and is refused from some moment on
        while (!over) {
          TransferRequest write = sides[i]->write(*sides[1 - i]);
          write.detached = true;
          (void)sides[i]->worker->submit(write);
          std::this_thread::yield();
        }
      });
    }
    std::array<absl::Status, 4> how;
    std::vector<std::thread> leaving;
    for (size_t i = 0; i < how.size(); ++i) {
      leaving.emplace_back([&, i] {
        WorkerSide& side = *sides[i % 2];
        how[i] = side.worker->disconnect(side.peer);
        // This side's memory is its own.
        if (i < 2) std::fill_n(side.block.data, kSideBytes, kStill);
      });
    }
    for (std::thread& each : leaving) each.join();
    for (const absl::Status& status : how) EXPECT_TRUE(status.ok()) << status;
    over = true;
    for (std::thread& each : threads) each.join();
    for (const WorkerSide* side : sides) {
      EXPECT_EQ(side->worker->peer_state(side->peer), PeerState::kDown);
      EXPECT_EQ(std::count(side->block.data, side->block.data + kSideBytes, kStill),
                static_cast<ptrdiff_t>(kSideBytes));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Providers, PartingOver, testing::Values("shm", "tcp"));

}  // namespace
}  // namespace baton
