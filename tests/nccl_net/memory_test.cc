// Registered memory: counted, under traffic, freed too early, and what lies outside of it.
#include <fcntl.h>

#include "tests/nccl_net/rig.h"

namespace baton::nccl {
namespace {

TEST_P(BatonNet, RegistrationsAreCounted) {
  Lane lane(rig, 4'096);
  void *again = nullptr, *third = nullptr;
  ASSERT_EQ(net().register_memory(lane.ends.receive, lane.in.data(), 4'096, &again),
            Result::kSuccess);
  ASSERT_EQ(net().register_memory(lane.ends.receive, lane.in.data(), 4'096, &third),
            Result::kSuccess);
  EXPECT_EQ(again, lane.in_memory);
  EXPECT_EQ(net().deregister(lane.ends.receive, again), Result::kSuccess);
  EXPECT_EQ(net().deregister(lane.ends.receive, third), Result::kSuccess);
  lane.exchange({0, 4'096, 0}, 0);
}

TEST_P(BatonNet, SendsOutsideOfRegisteredMemoryAreErrors) {
  Lane lane(rig, 4'096);
  void* const receive = lane.receive({{0, 4'096, 0}});
  until([&] {
    void* request = nullptr;
    // One byte more than there is.
    return net().send(lane.ends.send, lane.out.data() + 1, 4'096, 0, lane.out_memory, &request) ==
           Result::kInvalidArgument;
  });
  void* request = nullptr;
  EXPECT_EQ(net().send(lane.ends.send, lane.out.data(), 4'096, 0, nullptr, &request),
            Result::kInvalidArgument);
  EXPECT_EQ(request, nullptr);
  // Nothing has been taken by that.
  lane.finish(lane.send({0, 4'096, 0}));
  lane.finish(receive);
  lane.expect({0, 4'096, 0}, 0);
}

TEST_P(BatonNet, ReceivesOutsideOfRegisteredMemoryAreErrors) {
  Lane lane(rig, 4'096);
  void* request = nullptr;
  for (void* const memory : {lane.in_memory, static_cast<void*>(nullptr)}) {
    EXPECT_EQ(net().receive_one(lane.ends.receive, lane.in.data() + 1, 4'096, 0, memory, &request),
              Result::kInvalidArgument);
  }
  EXPECT_EQ(request, nullptr);
  lane.exchange({0, 4'096, 0}, 0);
}

TEST_P(BatonNet, GroupsOfNoneOrNineOrAThousandAreErrors) {
  Lane lane(rig, 1'000);
  for (const int count : {0, -1, 9, 1'000}) {
    std::array<void*, 9> data, memory;  // no more is looked at
    data.fill(lane.in.data());
    memory.fill(lane.in_memory);
    std::array<size_t, 9> sizes{};
    std::array<int, 9> tags{};
    void* request = nullptr;
    EXPECT_EQ(net().receive(lane.ends.receive, count, data.data(), sizes.data(), tags.data(),
                            memory.data(), &request),
              Result::kInvalidArgument)
        << count;
    EXPECT_EQ(request, nullptr);
  }
}

// Promise(nccl): Negative and huge sizes are errors | through v8's ints and through the others
TEST_P(BatonNet, NegativeAndHugeSizesAreErrors) {
  Lane lane(rig, 1'000);
  void* request = nullptr;
  for (const size_t size :
       {static_cast<size_t>(-1), static_cast<size_t>(-4'096), (size_t{1} << 40) + 1}) {
    if (GetParam().version == 8 && static_cast<int>(size) >= 0) continue;  // an int cannot say it
    EXPECT_EQ(
        net().receive_one(lane.ends.receive, lane.in.data(), size, 0, lane.in_memory, &request),
        Result::kInvalidArgument);
    EXPECT_EQ(request, nullptr);
  }
  void* const receive = lane.receive({{0, 1'000, 0}});
  until([&] {
    return net().send(lane.ends.send, lane.out.data(), static_cast<size_t>(-1), 0, lane.out_memory,
                      &request) == Result::kInvalidArgument;
  });
  void* memory = nullptr;
  EXPECT_EQ(net().register_memory(lane.ends.send, lane.out.data(), size_t{1} << 41, &memory),
            Result::kInvalidArgument);
  EXPECT_EQ(net().register_memory(lane.ends.send, lane.out.data(), 100, &memory, 99),
            Result::kInvalidArgument);
  lane.finish(lane.send({0, 1'000, 0}));
  lane.finish(receive);
}

TEST_P(BatonNet, MemoryThatIsNotThereIsNotRegistered) {
  Lane lane(rig, 1'000);
  Pages gone(64 << 10);
  void* const where = gone.data();
  gone.drop();
  void* memory = nullptr;
  EXPECT_NE(net().register_memory(lane.ends.send, where, 64 << 10, &memory), Result::kSuccess);
  EXPECT_EQ(memory, nullptr);
}

TEST_P(BatonNet, NoBytesNeedNoMemory) {
  Lane lane(rig, 100);
  void* memory = nullptr;
  ASSERT_EQ(net().register_memory(lane.ends.send, lane.out.data(), 0, &memory), Result::kSuccess);
  void *receive = nullptr, *send = nullptr;
  until([&] {
    EXPECT_EQ(net().receive_one(lane.ends.receive, nullptr, 0, 6, nullptr, &receive),
              Result::kSuccess);
    return receive != nullptr || HasFailure();
  });
  until([&] {
    EXPECT_EQ(net().send(lane.ends.send, nullptr, 0, 6, nullptr, &send), Result::kSuccess);
    return send != nullptr || HasFailure();
  });
  lane.finish(send);
  int received = -1;
  lane.finish(receive, &received);
  EXPECT_EQ(received, 0);
  EXPECT_EQ(net().deregister(lane.ends.send, memory), Result::kSuccess);
}

// NCCL registers on one thread while another sends and receives on the same comm.
TEST_P(BatonNet, RegistrationUnderTraffic) {
  constexpr size_t kStep = 20'000;
  Lane lane(rig, 8 * kStep);
  Traffic traffic(lane, steady(kSanitized ? 200 : 1'000, kStep));
  Pages others(1 << 20);
  const auto churn = [&](size_t i) {
    for (void* const comm : {lane.ends.send, lane.ends.receive}) {
      void* memory = nullptr;
      EXPECT_EQ(net().register_memory(comm, others.data() + i % 16 * 4'096, 4'096 + i % 3, &memory),
                Result::kSuccess);
      EXPECT_EQ(net().deregister(comm, memory), Result::kSuccess);
    }
  };
  if (!rig.threads()) {
    traffic.on_group = churn;
    return run(rig, {&traffic});
  }
  std::atomic<bool> stop{false};
  std::thread service([&] {
    for (size_t i = 0; !stop; ++i) churn(i);
  });
  run(rig, {&traffic});
  stop = true;
  service.join();
}

TEST_P(BatonNet, ADescriptorThatIsNoneIsAnError) {
  Lane lane(rig, 4'096);
  void* memory = nullptr;
  EXPECT_EQ(net().register_dma_buf(lane.ends.send, lane.out.data(), 4'096, 0, -1, &memory),
            Result::kInvalidArgument);
  EXPECT_NE(net().register_dma_buf(lane.ends.send, lane.out.data(), 4'096, 0, 100'000, &memory),
            Result::kSuccess);
  EXPECT_EQ(memory, nullptr);
  // Open, and no dma-buf: what is taken is of no harm.
  const int fd = open("/dev/null", O_RDWR | O_CLOEXEC);
  if (net().register_dma_buf(lane.ends.send, lane.out.data(), 4'096, 0, fd, &memory) ==
      Result::kSuccess) {
    EXPECT_EQ(net().deregister(lane.ends.send, memory), Result::kSuccess);
  }
  close(fd);
  lane.exchange({0, 4'096, 0}, 0);
}

// Promise(nccl): A buffer that is freed while it is registered costs its comm an error and nothing
//   else | what a send reads from and a receive lands in is unmapped; both ends hear of it, others
//   go on
TEST_P(BatonNet, ABufferThatWasFreedIsAnErrorAtBothEnds) {
  if (GetParam().provider == "sim" || GetParam().provider == "verbs_fake") {
    GTEST_SKIP() << "an adapter pins what is registered; this one is simulated by memcpy";
  }
  for (const bool source : {true, false}) {
    for (const size_t before : {0, 1}) {
      constexpr size_t kBytes = 256 << 10;
      Lane lane(rig, kBytes), other(rig, 1'000);
      for (size_t i = 0; i < before; ++i) lane.exchange({0, kBytes, 0}, 0);
      void* const receive = lane.receive({{0, kBytes, 0}});
      std::byte* const out = lane.out.data();
      (source ? lane.out : lane.in).drop();
      void* send = nullptr;
      until([&] {
        EXPECT_EQ(net().send(lane.ends.send, out, kBytes, 0, lane.out_memory, &send),
                  Result::kSuccess);
        return send != nullptr || HasFailure();
      });
      EXPECT_NE(lane.fails(send), Result::kSuccess);
      const Result received = lane.fails(receive);
      EXPECT_TRUE(source ? received == Result::kRemoteError : received != Result::kSuccess);
      EXPECT_THAT(NetLog::lines(LogLevel::kWarn), testing::Not(testing::IsEmpty()));
      other.exchange({0, 1'000, 0}, 0);
    }
  }
}

TEST_P(BatonNet, WhatWasDeregisteredIsNotWritten) {
  Lane lane(rig, 100'000);
  void* const receive = lane.receive({{0, 100'000, 0}});
  EXPECT_EQ(net().deregister(lane.ends.receive, lane.in_memory), Result::kSuccess);
  lane.in_memory = nullptr;
  void* const send = lane.send({0, 100'000, 0});
  EXPECT_NE(lane.fails(send), Result::kSuccess);
  EXPECT_EQ(lane.fails(receive), Result::kRemoteError);
  EXPECT_TRUE(lane.untouched());
}

TEST_P(BatonNet, WhatWasDeregisteredIsNotTouchedAfterwards) {
  for (const bool sender : {false, true}) {
    for (const size_t before : {0, 1}) {
      constexpr size_t kBytes = 100'000;
      Lane lane(rig, kBytes);
      for (size_t i = 0; i < before; ++i) lane.exchange({0, kBytes, 0}, 0);
      lane.wipe();
      void* const receive = lane.receive({{0, kBytes, 0}});
      lane.send({0, kBytes, 0});
      void*& memory = sender ? lane.out_memory : lane.in_memory;
      EXPECT_EQ(net().deregister(sender ? lane.ends.send : lane.ends.receive, memory),
                Result::kSuccess);
      memory = nullptr;
      const std::vector<std::byte> then(lane.in.data(), lane.in.data() + kBytes);
      const Result result = lane.fails(receive);
      if (!sender) {
        EXPECT_EQ(std::memcmp(lane.in.data(), then.data(), kBytes), 0);
      }
      if (result == Result::kSuccess) {
        lane.expect({0, kBytes, 0}, 0);
      } else {
        EXPECT_EQ(result, Result::kRemoteError);
      }
    }
  }
}

// What a device polls is there without a test().
TEST_P(BatonNet, PolledBytesLandWithoutATest) {
  constexpr size_t kStep = 5'000, kSteps = 8;
  Lane lane(rig, kStep * kSteps);
  std::vector<void*> receives;
  for (size_t i = 0; i < kSteps; ++i)
    receives.push_back(lane.receive({{i * kStep, kStep, 0}}, true));
  for (size_t i = 0; i < kSteps; ++i) {
    lane.finish(lane.send({i * kStep, kStep, 0}));
    lane.expect({i * kStep, kStep, 0}, i * kStep);
  }
  for (size_t i = kSteps; i-- > 0;) lane.finish(receives[i]);
}

}  // namespace
}  // namespace baton::nccl
