// Transfer slots under many threads: no slot is handed out twice, none is lost, ids go stale.
#include "transport/internal/tables/transfer_slots.h"

#include "tests/test.h"
#include "tests/transport/stub_provider.h"
#include "tests/until.h"
#include "transport/internal/tables/arrivals.h"

namespace baton {
namespace {

void end(internal::TransferSlots& slots, TransferId id) {
  slots[id.slot].word.store((uint64_t{id.generation} << 8) |
                            (static_cast<uint64_t>(TransferState::kDone) + 1));
}

TEST(TransferSlots, ManySubmittersOneTaker) {
  constexpr int kThreads = 4, kEach = 20000;
  internal::TransferSlots slots(64);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&slots, t] {
      for (int i = 0; i < kEach;) {
        const TransferId id = slots.acquire();
        if (id.generation == 0) {
          std::this_thread::yield();
          continue;
        }
        slots[id.slot].descriptor.increment = static_cast<uint64_t>(t) * kEach + i++;
        slots.push(id);
      }
    });
  }
  std::vector<uint64_t> last(kThreads, 0);
  for (int taken = 0; taken < kThreads * kEach;) {
    const uint32_t index = slots.pop_submitted();
    if (index == internal::TransferSlot::kNone) {
      std::this_thread::yield();
      continue;
    }
    ++taken;
    const uint64_t tag = slots[index].descriptor.increment;
    uint64_t& before = last[tag / kEach];
    EXPECT_EQ(tag % kEach, before) << "lost, repeated or out of order";
    before = tag % kEach + 1;
    const TransferId id{index, static_cast<uint32_t>(slots[index].word.load() >> 8)};
    end(slots, id);
    ASSERT_TRUE(slots.release(id));
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(slots.free(), slots.capacity()) << "one was miscounted";
}

TEST(PeerShares, AreWhatIsFreeAndHalfOfThatForNotifications) {
  using internal::PeerShare;
  PeerShare share;
  EXPECT_EQ(share.take(true).all, 0u);
  EXPECT_EQ(share.take(false).notifying, 1u);
  share.give_back(true);
  EXPECT_EQ(share.open().all, 1u);
  EXPECT_EQ(share.open().notifying, 0u);
  EXPECT_TRUE(PeerShare::leaves_room({.all = 7}, false, 8, 16));
  EXPECT_FALSE(PeerShare::leaves_room({.all = 8}, false, 8, 16));
  EXPECT_FALSE(PeerShare::leaves_room({.all = 8}, true, 8, 16));
  EXPECT_TRUE(PeerShare::leaves_room({.all = 3, .notifying = 3}, true, 8, 16));
  EXPECT_FALSE(PeerShare::leaves_room({.all = 4, .notifying = 4}, true, 8, 16));
  EXPECT_TRUE(PeerShare::leaves_room({.all = 4, .notifying = 4}, false, 8, 16));
  // With a quarter free, half as many as that.
  EXPECT_TRUE(PeerShare::leaves_room({.all = 1}, false, 4, 16));
  EXPECT_FALSE(PeerShare::leaves_room({.all = 2}, false, 4, 16));
  // The first of a peer has a slot as long as there is one.
  EXPECT_TRUE(PeerShare::leaves_room({}, false, 1, 65'000));
  EXPECT_TRUE(PeerShare::leaves_room({}, true, 1, 65'000));
  EXPECT_FALSE(PeerShare::leaves_room({}, true, 0, 65'000));
}

// Whoever asks how a transfer ended gets the whole answer or none, while another thread gives its
// slot to the next one. (The thread sanitizer sees what would be torn.)
// Promise(transfers): A status is read whole while other threads release the transfer and reuse its
//   slot | copied under the worker's lock
TEST(TransferSlots, AStatusIsNotReadWhileItsSlotIsUsedAgain) {
  StubWorker stub;
  std::atomic<uint64_t> newest{0};
  std::atomic<bool> over{false};
  std::thread reader([&] {
    while (!over.load()) {
      const uint64_t word = newest.load();
      const absl::Status how =
          stub.worker->status({static_cast<uint32_t>(word), static_cast<uint32_t>(word >> 32)});
      EXPECT_TRUE(absl::IsCancelled(how) || absl::IsUnavailable(how) || absl::IsNotFound(how));
    }
  });
  for (int i = 0; i < 2000; ++i) {
    const auto id = stub.worker->submit({.peer = stub.peer, .notify = "words"}).value();
    newest.store(uint64_t{id.generation} << 32 | id.slot);
    ASSERT_TRUE(stub.worker->cancel(id).ok());
    until([&] { return ended(*stub.worker->state(id)); }, [&] { stub.worker->progress(); });
    ASSERT_TRUE(stub.worker->release(id).ok());
  }
  over.store(true);
  reader.join();
}

// The thread sanitizer knows how Abseil counts who shares an error: this is no race, and was one to
// it.
TEST(TransferSlots, AStatusThatThreadsShareIsGoneWithTheLastOfThem) {
  absl::Status mine = absl::UnavailableError(std::string(64, 'x'));
  std::atomic<bool> counted_down{false};
  std::thread other([&counted_down, theirs = mine]() mutable {
    { const absl::Status counted_up = theirs; }  // NOLINT: copied, and let go of
    theirs = absl::OkStatus();
    counted_down.store(true,
                       std::memory_order_relaxed);  // nothing but the count itself orders the two
  });
  until([&] { return counted_down.load(std::memory_order_relaxed); });
  mine = absl::OkStatus();
  other.join();
}

}  // namespace
}  // namespace baton
