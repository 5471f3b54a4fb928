// Ranks that meet over sockets: all of them, too few, twice, with other keys, among strangers.
#include "collectives/launch/rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "collectives/launch/rendezvous_wire.h"
#include "transport/base/unique_fd.h"
#include "transport/net/endpoint.h"
#include "transport/net/handshake.h"

namespace baton::collectives {

using launch::FrameType;

namespace {

using testing::AllOf;
using testing::HasSubstr;
using RankInfos = absl::StatusOr<std::vector<RankInfo>>;

constexpr Time kPatient = std::chrono::minutes(2);
constexpr Time kHasty = std::chrono::milliseconds(200);

const ClusterKey& key() {
  static const ClusterKey kKey = *ClusterKey::from_bytes("the key of the rendezvous tests");
  return kKey;
}

RankInfo info_of(uint32_t rank, uint32_t ranks, uint64_t generation = 0) {
  RankInfo info{.rank = rank, .ranks = ranks, .generation = generation};
  info.version = kCollectivesVersion;
  info.pid = 1000 + rank;
  info.host = absl::StrCat("node", rank);
  info.worker_address = absl::StrCat("address of ", rank);
  info.payload = std::string(1 + rank, 'p');
  return info;
}

std::unique_ptr<RendezvousServer> serve(uint32_t ranks) {
  auto server = RendezvousServer::start(key(), "", 0, ranks);
  EXPECT_TRUE(server.ok()) << server.status();
  return *std::move(server);
}

std::future<RankInfos> acceptor(const RendezvousServer& server, const RankInfo& info,
                                Time patience = kPatient) {
  return std::async(std::launch::async, [address = server.address(), info, patience] {
    return meet(address, key(), info, patience);
  });
}

void expect_all_met(std::vector<std::future<RankInfos>>& ranks, uint64_t generation = 0) {
  for (auto& rank : ranks) {
    const RankInfos rank_infos = rank.get();
    ASSERT_TRUE(rank_infos.ok()) << rank_infos.status();
    ASSERT_EQ(ranks.size(), rank_infos->size());
    for (uint32_t i = 0; i < rank_infos->size(); ++i) {
      const RankInfo expected = info_of(i, static_cast<uint32_t>(ranks.size()), generation);
      EXPECT_EQ(expected.encode(), (*rank_infos)[i].encode());
    }
  }
}

void expect_generation_meets(const RendezvousServer& server, uint32_t ranks, uint64_t generation) {
  std::vector<std::future<RankInfos>> all;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    all.push_back(acceptor(server, info_of(rank, ranks, generation)));
  }
  expect_all_met(all, generation);
}

int dial(const RendezvousServer& server) {
  const auto to = net::resolve(server.address());
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(
      0, ::connect(fd, reinterpret_cast<const sockaddr*>(&to->front().storage), to->front().size));
  return fd;
}

bool send_all(int fd, std::string_view bytes) {
  return ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
}

// Blocks until the server has closed the connection.
std::string read_to_end(int fd) {
  std::string all;
  char bytes[4096];
  for (ssize_t n; (n = ::recv(fd, bytes, sizeof(bytes), 0)) > 0;) {
    all.append(bytes, static_cast<size_t>(n));
  }
  return all;
}

// A blocking connection that has proved itself and may say anything now.
UniqueFd friend_of(const RendezvousServer& server,
                   const HelloInfo& hello = launch::rendezvous_hello()) {
  UniqueFd fd(dial(server));
  net::Handshake handshake(net::Handshake::Role::kClient, key(), hello);
  while (true) {
    const std::string out(handshake.to_send());
    EXPECT_TRUE(send_all(fd.get(), out));
    handshake.sent(out.size());
    if (handshake.done()) return fd;
    std::string in(handshake.wanted(), '\0');
    EXPECT_EQ(static_cast<ssize_t>(in.size()), ::recv(fd.get(), in.data(), in.size(), MSG_WAITALL));
    const absl::Status good = handshake.receive(in);
    EXPECT_TRUE(good.ok()) << good;
    if (!good.ok()) return fd;
  }
}

TEST(Rendezvous, SixtyFourRanksMeetGenerationAfterGeneration) {
  const auto server = serve(64);
  for (uint64_t generation : {0, 1, 7}) expect_generation_meets(*server, 64, generation);
}

TEST(Rendezvous, OneRankMeetsItselfWithAndWithoutAServer) {
  const auto server = serve(1);
  for (const std::string& address : {server->address(), std::string()}) {
    const RankInfos rank_infos = meet(address, key(), info_of(0, 1), kPatient);
    ASSERT_TRUE(rank_infos.ok()) << rank_infos.status();
    EXPECT_EQ(info_of(0, 1).encode(), rank_infos->at(0).encode());
  }
}

TEST(Rendezvous, AServerOfNoNumberTakesThatOfWhoeverComes) {
  const auto server = serve(0);
  expect_generation_meets(*server, 3, 0);
  expect_generation_meets(*server, 2, 1);
}

TEST(Rendezvous, AServerOnEveryInterfaceSaysAnAddressThatWorks) {
  for (const char* host : {"*", "0.0.0.0"}) {
    const auto server = RendezvousServer::start(key(), host, 0, 2);
    ASSERT_TRUE(server.ok()) << server.status();
    expect_generation_meets(**server, 2, 0);
  }
}

TEST(Rendezvous, RanksWaitForAServerThatStartsLater) {
  std::string address;
  {
    const auto server = serve(1);
    address = server->address();  // free again
  }
  auto early =
      std::async(std::launch::async, [&] { return meet(address, key(), info_of(1, 2), kPatient); });
  const auto server = RendezvousServer::start_at(key(), address, 2);
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_EQ(address, (*server)->address());
  EXPECT_TRUE(meet(address, key(), info_of(0, 2), kPatient).ok());
  EXPECT_TRUE(early.get().ok());
}

TEST(Rendezvous, MissingRanksAreNamedAtEveryRankThatCame) {
  const auto server = serve(6);
  std::vector<std::future<RankInfos>> came;
  for (uint32_t rank : {0, 4}) came.push_back(acceptor(*server, info_of(rank, 6), kHasty));
  for (auto& rank : came) {
    const absl::Status why = rank.get().status();
    EXPECT_TRUE(absl::IsDeadlineExceeded(why)) << why;
    // One may have given up before the other came: who is missing is for the gathering's tests.
    EXPECT_THAT(std::string(why.message()), HasSubstr("of 6 did not come")) << why;
  }
  expect_generation_meets(*server, 6, 0);  // and nothing of that is left
}

TEST(Rendezvous, NobodyListensIsSaidWithTheAddress) {
  std::string address;
  {
    const auto server = serve(1);
    address = server->address();
  }
  const absl::Status why = meet(address, key(), info_of(0, 2), kHasty).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(why)) << why;
  EXPECT_THAT(std::string(why.message()), AllOf(HasSubstr(address), HasSubstr("refused")));
}

TEST(Rendezvous, AServerThatSaysNothingIsSaidSo) {
  const auto listener = net::listen_on("", 0, {});  // accepts by itself, and never answers
  ASSERT_TRUE(listener.ok()) << listener.status();
  const UniqueFd silent(*listener);
  const absl::Status why =
      meet(net::advertised(silent.get()), key(), info_of(0, 2), kHasty).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(why)) << why;
  EXPECT_THAT(std::string(why.message()), HasSubstr("says nothing"));
}

TEST(Rendezvous, BadArgumentsAreRefusedAtOnce) {
  const auto refused = [](const std::string& address, const RankInfo& info) {
    const absl::Status why = meet(address, key(), info, kPatient).status();
    EXPECT_TRUE(absl::IsInvalidArgument(why)) << why;
  };
  refused("127.0.0.1", info_of(0, 2));
  refused("", info_of(0, 2));
  refused("127.0.0.1:99999", info_of(0, 2));
  refused("127.0.0.1:4711", info_of(2, 2));
  RankInfo large = info_of(0, 2);
  large.payload.assign(launch::kMaxRankInfoBytes, 'x');
  refused("127.0.0.1:4711", large);
  EXPECT_FALSE(RendezvousServer::start(key(), "", 0, UINT32_MAX).ok());
}

TEST(Rendezvous, APortInUseIsSaidSo) {
  const auto server = serve(2);
  const auto second = RendezvousServer::start_at(key(), server->address(), 2);
  EXPECT_EQ(absl::StatusCode::kAlreadyExists, second.status().code()) << second.status();
}

TEST(Rendezvous, AnotherKeyIsUnauthenticatedAndHurtsNobody) {
  const auto server = serve(2);
  std::vector<std::future<RankInfos>> all;
  all.push_back(acceptor(*server, info_of(0, 2)));
  const auto other = ClusterKey::from_bytes("the key of another cluster");
  const absl::Status why = meet(server->address(), *other, info_of(1, 2), kPatient).status();
  EXPECT_TRUE(absl::IsUnauthenticated(why)) << why;
  all.push_back(acceptor(*server, info_of(1, 2)));
  expect_all_met(all);
}

TEST(Rendezvous, ARankThatCameTwiceIsToldAtBothPlaces) {
  const auto server = serve(3);
  RankInfo twin = info_of(1, 3);
  twin.pid = 77;
  twin.host = "elsewhere";
  auto first = acceptor(*server, info_of(1, 3));
  auto second = acceptor(*server, twin);
  for (auto* one : {&first, &second}) {
    const absl::Status why = one->get().status();
    EXPECT_TRUE(absl::IsInvalidArgument(why)) << why;
    EXPECT_THAT(std::string(why.message()),
                AllOf(HasSubstr("rank 1 came twice"), HasSubstr("1001 on node1"),
                      HasSubstr("77 on elsewhere")));
  }
}

TEST(Rendezvous, ARankThatLeavesWhileItWaitsMayComeAgain) {
  const auto server = serve(2);
  for (int time = 0; time < 3; ++time) {
    const UniqueFd fd = friend_of(*server);
    EXPECT_TRUE(send_all(
        fd.get(),
        launch::encode_frame(FrameType::kJoin, launch::encode_join({.info = info_of(0, 2)}))));
  }
  expect_generation_meets(*server, 2, 0);
}

TEST(Rendezvous, StrangersAndBadFriendsAreDroppedAndHurtNobody) {
  const auto server = serve(2);
  std::vector<std::future<RankInfos>> all;
  all.push_back(acceptor(*server, info_of(0, 2)));

  std::vector<UniqueFd> slow;  // say a little, and no more: more of them than there are places
  for (int i = 0; i < 100; ++i) {
    slow.emplace_back(dial(*server));
    EXPECT_TRUE(send_all(slow.back().get(), "BATON"));
  }
  const UniqueFd garbage(dial(*server));
  send_all(garbage.get(), std::string(4096, 'x'));
  read_to_end(garbage.get());

  const std::string join = launch::encode_join({.info = info_of(1, 2)});
  std::string oversize = launch::encode_frame(FrameType::kJoin, join);
  oversize[3] = 0x7f;  // of its length
  for (const std::string& bytes : {oversize, launch::encode_frame(FrameType::kRankInfo, join),
                                   launch::encode_frame(FrameType::kJoin, "short"),
                                   launch::encode_frame(static_cast<FrameType>(9), join),
                                   launch::encode_frame(FrameType::kJoin, join) + "and more"}) {
    const UniqueFd fd = friend_of(*server);
    send_all(fd.get(), bytes);
    EXPECT_EQ("", read_to_end(fd.get()));
  }
  {
    HelloInfo worker = launch::rendezvous_hello();
    worker.extra = "shm";
    const UniqueFd fd = friend_of(*server, worker);
    EXPECT_EQ("", read_to_end(fd.get()));
  }
  all.push_back(acceptor(*server, info_of(1, 2)));
  expect_all_met(all);
}

TEST(Rendezvous, AServerThatEndsClosesWhatIsOpen) {
  auto server = serve(2);
  const UniqueFd stranger(dial(*server));
  const UniqueFd waiting = friend_of(*server);
  send_all(waiting.get(),
           launch::encode_frame(FrameType::kJoin, launch::encode_join({.info = info_of(0, 2)})));
  server.reset();
  EXPECT_EQ("", read_to_end(stranger.get()));
  EXPECT_EQ("", read_to_end(waiting.get()));
}

TEST(Rendezvous, AServerThatEndsDeliversItsAnswers) {
  auto server = serve(16);
  std::vector<std::future<RankInfos>> all;
  for (uint32_t rank = 1; rank < 16; ++rank) {
    RankInfo large = info_of(rank, 16);
    large.payload.assign(60 << 10, 'x');  // together more than sockets buffer
    all.push_back(acceptor(*server, large));
  }
  EXPECT_TRUE(acceptor(*server, info_of(0, 16)).get().ok());
  server.reset();
  for (auto& rank : all) {
    const RankInfos rank_infos = rank.get();
    ASSERT_TRUE(rank_infos.ok()) << rank_infos.status();
    EXPECT_EQ(16, rank_infos->size());
  }
}

TEST(Rendezvous, ManyGroupsMayComeAtOnce) {
  // Generations that overtake each other: every rank comes to each, in its own time.
  const auto server = serve(4);
  std::vector<std::thread> ranks;
  std::atomic<int> met{0};
  for (uint32_t rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([&, rank] {
      for (uint64_t generation = 0; generation < 20; ++generation) {
        met += meet(server->address(), key(), info_of(rank, 4, generation), kPatient).ok();
      }
    });
  }
  for (auto& rank : ranks) rank.join();
  EXPECT_EQ(80, met);
}

}  // namespace
}  // namespace baton::collectives
