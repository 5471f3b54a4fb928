// The queue of triggers: emulated kernels push, the host takes, at any moment between two accesses.
#include "gpudirect/triggers/trigger_fifo.h"

#include "gpudirect/kernels/emulation.h"
#include "gpudirect/kernels/trigger-inl.h"
#include "gpudirect/launcher.h"
#include "tests/gpudirect/fake/fake_driver.h"
#include "tests/test.h"

namespace baton::gpudirect {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Memory of which everything is allowed, and where something happens before each access.
class BusyMemory : public kernels::MemoryView {
 public:
  explicit BusyMemory(std::function<void()> meanwhile) : meanwhile_(std::move(meanwhile)) {}
  std::byte* find(uint64_t at, size_t, bool) override {
    meanwhile_();
    return reinterpret_cast<std::byte*>(at);
  }

 private:
  std::function<void()> meanwhile_;
};

struct Queue {
  explicit Queue(uint32_t capacity)
      : slots(size_t{2} * capacity), consumer(absl::MakeSpan(slots), tail) {
    handle = {slots.data(), &tail, &words[0], &words[1], &words[2], &words[3], capacity};
  }
  // Pushes with the kernel; which were accepted.
  std::vector<uint32_t> push(const std::vector<Trigger>& triggers, uint64_t seed,
                             std::function<void()> meanwhile, uint64_t nanoseconds = 0) {
    std::vector<uint32_t> accepted(triggers.size(), 7);
    BusyMemory memory(std::move(meanwhile));
    const kernels::PushTriggers arguments{handle, triggers.data(), accepted.data(),
                                          static_cast<uint32_t>(triggers.size()), nanoseconds};
    const auto kernel = kernels::emulated_kernel("baton_push_triggers");
    EXPECT_EQ(kernels::emulate("push", *kernel, {2, kernel->threads, seed}, &arguments, memory),
              std::nullopt);
    return accepted;
  }

  std::vector<uint64_t> slots;
  uint64_t tail = 0;
  uint64_t words[4] = {};
  TriggerConsumer consumer;
  kernels::TriggerQueue handle;
};

// Thousands of triggers through a small queue: each comes once, or was refused as full.
TEST(TriggerFifo, EveryTriggerComesOnceWheneverTheHostLooks) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const uint32_t capacity = 1u << (2 + seed % 4);
    Queue queue(capacity);
    const uint32_t transfer = queue.consumer.prepare(100000);
    std::vector<Trigger> taken, wanted, todo;
    for (uint32_t i = 0; i < 400; ++i) todo.push_back({transfer, i, 1 + i % 5, 0});
    const auto take = [&] {
      if (random() % (2 + seed) == 0) {
        queue.consumer.take(random() % 5,
                            [&](const Trigger& trigger) { taken.push_back(trigger); });
      }
    };
    wanted = todo;
    for (int round = 0; !todo.empty(); ++round) {
      ASSERT_LT(round, 1000) << "nothing is accepted any more";
      const std::vector<uint32_t> accepted =
          queue.push(todo, seed + static_cast<uint64_t>(round), take);
      std::vector<Trigger> again;
      for (size_t i = 0; i < todo.size(); ++i) {
        if (accepted[i] == 0) again.push_back(todo[i]);
      }
      todo = std::move(again);
      queue.consumer.take(capacity, [&](const Trigger& trigger) { taken.push_back(trigger); });
    }
    std::sort(taken.begin(), taken.end(),
              [](const Trigger& a, const Trigger& b) { return a.first < b.first; });
    ASSERT_EQ(taken.size(), wanted.size());
    EXPECT_EQ(std::memcmp(taken.data(), wanted.data(), taken.size() * sizeof(Trigger)), 0);
    EXPECT_EQ(queue.consumer.refused(), 0u);
  }
}

TEST(TriggerFifo, AFullQueueSaysSo) {
  Queue queue(4);
  const uint32_t transfer = queue.consumer.prepare(10);
  const std::vector<Trigger> triggers(6, Trigger{transfer, 0, 1, 0});
  std::vector<uint32_t> accepted = queue.push(triggers, 1, [] {});
  EXPECT_EQ(std::count(accepted.begin(), accepted.end(), 1u), 4);
  EXPECT_EQ(queue.consumer.take(3, [](const Trigger&) {}), 3u);
  accepted = queue.push(triggers, 2, [] {});
  EXPECT_EQ(std::count(accepted.begin(), accepted.end(), 1u), 3);
  EXPECT_EQ(queue.consumer.take(100, [](const Trigger&) {}), 4u);
  EXPECT_EQ(queue.consumer.take(100, [](const Trigger&) {}), 0u);
}

// In one launch, through a queue that is full most of the time.
TEST(TriggerFifo, AKernelWaitsForPlacesAsItIsTold) {
  Queue queue(8);
  const uint32_t transfer = queue.consumer.prepare(1000);
  std::vector<Trigger> triggers;
  for (uint32_t i = 0; i < 1000; ++i) triggers.push_back({transfer, i, 1, 0});
  std::vector<uint32_t> taken;
  const auto take = [&] {
    queue.consumer.take(1, [&](const Trigger& trigger) { taken.push_back(trigger.first); });
  };
  const std::vector<uint32_t> accepted = queue.push(triggers, 1, take, 60'000'000'000);
  EXPECT_EQ(std::count(accepted.begin(), accepted.end(), 1u), 1000);
  for (int i = 0; i < 8; ++i) take();
  std::sort(taken.begin(), taken.end());
  ASSERT_EQ(taken.size(), 1000u);
  for (uint32_t i = 0; i < 1000; ++i) EXPECT_EQ(taken[i], i);
  // Nobody takes: it ends none the less.
  const std::vector<uint32_t> refused = queue.push(
      triggers, 2, [] {}, 1'000'000);
  EXPECT_EQ(std::count(refused.begin(), refused.end(), 1u), 8);
}

TEST(TriggerFifo, AClosedQueueEndsTheWait) {
  Queue queue(8);
  const uint32_t transfer = queue.consumer.prepare(10);
  const std::vector<Trigger> triggers(100, Trigger{transfer, 0, 1, 0});
  constexpr uint64_t kMinute = 60'000'000'000;
  int accesses = 0;
  const auto close = [&] {
    if (++accesses == 5000) queue.consumer.close();
  };
  std::vector<uint32_t> accepted = queue.push(triggers, 1, close, kMinute);
  EXPECT_GT(accesses, 5000) << "it has not waited";
  EXPECT_LT(accesses, 10'000) << "it has waited on";
  EXPECT_EQ(std::count(accepted.begin(), accepted.end(), 1u), 8);
  // What was pushed before is taken; and it stays closed.
  EXPECT_EQ(queue.consumer.take(100, [](const Trigger&) {}), 8u);
  accepted = queue.push(triggers, 2, close, kMinute);
  EXPECT_EQ(std::count(accepted.begin(), accepted.end(), 1u), 0);
  EXPECT_LT(accesses, 15'000) << "it has waited again";
}

// Words of a slot come one by one, in any order.
TEST(TriggerFifo, HalfOfASlotIsNotTaken) {
  for (const size_t late : {0u, 1u}) {
    Queue queue(2);
    const uint32_t transfer = queue.consumer.prepare(10);
    for (uint32_t lap = 0; lap < 4; ++lap) {
      std::vector<uint64_t> before = queue.slots;
      queue.push({{transfer, 2 * lap, 1, 0}, {transfer, 2 * lap + 1, 1, 0}}, lap, [] {});
      const uint64_t word = queue.slots[late];
      queue.slots[late] = before[late];
      const auto none = [](const Trigger&) { FAIL() << "half of it is another's"; };
      EXPECT_EQ(queue.consumer.take(2, none), 0u);
      queue.slots[late] = word;
      EXPECT_EQ(queue.consumer.take(2, [](const Trigger&) {}), 2u);
    }
    EXPECT_EQ(queue.consumer.refused(), 0u);
  }
}

// A kernel's thread, as a thread.
struct ThreadOfAKernel {
  static std::atomic_ref<uint64_t> word(const uint64_t* at) {
    return std::atomic_ref(*const_cast<uint64_t*>(at));
  }
  uint64_t load_acquire(const uint64_t* at) { return word(at).load(std::memory_order_acquire); }
  uint64_t look(const uint64_t* at) { return load_acquire(at); }
  void raise(uint64_t* at, uint64_t value) {
    uint64_t was = look(at);
    while (was < value && !word(at).compare_exchange_weak(was, value, std::memory_order_acq_rel)) {
    }
  }
  bool claim(uint64_t* at) { return word(at).exchange(1, std::memory_order_acq_rel) == 0; }
  void give_back(uint64_t* at) { word(at).store(0, std::memory_order_release); }
  uint64_t count_up(uint64_t* at) { return word(at).fetch_add(1, std::memory_order_acq_rel); }
  void count_down(uint64_t* at) { word(at).fetch_sub(1, std::memory_order_acq_rel); }
  void store_release(uint64_t* to, uint64_t first, uint64_t second) {
    word(to).store(first, std::memory_order_release);
    word(to + 1).store(second, std::memory_order_release);
  }
};

// Threads that push at the same time, and a host that takes meanwhile: each trigger comes once,
// those of one thread in its order, and with what the thread has written before.
TEST(TriggerFifo, ManyPushAtOnce) {
  constexpr uint32_t kThreads = 4, kEach = 5000;
  Queue queue(16);
  for (uint32_t i = 0; i < kThreads; ++i) queue.consumer.prepare(kEach);
  std::vector<std::vector<uint32_t>> written(kThreads, std::vector<uint32_t>(kEach));
  std::atomic<uint64_t> refused{0};
  std::vector<std::thread> threads;
  for (uint32_t transfer = 0; transfer < kThreads; ++transfer) {
    threads.emplace_back([&, transfer] {
      ThreadOfAKernel block;
      for (uint32_t i = 0; i < kEach; ++i) {
        written[transfer][i] = i + 1;
        while (!kernels::push_trigger(block, queue.handle, {transfer, i, 1, 0})) {
          refused.fetch_add(1, std::memory_order_relaxed);
          std::this_thread::yield();
        }
      }
    });
  }
  std::vector<uint32_t> next(kThreads);
  uint32_t wrong = 0;
  for (size_t taken = 0; taken < size_t{kThreads} * kEach;) {
    const size_t some = queue.consumer.take(16, [&](const Trigger& trigger) {
      uint32_t& wanted = next[trigger.transfer];
      if (trigger.first != wanted || written[trigger.transfer][trigger.first] != wanted + 1)
        ++wrong;
      ++wanted;
    });
    if (some == 0) std::this_thread::yield();
    taken += some;
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(queue.consumer.take(16, [](const Trigger&) {}), 0u);
  EXPECT_EQ(queue.consumer.refused(), 0u);
  EXPECT_EQ(queue.words[0], queue.words[1]) << "who was refused has given back what it counted";
}

TEST(TriggerFifo, OnlyPiecesOfPreparedTransfersAreStarted) {
  Queue queue(64);
  const uint32_t transfer = queue.consumer.prepare(10);
  const uint32_t epoch = *queue.consumer.renew(transfer);
  const std::vector<Trigger> bad = {{transfer + 1, 0, 1, epoch},
                                    {transfer, 0, 11, epoch},
                                    {transfer, 10, 1, epoch},
                                    {transfer, 0, 0, epoch},
                                    {transfer, 11, 0, epoch},
                                    {transfer, UINT32_MAX, 2, epoch},
                                    {transfer, 0, 1, 0},
                                    {transfer, 5, UINT32_MAX, epoch},
                                    {1u << 31, 0, 1, epoch},
                                    {UINT32_MAX, 0, 1, epoch},
                                    {transfer, 0, 1, epoch | 1u << 31}};
  const std::vector<uint32_t> accepted = queue.push(bad, 1, [] {});
  EXPECT_EQ(std::count(accepted.begin(), accepted.end(), 1u), 11);
  size_t started = 0;
  EXPECT_EQ(queue.consumer.take(64, [&](const Trigger&) { ++started; }), 11u);
  EXPECT_EQ(started, 0u);
  EXPECT_EQ(queue.consumer.refused(), 11u);
  EXPECT_EQ(queue.consumer.last_refusal().code(), absl::StatusCode::kInvalidArgument);
  queue.push({{transfer, 9, 1, epoch}}, 1, [] {});
  queue.consumer.take(64, [&](const Trigger&) { ++started; });
  EXPECT_EQ(started, 1u);
}

// Whatever a kernel writes into the slots.
TEST(TriggerFifo, SlotsOfAnyContentStartNothingOutside) {
  std::mt19937_64 random(1);
  Queue queue(16);
  for (uint32_t pieces : {0u, 1u, 7u}) queue.consumer.prepare(pieces);
  for (int round = 0; round < 20000; ++round) {
    for (uint64_t& word : queue.slots) {
      word = random();
      if (random() % 4 != 0) word &= 0x0000'0003'0000'0007ull;
    }
    queue.consumer.take(16, [](const Trigger& trigger) {
      ASSERT_LT(trigger.transfer, 3u);
      const uint64_t end = uint64_t{trigger.first} + trigger.count;
      ASSERT_LE(end, trigger.transfer == 2 ? 7u : trigger.transfer);
      ASSERT_GT(trigger.count, 0u);
      ASSERT_EQ(trigger.epoch, 0u);
    });
  }
  EXPECT_GT(queue.consumer.refused(), 1000u);
}

TEST(TriggerFifo, OverTheDevice) {
  FakeDriver fake;
  {
    const auto device = Device::open(FakeDriver::driver(), 0);
    const auto launcher = Launcher::load(**device, FakeDriver::image());
    const auto fifo = TriggerFifo::open(**device, 64);
    ASSERT_TRUE(fifo.ok()) << fifo.status();
    const uint32_t transfer = (*fifo)->consumer().prepare(50);
    const DevicePointer memory = fake.allocate(2 << 20);
    std::vector<Trigger> triggers;
    for (uint32_t i = 0; i < 50; ++i) triggers.push_back({transfer, i, 1, 0});
    fake.write(memory, {reinterpret_cast<const char*>(triggers.data()), 50 * sizeof(Trigger)});
    const kernels::PushTriggers arguments{(*fifo)->device_handle(),
                                          reinterpret_cast<const Trigger*>(memory),
                                          reinterpret_cast<uint32_t*>(memory + 4096), 50};
    {
      const Device::Current current(**device);
      ASSERT_TRUE(
          (*launcher)->push_triggers(arguments, 1, (*device)->stream(Direction::kToHost)).ok());
    }
    size_t started = 0;
    const auto count = [&](const Trigger&) { ++started; };
    EXPECT_EQ((*fifo)->consumer().take(64, count), 0u) << "the kernel has not run";
    fake.run_all();
    EXPECT_EQ((*fifo)->consumer().take(64, count), 50u);
    EXPECT_EQ(started, 50u);
    fake.free(memory);
  }
  EXPECT_THAT(fake.finish(), IsEmpty());
}

TEST(TriggerFifo, OnlyWhatWasPreparedIsRenewed) {
  Queue queue(8);
  EXPECT_TRUE(absl::IsNotFound(queue.consumer.renew(0).status()));
  const uint32_t transfer = queue.consumer.prepare(1);
  EXPECT_EQ(*queue.consumer.renew(transfer), 1u);
  EXPECT_TRUE(absl::IsNotFound(queue.consumer.renew(transfer + 1).status()));
  EXPECT_TRUE(absl::IsNotFound(queue.consumer.renew(UINT32_MAX).status()));
}

// Each takes memory of the device: there are as many as it has room for, and then one line.
TEST(TriggerFifo, AThousandAreAsManyAsTheDeviceHolds) {
  FakeDriver fake;
  {
    const auto device = *Device::open(FakeDriver::driver(), 0);
    std::vector<std::unique_ptr<TriggerFifo>> fifos;
    absl::Status refused;
    for (int i = 0; i < 1000 && refused.ok(); ++i) {
      auto fifo = TriggerFifo::open(*device, 1u << (i % 10));
      refused = fifo.status();
      if (fifo.ok()) fifos.push_back(*std::move(fifo));
    }
    EXPECT_EQ(fifos.size(), 128u);
    EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("2.0 MiB of device memory"));
    fifos.erase(fifos.begin() + 50);
    EXPECT_TRUE(TriggerFifo::open(*device).ok()) << "there is room again";
  }
  EXPECT_THAT(fake.finish(), IsEmpty());
}

// A driver that has no answer any more, and does not call the device lost either.
TEST(TriggerFifo, WhatIsNeverAnsweredIsGivenUp) {
  FakeDriver fake;
  {
    const auto device = *Device::open(FakeDriver::driver(), 0);
    fake.fail_next("cuStreamQuery", kUnknown, SIZE_MAX);
    const auto fifo = TriggerFifo::open(*device, 64);
    EXPECT_TRUE(absl::IsInternal(fifo.status())) << fifo.status();
    fake.run_all();
    fake.fail_next("cuStreamQuery", kUnknown, 1);
  }
  fake.finish();
}

TEST(TriggerFifo, BadSizesAndErrorsLeaveNothingBehind) {
  const auto open = [](uint64_t fail_call, uint64_t* calls) {
    FakeDriver fake({.fail_call = fail_call});
    {
      const auto device = Device::open(FakeDriver::driver(), 0);
      if (device.ok()) TriggerFifo::open(**device).IgnoreError();
      if (fail_call == 0) {
        // 2^31 slots would be 32 GiB of pinned memory.
        for (const uint32_t slots : {0u, 100u, 2 * TriggerFifo::kMostSlots, 1u << 31, ~0u}) {
          const absl::Status status = TriggerFifo::open(**device, slots).status();
          EXPECT_TRUE(absl::IsInvalidArgument(status)) << slots << ": " << status;
          EXPECT_THAT(std::string(status.message()),
                      HasSubstr("must be a power of two, and 1048576 at most"));
        }
        EXPECT_TRUE(TriggerFifo::open(**device, TriggerFifo::kMostSlots).ok());
      }
    }
    if (calls != nullptr) *calls = fake.calls();
    EXPECT_THAT(fake.finish(), IsEmpty()) << "call " << fail_call;
  };
  uint64_t calls = 0;
  open(0, &calls);
  for (uint64_t k = 2; k <= calls; ++k) open(k, nullptr);
}

}  // namespace
}  // namespace baton::gpudirect
