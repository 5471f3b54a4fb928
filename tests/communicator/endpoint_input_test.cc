// What comes from another endpoint, and could be anything: its worker says what the test wants.
#include "collectives/internal/endpoint_impl.h"
#include "collectives/internal/mesh.h"
#include "collectives/rendezvous.h"
#include "tests/communicator/endpoints.h"

namespace baton {
namespace {

using collectives::internal::ControlMessage;
using testing::HasSubstr;

// An endpoint, and another one of which only the worker is driven.
class EndpointInput : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    endpoints_ = open_endpoints(2, GetParam());
    handles_ = handles_of(endpoints_);
  }
  // The group has been made here, and its ranks are connected.
  std::unique_ptr<Communicator> make(uint64_t uuid) {
    GroupOptions group = group_options(uuid);
    group.start_timeout = kNever;
    auto comm = must(Communicator::create(endpoints_[0], handles_, group));
    until([&] { return peer_.generation != 0; }, [&] { turn(); });
    return comm;
  }
  void turn() {
    endpoints_[0]->progress();
    stranger().progress();
    while (const auto event = stranger().next_peer_event()) {
      if (event->kind == PeerEvent::Kind::kUp) peer_ = event->peer;
      if (event->kind == PeerEvent::Kind::kDown) down_ = true;
    }
    for (Notification note; stranger().next_notification(note);) heard_.push_back(note.payload);
  }
  Worker& stranger() { return endpoints_[1]->worker(); }
  void say(const std::string& text) {
    ASSERT_EQ(stranger().notify_detached(peer_, text), absl::OkStatus());
  }
  void say(uint64_t group, ControlMessage kind, const std::string& body) {
    say(std::string(reinterpret_cast<const char*>(&group), sizeof group) + static_cast<char>(kind) +
        body);
  }
  // Until all that was said has been heard.
  void settle() {
    until([&] { return stranger().stats().open_transfers == 0; }, [&] { turn(); });
    for (int i = 0; i < 10; ++i) turn();
  }
  static std::string hello(uint32_t version, uint64_t offset, const std::string& region) {
    struct {
      uint32_t version, unused;
      uint64_t offset;
    } head{version, 0, offset};
    return std::string(reinterpret_cast<const char*>(&head), sizeof head) + region;
  }
  static std::string verdict() {
    return collectives::internal::encode_verdict(absl::InternalError("enough"), 1);
  }

  std::vector<std::shared_ptr<Endpoint>> endpoints_;
  std::vector<Handle> handles_;
  PeerId peer_;
  bool down_ = false;
  std::vector<std::string> heard_;
};

// Promise(collectives): What another process says of itself is checked before it is used | hellos
//   of another version, of no region, too short; places outside of its memory
TEST_P(EndpointInput, AHelloOfAWrongFormBreaksTheGroupsThatNeedIt) {
  struct Case {
    const char* says;
    uint32_t version;
    std::string region;
  };
  const Case cases[] = {
      {"speaks version 77 of the collectives", 77, ""},
      {"not a RemoteRegion", collectives::kCollectivesVersion, ""},
      {"not a RemoteRegion", collectives::kCollectivesVersion, std::string(48, '\0')},
  };
  for (const Case& c : cases) {
    SetUp();
    peer_ = {};
    auto comm = make(7);
    say(0, ControlMessage::kHello, hello(c.version, 0, c.region));
    until([&] { return comm->state() == GroupState::kBroken; }, [&] { turn(); });
    EXPECT_THAT(text(comm->status()), HasSubstr(c.says));
    EXPECT_THAT(text(comm->status()), HasSubstr("rank 1"));
  }
}

TEST_P(EndpointInput, WhatIsTooShortIsPassedOver) {
  auto comm = make(7);
  for (size_t bytes = 0; bytes <= sizeof(uint64_t); ++bytes) say(std::string(bytes, '\0'));
  for (size_t bytes = 0; bytes < 16; ++bytes) {
    say(0, ControlMessage::kHello, std::string(bytes, '\0'));
  }
  for (const char kind : std::string("?\x00\xff", 3)) {
    say(0, static_cast<ControlMessage>(kind), "what?");
    say(7, static_cast<ControlMessage>(kind), "what?");
  }
  settle();
  EXPECT_EQ(comm->state(), GroupState::kStarting);
}

// Where memory can be mapped.
TEST_P(EndpointInput, ATableOutsideOfItsRegionIsNotRead) {
  if (GetParam() != "shm") GTEST_SKIP() << "no memory is mapped over " << GetParam();
  constexpr uint64_t kRegion = 2 << 20;
  struct Case {
    const char* can;
    uint64_t offset;
  };
  const Case cases[] = {{"0", kRegion + 64}, {"0", ~uint64_t{63}}, {"0", kRegion - 64}, {"1", 0}};
  for (const Case& c : cases) {
    SCOPED_TRACE(c.offset);
    SetUp();
    peer_ = {};
    heard_.clear();
    auto own = MemoryPool::create(stranger(), {.slab_bytes = 2 << 20});
    const Block there = *(*own)->allocate(4096);
    const RemoteRegion key = *stranger().remote_region(there.region);
    auto group = make(7);
    say(0, ControlMessage::kHello, hello(collectives::kCollectivesVersion, c.offset, key.encode()));
    const std::string wanted = std::string(8, '\0') + 'v' + c.can;
    until([&] { return std::count(heard_.begin(), heard_.end(), wanted) > 0; }, [&] { turn(); });
    group.reset();
    (*own)->free(there);
  }
}

// Promise(collectives): What strangers say of groups that a process never makes takes bounded
//   memory | the oldest groups' messages, and of one group the latest, are dropped
TEST_P(EndpointInput, WhatIsKeptForGroupsToComeIsBounded) {
  auto comm = make(1 << 20);
  // All but the first of 1,025 groups are kept, and 4,096 messages of each.
  for (uint64_t group = 1; group <= 1025; ++group) {
    for (int i = 0; i < (group == 3 ? 4096 : 0); ++i) {
      say(group, ControlMessage::kLinked, "");
      if (i % 100 == 0) settle();
    }
    say(group, ControlMessage::kAbort, verdict());
    if (group % 100 == 0) settle();
  }
  settle();
  struct Case {
    uint64_t group;
    bool told;
  };
  for (const Case& c : {Case{1, false}, Case{3, false}, Case{2, true}, Case{1025, true}}) {
    auto late = make(c.group);
    settle();
    EXPECT_EQ(late->state() == GroupState::kBroken, c.told) << c.group << ": " << late->status();
  }
}

INSTANTIATE_TEST_SUITE_P(Providers, EndpointInput, testing::Values("shm", "tcp"),
                         [](const auto& param) { return param.param; });

// --- callers -------------------------------------------------------------------------------------

TEST(EndpointCallers, OnlyWhatWasAllocatedIsFreed) {
  auto endpoint = open_endpoints(1, "shm").front();
  const CommBuffer buffer = *endpoint->allocate(4096);
  endpoint->free({});
  endpoint->free({buffer.data + 64, 4096, buffer.index});
  endpoint->free({buffer.data, 4096, buffer.index + 1});
  endpoint->free({buffer.data, 4096, UINT32_MAX});
  const CommBuffer other = *endpoint->allocate(4096);
  EXPECT_NE(other.data, buffer.data);
  endpoint->free(buffer);
  endpoint->free(buffer);
  const CommBuffer again = *endpoint->allocate(4096), next = *endpoint->allocate(4096);
  EXPECT_NE(again.data, next.data) << "what was freed twice is given out twice";
}

TEST(EndpointCallers, AProcessThatCannotBeReachedIsNamed) {
  const auto endpoints = open_endpoints(2, "shm");
  std::vector<Handle> handles = handles_of(endpoints);
  // The one with the lower number calls; the other one waits for that a second, and then calls.
  handles[1] = *Handle::decode(with_byte_raised(handles[1], 20));  // of another machine
  auto comm = must(Communicator::create(endpoints[0], handles, group_options(7)));
  until([&] { return comm->state() == GroupState::kBroken; }, [&] { endpoints[0]->progress(); });
  EXPECT_THAT(text(comm->status()), HasSubstr("rank 1"));
  EXPECT_THAT(text(comm->status()), HasSubstr("both need tcp"));
}

}  // namespace
}  // namespace baton
