// What comes from a peer to a link, and could be anything.
#include "collectives/executor/transfer_link.h"
#include "tests/communicator/group.h"
#include "tests/test.h"

namespace baton::collectives::executor {
namespace {

using testing::HasSubstr;

// A link whose peer says what the test wants.
class LinkInput : public testing::Test {
 protected:
  static constexpr size_t kMost = 256 << 10;

  void SetUp() override {
    WorkerOptions options;
    options.providers = {"shm"};
    options.key = test_key();
    worker_ = *Worker::create(options);
    memory_ = *Memory::create(*worker_, {});
    block_ = *memory_->allocate(4096);
    renew();
  }
  void TearDown() override {
    link_.reset();
    memory_->free(block_);
    memory_.reset();
  }
  void renew() { link_ = *TransferLink::create(*worker_, *memory_, PeerId{}, kMost); }
  std::string region() const { return worker_->remote_region(block_.region)->encode(); }
  void comes(Packet::Kind kind, const std::string& behind) {
    Packet packet;
    packet.kind = kind;
    link_->came(std::string(reinterpret_cast<const char*>(&packet), sizeof packet) + behind);
  }
  static std::string bytes_of(const TransferLink::Grant& grant) {
    return {reinterpret_cast<const char*>(&grant), sizeof grant};
  }
  // Those of a peer.
  TransferLink::Slots slots() {
    TransferLink::Slots out;
    out.region = *worker_->remote_region(block_.region);
    out.region.size = 64 << 20;
    out.slot_bytes = TransferLink::kMostSlotBytes;
    const CounterId counter = *worker_->allocate_counter();
    for (auto& lane : out.arrived) lane.fill(worker_->remote_counter(counter));
    return out;
  }

  std::unique_ptr<Worker> worker_;
  std::unique_ptr<Memory> memory_;
  Block block_;
  std::unique_ptr<TransferLink> link_;
};

// Promise(collectives): What a peer says of a link's memory is checked before it is used | slots
//   and grants of every wrong form, each told
TEST_F(LinkInput, SlotsOfAWrongFormFailTheLink) {
  struct Case {
    const char* says;
    std::function<std::string()> make;
  };
  const auto changed = [&](const std::function<void(TransferLink::Slots&)>& change) {
    return [=, this] {
      TransferLink::Slots out = slots();
      change(out);
      return out.encode();
    };
  };
  constexpr size_t kRegion = RemoteRegion::kEncodedBytes;
  constexpr size_t kCounter = RemoteCounter::kEncodedBytes;
  const Case cases[] = {
      {"", changed([](auto&) {})},
      {"wrong length", [&] { return slots().encode() + "x"; }},
      {"wrong length", [&] { return slots().encode().substr(1); }},
      {"wrong length", [] { return std::string(); }},
      {"RemoteRegion", [&] { return slots().encode().replace(0, kRegion, kRegion, '\0'); }},
      {"RemoteCounter",
       [&] { return slots().encode().replace(kRegion + kCounter, kCounter, kCounter, '\0'); }},
      {"outside their region", changed([](auto& of) { of.offset = of.region.size + 1; })},
      {"outside their region", changed([](auto& of) { of.offset = SIZE_MAX; })},
      {"outside their region", changed([](auto& of) { of.offset = of.region.size - (1 << 20); })},
      {"outside their region", changed([](auto& of) { of.slot_bytes = SIZE_MAX; })},
      {"outside their region", changed([](auto& of) { of.slot_bytes = 0; })},
  };
  for (const Case& c : cases) {
    renew();
    comes(Packet::Kind::kSlots, c.make());
    EXPECT_EQ(link_->status().ok(), *c.says == 0) << c.says << ": " << link_->status();
    EXPECT_THAT(text(link_->status()), HasSubstr(c.says));
  }
}

TEST_F(LinkInput, GrantsOfAWrongFormFailTheLink) {
  constexpr size_t kKey = RemoteRegion::kEncodedBytes;
  struct Case {
    const char* says;
    std::string grants;
  };
  const Case cases[] = {
      {"", region() + bytes_of({.bytes = 100, .number = 1})},
      {"", std::string(kKey, '\0') + bytes_of({.bytes = 0, .number = 1})},
      {"", region() + bytes_of({.bytes = 100, .number = 60000})},  // of another call
      {"", region() + bytes_of({.bytes = 100, .number = 0})},
      {"wrong length", std::string(kKey - 1, 'x')},
      {"RemoteRegion", std::string(kKey, '\0') + bytes_of({.bytes = 1, .number = 1})},
      {"lane that does not exist",
       region() + bytes_of({.bytes = 100, .number = 1, .lane = kLanes})},
      {"lane that does not exist",
       region() + bytes_of({.bytes = 100, .number = 1}) + bytes_of({.number = 1, .lane = 65535})},
  };
  for (const Case& c : cases) {
    renew();
    comes(Packet::Kind::kPlaces, c.grants);
    EXPECT_EQ(link_->status().ok(), *c.says == 0) << c.says << ": " << link_->status();
    EXPECT_THAT(text(link_->status()), HasSubstr(c.says));
  }
}

TEST_F(LinkInput, PlacesOfAWrongFormFailTheLink) {
  struct Case {
    const char* says;
    std::string place;
  };
  const Case cases[] = {
      {"another form", ""},
      {"another form", region()},
      {"another form", region() + std::string(16, '\0')},
      {"RemoteRegion", std::string(RemoteRegion::kEncodedBytes + 8, '\0')},
  };
  for (const Case& c : cases) {
    renew();
    Link::Place place;
    ASSERT_TRUE(place.set({reinterpret_cast<const std::byte*>(c.place.data()), c.place.size()}));
    EXPECT_EQ(link_->write(block_.data, 100, place, Packet{}), 0u);
    EXPECT_THAT(text(link_->status()), HasSubstr(c.says));
  }
}

TEST_F(LinkInput, WhatIsTooShortOrOfNoLaneIsPassedOver) {
  for (size_t bytes = 0; bytes < sizeof(Packet); ++bytes) {
    // Where it ends is where the memory ends.
    EXPECT_EQ(link_->came(std::string(bytes, '\x06')), std::nullopt);
  }
  Packet packet;
  absl::Span<const std::byte> behind;
  EXPECT_FALSE(link_->hear(packet, behind));
  TransferLink::Announcement theirs;
  for (const uint32_t lane : {kLanes, UINT32_MAX}) {
    theirs.lane = lane;
    theirs.given_back = 1;
    link_->announced(theirs);
  }
  EXPECT_EQ(link_->status(), absl::OkStatus());
}

TEST_F(LinkInput, OffersOfAWrongFormAreRefused) {
  const std::string good = link_->offer().encode();
  EXPECT_TRUE(TransferLink::Offer::decode(good).ok());
  for (const std::string& bad :
       {std::string(), good + "x", good.substr(1), std::string(good.size(), '\0')}) {
    const auto offer = TransferLink::Offer::decode(bad);
    EXPECT_TRUE(absl::IsInvalidArgument(offer.status())) << offer.status();
  }
}

}  // namespace
}  // namespace baton::collectives::executor
