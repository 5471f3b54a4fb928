// Which address of a port is used, and why.
#include "verbs/device/gid.h"

#include "tests/test.h"
#include "tests/verbs/fake/fake_verbs.h"

namespace baton::verbs {
namespace {

using testing::HasSubstr;

ibv_gid_entry entry(uint32_t index, ibv_gid_type type, std::initializer_list<uint8_t> tail,
                    bool ipv4) {
  ibv_gid_entry made{};
  made.gid_index = index;
  made.port_num = 1;
  made.gid_type = type;
  if (ipv4) made.gid.raw[10] = made.gid.raw[11] = 0xff;
  std::copy(tail.begin(), tail.end(), made.gid.raw + 16 - tail.size());
  return made;
}

TEST(Gid, RoceV2OverIpv4ComesFirst) {
  const auto choice = must(choose_gid(FakeVerbs::default_gids(3), -1, 0xff));
  EXPECT_EQ(choice.index, 3);
  EXPECT_EQ(choice.family, Family::kIpv4);
  EXPECT_THAT(choice.reason, HasSubstr("RoCEv2 IPv4 10.0.3.1"));
}

TEST(Gid, OnlyFamiliesThatThePeerHas) {
  const auto gids = FakeVerbs::default_gids(0);
  const auto link_local = must(choose_gid(gids, -1, static_cast<uint8_t>(Family::kLinkLocal)));
  EXPECT_EQ(link_local.index, 1);
  const auto none = choose_gid(gids, -1, static_cast<uint8_t>(Family::kIpv6));
  EXPECT_EQ(none.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(none.status().message()), HasSubstr("peer"));
}

TEST(Gid, LoopbackAndContainerBridgesComeLast) {
  const std::vector<ibv_gid_entry> gids = {entry(0, IBV_GID_TYPE_ROCE_V2, {127, 0, 0, 1}, true),
                                           entry(1, IBV_GID_TYPE_ROCE_V2, {172, 17, 0, 1}, true),
                                           entry(2, IBV_GID_TYPE_ROCE_V2, {192, 168, 0, 9}, true)};
  EXPECT_EQ(choose_gid(gids, -1, 0xff)->index, 2);
  EXPECT_EQ(choose_gid(absl::MakeSpan(gids).first(1), -1, 0xff)->index, 0);
}

TEST(Gid, ChoosesTheGidOnThePeersSubnet) {
  const auto at = [](uint8_t net, uint8_t host) {
    return entry(net, IBV_GID_TYPE_ROCE_V2, {10, 0, net, host}, true);
  };
  const std::vector<ibv_gid_entry> own = {at(1, 1), at(2, 1), at(3, 1)};
  const std::vector<ibv_gid> peer = {at(7, 9).gid, at(2, 9).gid};
  EXPECT_EQ(choose_gid(own, -1, 0xff)->index, 1);
  EXPECT_EQ(choose_gid(own, -1, 0xff, peer)->index, 2);
  EXPECT_EQ(choose_gid(own, 3, 0xff, peer)->index, 3) << "what is set stands";
  // A container's bridge is everywhere, and leads nowhere.
  const auto bridge = entry(0, IBV_GID_TYPE_ROCE_V2, {172, 17, 0, 1}, true);
  const std::vector<ibv_gid_entry> with_bridge = {bridge, at(1, 1)};
  const std::vector<ibv_gid> peer_with_bridge = {at(9, 9).gid, bridge.gid};
  EXPECT_EQ(choose_gid(with_bridge, -1, 0xff, peer_with_bridge)->index, 1);
}

TEST(Gid, ThePeerIsToldOfTheBestOnce) {
  const auto told = best_gids(FakeVerbs::default_gids(4), 4);
  ASSERT_EQ(told.size(), 2u) << "each is there as RoCEv1 too";
  EXPECT_EQ(gid_text(told[0]), "10.0.4.1");
  EXPECT_EQ(best_gids(FakeVerbs::default_gids(4), 1).size(), 1u);
}

TEST(Gid, AnIndexThatIsSetIsTakenOrRefused) {
  const auto gids = FakeVerbs::default_gids(0);
  EXPECT_EQ(choose_gid(gids, 0, 0)->family, Family::kRoceV1);
  const auto beyond = choose_gid(gids, 17, 0xff);
  EXPECT_EQ(beyond.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(beyond.status().message()), HasSubstr("17"));
  EXPECT_FALSE(choose_gid({}, -1, 0xff).ok());
}

TEST(Gid, SubnetsAreTold) {
  const auto a = FakeVerbs::default_gids(0)[3].gid;
  ibv_gid neighbour = a;
  neighbour.raw[15] = 200;
  EXPECT_EQ(shared_prefix(a, neighbour), 120);
  EXPECT_LT(shared_prefix(a, FakeVerbs::default_gids(1)[3].gid), 120);
}

}  // namespace
}  // namespace baton::verbs
