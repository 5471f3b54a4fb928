// Coming up: handles, connecting, accepting, closing, in every order.
#include "tests/nccl_net/rig.h"

namespace baton::nccl {
namespace {

TEST_P(Contract, DevicesHaveProperties) {
  int count = 0;
  ASSERT_EQ(net().devices(&count), Result::kSuccess);
  for (int i = 0; i < count; ++i) {
    PropertiesV12 properties;
    ASSERT_EQ(net().properties(i, &properties), Result::kSuccess);
    EXPECT_STRNE(properties.name, "");
    EXPECT_GT(properties.speed, 0);
    EXPECT_GE(properties.max_comms, 1024);
    EXPECT_GE(properties.max_receives, 1);
    EXPECT_NE(properties.pointers & kHostPointer, 0);
    EXPECT_EQ(properties.device_type, 0);
    EXPECT_GE(properties.max_p2p_bytes, size_t{1} << 30);
  }
}

TEST_P(BatonNet, AsksForNoDeviceThatIsNotThere) {
  PropertiesV12 properties;
  EXPECT_NE(net().properties(1'000, &properties), Result::kSuccess);
  EXPECT_NE(net().properties(-1, &properties), Result::kSuccess);
  HandleBuffer handle{};
  void* comm = nullptr;
  EXPECT_EQ(net().listen(1'000, handle.data(), &comm), Result::kInvalidArgument);
  EXPECT_EQ(comm, nullptr);
  EXPECT_THAT(NetLog::lines(LogLevel::kWarn), testing::Not(testing::IsEmpty()));
}

// And says once, in a line, what it chose.
TEST_P(BatonNet, IsOpenedForEveryCommunicator) {
  for (int i = 0; i < 3; ++i) EXPECT_EQ(net().init(), Result::kSuccess);
  EXPECT_THAT(NetLog::lines(LogLevel::kInfo),
              testing::ElementsAre(testing::HasSubstr("NET/Baton : using [")));
  EXPECT_EQ(net().finalize(), Result::kSuccess);
  Lane lane(rig, 100);
  lane.exchange({0, 100, 0}, 0);
}

// Promise(nccl): connect and accept never wait: there is no comm until there is one | each is
//   called alone first, and comes back with none
TEST_P(BatonNet, ConnectAndAcceptComeBackWithNothing) {
  Listener listener(rig);
  void *send = nullptr, *receive = nullptr;
  for (int i = 0; i < 50; ++i) {
    ASSERT_EQ(net().accept(listener.comm, &receive), Result::kSuccess);
    ASSERT_EQ(receive, nullptr);
  }
  for (int i = 0; i < 300; ++i) {
    ASSERT_EQ(net().connect(0, listener.handle.data(), &send), Result::kSuccess);
    ASSERT_EQ(send, nullptr) << "no call was accepted";
    rig.turn();
  }
  const NetRig::Ends ends = listener.meet();
  EXPECT_EQ(net().close_send(ends.send), Result::kSuccess);
  EXPECT_EQ(net().close_receive(ends.receive), Result::kSuccess);
}

TEST_P(BatonNet, AListenerThatIsClosedRefuses) {
  for (const int before : {0, 2'000}) {  // calls
    SCOPED_TRACE(before);
    NetLog::forget();
    Listener listener(rig);
    void* send = nullptr;
    for (int i = 0; i < before; ++i) {
      ASSERT_EQ(net().connect(0, listener.handle.data(), &send), Result::kSuccess);
      rig.turn();
    }
    listener.close();
    Result result = Result::kSuccess;
    until([&] {
      result = net().connect(0, listener.handle.data(), &send);
      return result != Result::kSuccess;
    });
    EXPECT_EQ(result, Result::kRemoteError);
    EXPECT_EQ(send, nullptr);
    const char* const why = before == 0 ? "nothing listens there" : "before it accepted";
    EXPECT_THAT(NetLog::lines(LogLevel::kWarn), testing::ElementsAre(testing::HasSubstr(why)));
  }
}

TEST_P(BatonNet, AListenerTakesSeveral) {
  Listener listener(rig);
  std::array<HandleBuffer, 5> copies;
  copies.fill(listener.handle);
  std::array<void*, 5> sends{};
  std::vector<void*> receives;
  until([&] {
    bool all = true;
    for (size_t i = 0; i < sends.size(); ++i) {
      if (sends[i] == nullptr) {
        EXPECT_EQ(net().connect(0, copies[i].data(), &sends[i]), Result::kSuccess);
      }
      all &= sends[i] != nullptr;
    }
    void* receive = nullptr;
    EXPECT_EQ(net().accept(listener.comm, &receive), Result::kSuccess);
    if (receive != nullptr) receives.push_back(receive);
    return (all && receives.size() == sends.size()) || HasFailure();
  });
  for (void* const send : sends) EXPECT_EQ(net().close_send(send), Result::kSuccess);
  for (void* const receive : receives) EXPECT_EQ(net().close_receive(receive), Result::kSuccess);
}

TEST_P(BatonNet, ManyComms) {
  std::vector<std::unique_ptr<Lane>> lanes;
  for (size_t i = 0; i < 40; ++i) lanes.push_back(std::make_unique<Lane>(rig, 2'000, i));
  std::vector<void*> receives, sends;
  for (const auto& lane : lanes) receives.push_back(lane->receive({{0, 2'000, 0}}));
  for (const auto& lane : lanes) sends.push_back(lane->send({0, 2'000, 0}));
  for (size_t i = 0; i < lanes.size(); ++i) {
    lanes[i]->finish(sends[i]);
    lanes[i]->finish(receives[i]);
    lanes[i]->expect({0, 2'000, 0}, 0);
  }
}

// --- bad input -----------------------------------------------------------------------------------

// Promise(nccl): A handle of another build, or one that was damaged, is an error that says so |
//   each byte of a handle is changed in turn, and the version
TEST_P(BatonNet, ADamagedHandleIsRefused) {
  const Listener listener(rig);
  void* send = nullptr;
  for (size_t i = 0; i < 104; ++i) {
    HandleBuffer damaged = listener.handle;
    damaged[i] = static_cast<char>(damaged[i] ^ 0x41);
    ASSERT_NE(net().connect(0, damaged.data(), &send), Result::kSuccess) << "byte " << i;
  }
  HandleBuffer other = listener.handle;
  other[100] = static_cast<char>(other[100] + 1);  // of the version
  EXPECT_EQ(net().connect(0, other.data(), &send), Result::kInvalidUsage);
  EXPECT_THAT(NetLog::lines(LogLevel::kWarn).back(),
              testing::HasSubstr("install the same Baton everywhere"));
}

TEST_P(BatonNet, ABufferThatWasChangedBetweenCallsIsRefused) {
  Listener listener(rig);
  HandleBuffer& handle = listener.handle;
  void* send = nullptr;
  ASSERT_EQ(net().connect(0, handle.data(), &send), Result::kSuccess);
  handle[113] = static_cast<char>(handle[113] ^ 1);  // of what connect() keeps there
  EXPECT_EQ(net().connect(0, handle.data(), &send), Result::kInvalidArgument);
}

TEST_P(BatonNet, NullsAreErrors) {
  HandleBuffer handle{};
  void* comm = nullptr;
  int done = 0;
  EXPECT_EQ(net().listen(0, nullptr, &comm), Result::kInvalidArgument);
  EXPECT_EQ(net().listen(0, handle.data(), nullptr), Result::kInvalidArgument);
  EXPECT_EQ(net().connect(0, nullptr, &comm), Result::kInvalidArgument);
  EXPECT_EQ(net().accept(nullptr, &comm), Result::kInvalidArgument);
  EXPECT_EQ(net().register_memory(nullptr, &done, 4, &comm), Result::kInvalidArgument);
  EXPECT_EQ(net().deregister(nullptr, nullptr), Result::kInvalidArgument);
  EXPECT_EQ(net().send(nullptr, nullptr, 0, 0, nullptr, &comm), Result::kInvalidArgument);
  EXPECT_EQ(net().receive_one(nullptr, nullptr, 0, 0, nullptr, &comm), Result::kInvalidArgument);
  EXPECT_EQ(net().test(nullptr, &done, nullptr), Result::kInvalidArgument);
  EXPECT_EQ(net().close_send(nullptr), Result::kInvalidArgument);
  EXPECT_EQ(net().close_receive(nullptr), Result::kInvalidArgument);
  EXPECT_EQ(net().close_listen(nullptr), Result::kInvalidArgument);
}

// --- closing in each state -----------------------------------------------------------------------

TEST_P(BatonNet, ACallThatIsGivenUpLeavesNothingInTheWay) {
  Listener listener(rig);
  void* send = nullptr;
  ASSERT_EQ(net().connect(0, listener.handle.data(), &send), Result::kSuccess);  // and never again
  Lane lane(rig, 1'000);
  lane.exchange({0, 1'000, 0}, 0);
}

TEST_P(Contract, CommsThatWereNeverUsedAreClosedInAnyOrder) {
  for (const bool receiver_first : {false, true}) {
    const NetRig::Ends ends = rig.connect();
    if (receiver_first) {
      EXPECT_EQ(net().close_receive(ends.receive), Result::kSuccess);
    }
    EXPECT_EQ(net().close_send(ends.send), Result::kSuccess);
    if (!receiver_first) {
      EXPECT_EQ(net().close_receive(ends.receive), Result::kSuccess);
    }
  }
}

}  // namespace
}  // namespace baton::nccl
