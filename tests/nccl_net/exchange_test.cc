// Messages: every size, group and order, and each byte looked at.
#include "tests/nccl_net/rig.h"

namespace baton::nccl {
namespace {

INSTANTIATE_TEST_SUITE_P(Nets, Contract, testing::ValuesIn(contract_setups()), name_of);
INSTANTIATE_TEST_SUITE_P(Nets, BatonNet, testing::ValuesIn(baton_setups()), name_of);

constexpr size_t kSizes[] = {0,    1,      7,      8,      64,      127,     128,     129,    4095,
                             4096, 65'535, 65'536, 65'537, 262'143, 262'144, 600'000, 1 << 20};

// Promise(nccl): A message arrives whole, whatever its size | each size over every provider, each
//   byte and the size that test() tells looked at; the harness runs over other plugins too
TEST_P(Contract, EverySize) {
  Lane lane(rig, 1 << 20);
  for (const size_t bytes : kSizes) {
    lane.wipe();
    const Slot slot{0, bytes, 3};
    void* const receive = lane.receive({slot});
    void* const send = lane.send(slot);
    int sent = -1, received = -1;
    lane.finish(send, &sent, receive, &received);
    EXPECT_EQ(sent, static_cast<int>(bytes));
    EXPECT_EQ(received, static_cast<int>(bytes));
    lane.expect(slot, 0);
    EXPECT_TRUE(bytes == lane.in.size() || lane.in.data()[bytes] == std::byte{0xee}) << bytes;
  }
}

TEST_P(Contract, UnalignedPlaces) {
  Lane lane(rig, 300'000);
  for (const size_t at : {size_t{1}, size_t{3}, size_t{63}, size_t{4097}}) {
    lane.wipe();
    const Slot slot{at, 270'001, 0};
    lane.exchange(slot, at + 2);
    EXPECT_EQ(lane.in.data()[at - 1], std::byte{0xee});
  }
}

// Promise(nccl): 32 groups are in flight on a comm, and the next one is NULL, not an error | 33
//   receives are posted, of one message and of eight, then served in order
TEST_P(BatonNet, ThirtyTwoInFlight) {
  for (const size_t messages : {1, 8}) {
    const size_t all = 32 * messages;
    Lane lane(rig, all * 64);
    std::vector<void*> receives, sends;
    for (size_t g = 0; g < 32; ++g) {
      std::vector<Slot> slots;
      for (size_t i = 0; i < messages; ++i) {
        slots.push_back({(g * messages + i) * 64, 64, static_cast<int>(i)});
      }
      receives.push_back(lane.receive(slots));
    }
    EXPECT_EQ(lane.try_receive({{0, 64, 0}}), nullptr);
    for (size_t m = 0; m < all; ++m) {
      sends.push_back(lane.send({(all - 1 - m) * 64, 64, static_cast<int>(m % messages)}));
    }
    EXPECT_EQ(lane.try_send({0, 64, 0}), nullptr);
    for (void* const request : sends) lane.finish(request);
    for (void* const request : receives) lane.finish(request);
    for (size_t m = 0; m < all; ++m) lane.expect({m * 64, 64, 0}, (all - 1 - m) * 64);
    lane.exchange({0, 64, 0}, 0);
  }
}

// Promise(nccl): Receives are grouped by up to eight, and tags find their slot in any order | every
//   group size, tags permuted, sends smaller than, equal to and larger than their slots
TEST_P(BatonNet, PermutedTags) {
  constexpr size_t kRoom = 9'000;
  Lane lane(rig, 8 * kRoom);
  std::mt19937 random(1);
  for (int round = 0; round < 96 && !HasFailure(); ++round) {
    const int n = 1 + round % 8;
    std::vector<int> order(n);
    std::iota(order.begin(), order.end(), 0);
    lane.wipe();
    std::vector<Slot> slots;
    for (int i = 0; i < n; ++i) slots.push_back({i * kRoom, 8'000, 100 + i});
    std::shuffle(slots.begin(), slots.end(), random);
    std::shuffle(order.begin(), order.end(), random);
    void* const receive = lane.receive(slots);
    std::vector<void*> sends;
    const auto bytes_of = [&](int i) { return size_t{7'000} + (i + round) % 3 * 1'000; };
    for (const int i : order) sends.push_back(lane.send({i * kRoom, bytes_of(i), 100 + i}));
    for (void* const request : sends) lane.finish(request);
    std::array<int, 8> sizes{};
    lane.finish(receive, sizes.data());
    for (int s = 0; s < n; ++s) {
      const int i = slots[s].tag - 100;
      const size_t arrived = std::min<size_t>(bytes_of(i), 8'000);
      EXPECT_EQ(sizes[s], static_cast<int>(arrived));
      lane.expect({i * kRoom, arrived, 0}, i * kRoom);
      EXPECT_EQ(lane.in.data()[i * kRoom + arrived], std::byte{0xee});
    }
  }
}

TEST_P(BatonNet, EqualTagsAreMatchedInOrder) {
  Lane lane(rig, 3'000);
  void* const first = lane.receive({{0, 500, 9}, {500, 500, 9}});
  void* const second = lane.receive({{1'000, 500, 9}});
  std::vector<void*> sends;
  for (const size_t from : {2'000, 2'100, 2'200}) sends.push_back(lane.send({from, 100, 9}));
  for (void* const request : sends) lane.finish(request);
  lane.finish(first);
  lane.finish(second);
  lane.expect({0, 100, 0}, 2'000);
  lane.expect({500, 100, 0}, 2'100);
  lane.expect({1'000, 100, 0}, 2'200);
}

TEST_P(Contract, RandomSizesInOrder) {
  constexpr size_t kRoom = 100'000;
  Lane lane(rig, 32 * kRoom);
  std::mt19937 random(11);
  std::vector<Group> plan;
  for (size_t i = 0; i < 600; ++i) {
    const size_t bytes = random() % 3 == 0 ? random() % 200 : random() % kRoom;
    plan.push_back({{{i % 32 * kRoom, kRoom, 0}, bytes}});
  }
  Traffic traffic(lane, plan);
  run(rig, {&traffic});
}

TEST_P(BatonNet, RandomGroupsWithTagsInAnyOrder) {
  constexpr size_t kRoom = 5'000;
  Lane lane(rig, 8 * 8 * kRoom);
  std::mt19937 random(13);
  std::vector<Group> plan(400);
  for (size_t g = 0; g < plan.size(); ++g) {
    for (size_t i = 0, n = 1 + random() % 8; i < n; ++i) {
      plan[g].push_back({{(g % 8 * 8 + i) * kRoom, kRoom, static_cast<int>(i)}, random() % kRoom});
    }
  }
  Traffic traffic(lane, plan);
  run(rig, {&traffic});
}

// --- lines that the receiver looks at before anything is done ------------------------------------

// LL: words of 8 bytes, half of each a flag, come whole.
TEST_P(BatonNet, PolledWordsAreNeverTorn) {
  if (kSanitized) GTEST_SKIP() << "it reads memory that is being written, as a GPU does";
  constexpr size_t kWords = 64 << 10;
  Lane lane(rig, kWords * 8);
  auto* const out = reinterpret_cast<uint64_t*>(lane.out.data());
  auto* const in = reinterpret_cast<volatile uint64_t*>(lane.in.data());
  std::fill(lane.in.data(), lane.in.data() + lane.in.size(), std::byte{0});
  for (uint32_t flag = 1; flag <= 20; ++flag) {
    for (size_t i = 0; i < kWords; ++i) out[i] = uint64_t{flag} << 32 | (flag * 77 + i % 1000);
    void* const receive = lane.receive({{0, kWords * 8, 0}}, true);
    void* const send = lane.send({0, kWords * 8, 0});
    size_t seen = 0;
    bool sent = false;
    until([&] {
      for (; seen < kWords; ++seen) {
        const uint64_t word = in[seen];
        if (word >> 32 != flag) break;
        EXPECT_EQ(static_cast<uint32_t>(word), flag * 77 + seen % 1000);
      }
      sent = sent || lane.tested(send);  // drives what needs to be driven
      return seen == kWords || HasFailure();
    });
    if (!sent) lane.finish(send);
    lane.finish(receive);
    if (HasFailure()) return;
  }
}

// LL128: of a line of 128 bytes the last word comes last. Looked at by another thread, in memory
// that the kernel copies to; polled_test.cc looks at memory that is mapped.
TEST_P(BatonNet, PolledLinesAreWholeWhenTheirFlagIs) {
  if (!rig.threads()) GTEST_SKIP() << "there is one thread, which cannot look meanwhile";
  if (GetParam().provider != "shm") {
    GTEST_SKIP() << "the kernel copies: upwards, by instructions that promise no order";
  }
  constexpr size_t kLine = 16;  // words
  constexpr size_t kLines = 600'000 / 128;
  Lane lane(rig, kLines * 128);
  auto* const out = reinterpret_cast<uint64_t*>(lane.out.data());
  auto* const in = reinterpret_cast<std::atomic<uint64_t>*>(lane.in.data());
  std::fill(lane.in.data(), lane.in.data() + lane.in.size(), std::byte{0});
  std::atomic<uint64_t> round{0}, looked{0};
  std::atomic<bool> stop{false};
  std::string torn;
  std::thread looker([&] {
    for (uint64_t want = 1; !stop;) {
      if (round.load() != want) continue;
      for (size_t line = 0; line < kLines && !stop; ++line) {
        auto* const words = in + line * kLine;
        while (words[kLine - 1].load(std::memory_order_acquire) != want && !stop) {
        }
        for (size_t w = 0; w + 1 < kLine && !stop; ++w) {
          const uint64_t value = words[w].load(std::memory_order_relaxed);
          if (value != want * 1'000'003 + line * kLine + w) {
            torn = absl::StrFormat("round %d line %d word %d is %d", want, line, w, value);
            looked = UINT64_MAX;
            return;
          }
        }
      }
      looked = want++;
    }
  });
  for (uint64_t now = 1; now <= (kSanitized ? 10u : 60u) && torn.empty(); ++now) {
    for (size_t i = 0; i < kLines * kLine; ++i) {
      out[i] = i % kLine == kLine - 1 ? now : now * 1'000'003 + i;
    }
    round = now;
    void* const receive = lane.receive({{0, kLines * 128, 0}}, true);
    lane.finish(lane.send({0, kLines * 128, 0}));
    lane.finish(receive);
    until([&] { return looked >= now; });
    if (looked == UINT64_MAX) break;
  }
  stop = true;
  looker.join();
  EXPECT_EQ(torn, "");
}

TEST_P(Contract, FlushOfHostMemoryIsDoneAtOnce) {
  Lane lane(rig, 1'000);
  lane.exchange({0, 1'000, 0}, 0);
  void* data = lane.in.data();
  int size = 1'000;
  void* request = nullptr;
  ASSERT_EQ(net().flush(lane.ends.receive, 1, &data, &size, &lane.in_memory, &request),
            Result::kSuccess);
  if (request != nullptr) lane.finish(request);
}

}  // namespace
}  // namespace baton::nccl
