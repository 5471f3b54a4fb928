// Ranks that meet over sockets: all of them, too few, twice, with other keys, among strangers.
#include "collectives/rendezvous.h"

#include <sys/eventfd.h>

#include <future>

#include "collectives/launch/rendezvous_service.h"
#include "collectives/launch/rendezvous_wire.h"
#include "tests/fails_with.h"
#include "tests/held_port.h"
#include "tests/test.h"
#include "tests/until.h"
#include "transport/base/unique_fd.h"
#include "transport/net/endpoint.h"
#include "transport/net/handshake.h"
#include "transport/net/interfaces.h"
#include "transport/net/seal.h"

namespace baton::collectives {

using launch::MessageType;

namespace {

using testing::HasSubstr;
using RankInfos = absl::StatusOr<std::vector<RankInfo>>;

constexpr Time kPatient = std::chrono::minutes(2);
constexpr Time kHasty = std::chrono::seconds(2);  // enough to connect on a busy machine

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
  return must(RendezvousServer::start(key(), "", 0, ranks));
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

int dial(const std::string& address) {
  const auto to = net::resolve(address);
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(
      0, ::connect(fd, reinterpret_cast<const sockaddr*>(&to->front().storage), to->front().size));
  return fd;
}

int dial(const RendezvousServer& server) { return dial(server.address()); }

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
struct Friend {
  base::UniqueFd fd;
  std::optional<net::Sealer> sealer;
  size_t heard = 0;  // bytes from the server so far

  // A message as a stream sends it.
  std::string sealed(std::string_view words) {
    std::string out(words.size() + net::kSealBytes, '\0');
    words.copy(out.data() + net::kSealPrefix, words.size());
    sealer->head(out.data(), words.size());
    return out;
  }
  bool say(std::string_view words) { return send_all(fd.get(), sealed(words)); }
};

Friend friend_of(const RendezvousServer& server,
                 const HelloInfo& hello = launch::rendezvous_hello()) {
  Friend made{base::UniqueFd(dial(server)), std::nullopt};
  net::Handshake handshake(net::Handshake::Role::kClient, key(), hello);
  while (true) {
    const std::string out(handshake.to_send());
    EXPECT_TRUE(send_all(made.fd.get(), out));
    handshake.sent(out.size());
    if (handshake.done()) break;
    std::string in(handshake.wanted(), '\0');
    EXPECT_EQ(static_cast<ssize_t>(in.size()),
              ::recv(made.fd.get(), in.data(), in.size(), MSG_WAITALL));
    made.heard += in.size();
    const absl::Status good = handshake.receive(in);
    EXPECT_TRUE(good.ok()) << good;
    if (!good.ok()) return made;
  }
  made.sealer.emplace(net::hkdf_expand(handshake.keys().send, "baton messages"),
                      net::Protection::kEncrypt);
  return made;
}

std::string join_of(uint32_t rank, uint32_t ranks) {
  return launch::encode_message(MessageType::kJoin,
                                launch::encode_join({.info = info_of(rank, ranks)}));
}

// Stands between a rank and its server, hears all, and may change a byte of what the server says.
class Relay {
 public:
  // `change`: the byte of the server's stream that the first to call gets wrong; 0: none.
  Relay(const RendezvousServer& server, size_t change) : server_(server), change_(change) {
    listener_ = base::UniqueFd(*net::listen_on("", 0, {}));
    address_ = net::advertised(listener_.get());
    stop_ = base::UniqueFd(::eventfd(0, EFD_CLOEXEC));
    thread_ = std::thread([this] { run(); });
  }
  ~Relay() { end(); }
  const std::string& address() const { return address_; }
  // What was said in both directions, and how many called. No more calls are taken.
  std::string end() {
    if (thread_.joinable()) {
      ::eventfd_write(stop_.get(), 1);
      thread_.join();
    }
    return heard_;
  }
  int calls() const { return calls_; }

 private:
  void run() {
    pollfd called[2] = {{listener_.get(), POLLIN, 0}, {stop_.get(), POLLIN, 0}};
    while (::poll(called, 2, -1) > 0 && called[1].revents == 0) {
      const int fd = ::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC);
      if (fd < 0) continue;
      carry(base::UniqueFd(fd), base::UniqueFd(dial(server_)), ++calls_ == 1 ? change_ : 0);
    }
  }
  void carry(const base::UniqueFd& rank, const base::UniqueFd& server, size_t change) {
    size_t said = 0;  // by the server
    char bytes[4096];
    while (true) {
      pollfd ends[2] = {{rank.get(), POLLIN, 0}, {server.get(), POLLIN, 0}};
      ::poll(ends, 2, -1);
      for (int from : {0, 1}) {
        if (ends[from].revents == 0) continue;
        const ssize_t n = ::recv(ends[from].fd, bytes, sizeof bytes, 0);
        if (n <= 0) return;
        const auto size = static_cast<size_t>(n);
        heard_.append(bytes, size);
        if (from == 1 && change > said && change <= said + size) bytes[change - said - 1] ^= 1;
        if (from == 1) said += size;
        send_all(ends[1 - from].fd, {bytes, size});
      }
    }
  }

  const RendezvousServer& server_;
  const size_t change_;
  base::UniqueFd listener_;
  base::UniqueFd stop_;
  std::string address_;
  std::string heard_;
  std::atomic<int> calls_ = 0;
  std::thread thread_;
};

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

TEST(Rendezvous, AServerOnEveryInterfaceSaysAnAddressThatWorks) {
  for (const char* host : {"*", "0.0.0.0"}) {
    const auto server = must(RendezvousServer::start(key(), host, 0, 2));
    expect_generation_meets(*server, 2, 0);
  }
}

TEST(Rendezvous, AHostThatIsNotThisMachinesIsRefused) {
  for (const char* host : {"10.99.99.99", "127.0.0.1:4711"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(RendezvousServer::start(key(), host, 0, 2).status()));
  }
  EXPECT_TRUE(absl::IsNotFound(RendezvousServer::start(key(), "nosuch.invalid", 0, 2).status()));
}

TEST(Rendezvous, RanksListenOnEveryInterfaceUnlessTheyMeetOnThisMachine) {
  for (const char* here : {"127.0.0.1:4711", "localhost:4711", "[::1]:4711"}) {
    EXPECT_EQ(listen_host_for(here), "") << here;
  }
  for (const char* elsewhere : {"[fd77::1]:4711", "10.0.0.1:4711", "name:4711", "no address",
                                "127.0.0.1:4711,10.0.0.1:4711"}) {
    EXPECT_EQ(listen_host_for(elsewhere), "*") << elsewhere;
  }
}

TEST(Rendezvous, RanksWaitForAServerThatStartsLater) {
  const std::string address = absl::StrCat("127.0.0.1:", quiet_port());
  auto early =
      std::async(std::launch::async, [&] { return meet(address, key(), info_of(1, 2), kPatient); });
  const auto server = must(RendezvousServer::start_at(key(), address, 2));
  EXPECT_EQ(address, server->address());
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

TEST(Rendezvous, AMissingServerIsReportedWithItsAddress) {
  const std::string address = absl::StrCat("127.0.0.1:", quiet_port());
  EXPECT_THAT(meet(address, key(), info_of(0, 2), kHasty).status(),
              fails_with(Code::kDeadlineExceeded, {address, "refused"}));
}

TEST(Rendezvous, AServerThatSaysNothingIsSaidSo) {
  const auto listener = net::listen_on("", 0, {});  // accepts by itself, and never answers
  ASSERT_TRUE(listener.ok()) << listener.status();
  const base::UniqueFd silent(*listener);
  EXPECT_THAT(meet(net::advertised(silent.get()), key(), info_of(0, 2), kHasty).status(),
              fails_with(Code::kDeadlineExceeded, {"sends nothing"}));
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

TEST(Rendezvous, AnotherKeyIsUnauthenticatedAndHarmless) {
  const auto server = serve(2);
  std::vector<std::future<RankInfos>> all;
  all.push_back(acceptor(*server, info_of(0, 2)));
  const auto other = ClusterKey::from_bytes("the key of another cluster");
  const absl::Status why = meet(server->address(), *other, info_of(1, 2), kPatient).status();
  EXPECT_TRUE(absl::IsUnauthenticated(why)) << why;
  all.push_back(acceptor(*server, info_of(1, 2)));
  expect_all_met(all);
}

TEST(Rendezvous, ARankThatLeavesWhileItWaitsMayComeAgain) {
  const auto server = serve(2);
  for (int time = 0; time < 3; ++time) {
    EXPECT_TRUE(friend_of(*server).say(join_of(0, 2)));
  }
  expect_generation_meets(*server, 2, 0);
}

// More callers than there are places are there before the service looks; they have one address.
TEST(Rendezvous, AFloodPushesOutNoRankThatHasBegunToSpeak) {
  auto service = must(launch::RendezvousService::listen(key(), "", 0, 2));
  const base::UniqueFd rank(dial(service->address()));
  net::Handshake handshake(net::Handshake::Role::kClient, key(), launch::rendezvous_hello());
  ASSERT_TRUE(send_all(rank.get(), handshake.to_send()));
  std::vector<base::UniqueFd> strangers;
  for (int i = 0; i < 100; ++i) strangers.emplace_back(dial(service->address()));
  pollfd turned_away{strangers[35].get(), POLLIN, 0};  // of 101 callers for 64 places: 37 go
  pollfd answered{rank.get(), POLLIN, 0};
  until([&] { return ::poll(&turned_away, 1, 0) > 0 && ::poll(&answered, 1, 0) > 0; },
        [&] { service->run_once({}, Clock::steady().now() + std::chrono::milliseconds(10)); });
  char answer[1024];
  EXPECT_GT(::recv(rank.get(), answer, sizeof answer, MSG_DONTWAIT), 0) << "never heard";
  EXPECT_EQ(::recv(rank.get(), answer, sizeof answer, MSG_DONTWAIT), -1) << "hung up on";
}

TEST(Rendezvous, ForeignAndMalformedClientsAreDropped) {
  const auto server = serve(2);
  std::vector<std::future<RankInfos>> all;
  all.push_back(acceptor(*server, info_of(0, 2)));

  std::vector<base::UniqueFd>
      slow;  // say a little, and no more: more of them than there are places
  for (int i = 0; i < 100; ++i) {
    slow.emplace_back(dial(*server));
    EXPECT_TRUE(send_all(slow.back().get(), "BATON"));
  }
  const base::UniqueFd garbage(dial(*server));
  send_all(garbage.get(), std::string(4096, 'x'));
  read_to_end(garbage.get());

  const std::string join = launch::encode_join({.info = info_of(1, 2)});
  const std::string good = launch::encode_message(MessageType::kJoin, join);
  for (const std::string& words : {std::string(), std::string(launch::kMaxBody + 2, 'x'),
                                   launch::encode_message(MessageType::kRankInfo, join),
                                   launch::encode_message(MessageType::kJoin, "short"),
                                   launch::encode_message(static_cast<MessageType>(9), join)}) {
    Friend bad = friend_of(*server);
    bad.say(words);
    EXPECT_EQ("", read_to_end(bad.fd.get()));
  }
  {
    Friend talker = friend_of(*server);
    std::string twice = talker.sealed(good);
    twice += talker.sealed("and more");
    send_all(talker.fd.get(), twice);
    EXPECT_EQ("", read_to_end(talker.fd.get()));
  }
  // What a rank did not say is not heard: in clear, changed, or said once already.
  for (int how : {0, 1, 2}) {
    Friend spoofed = friend_of(*server);
    std::string bytes = spoofed.sealed(good);
    if (how == 0) bytes = good;
    if (how == 1) bytes[bytes.size() / 2] ^= 1;
    if (how == 2) bytes += bytes;
    send_all(spoofed.fd.get(), bytes);
    EXPECT_EQ("", read_to_end(spoofed.fd.get()));
  }
  {
    HelloInfo worker = launch::rendezvous_hello();
    worker.extra = "shm";
    EXPECT_EQ("", read_to_end(friend_of(*server, worker).fd.get()));
  }
  all.push_back(acceptor(*server, info_of(1, 2)));
  expect_all_met(all);
}

TEST(Rendezvous, AServerThatEndsClosesWhatIsOpen) {
  auto server = serve(2);
  const base::UniqueFd stranger(dial(*server));
  Friend waiting = friend_of(*server);
  waiting.say(join_of(0, 2));
  server.reset();
  EXPECT_EQ("", read_to_end(stranger.get()));
  EXPECT_EQ("", read_to_end(waiting.fd.get()));
}

TEST(Rendezvous, WhatRanksSayCannotBeReadOnTheWay) {
  const auto server = serve(2);
  Relay relay(*server, 0);
  std::vector<std::future<RankInfos>> all;
  all.push_back(std::async(std::launch::async,
                           [&] { return meet(relay.address(), key(), info_of(0, 2), kPatient); }));
  all.push_back(acceptor(*server, info_of(1, 2)));
  expect_all_met(all);
  const std::string heard = relay.end();
  EXPECT_GT(heard.size(), 2 * info_of(0, 2).encode().size());
  EXPECT_EQ(heard.find("address of"), std::string::npos);
  EXPECT_EQ(heard.find("node1"), std::string::npos);
}

TEST(Rendezvous, AnAnswerThatWasChangedOnTheWayIsNotBelieved) {
  const size_t handshake = friend_of(*serve(1)).heard;
  const size_t answer = 1 + info_of(0, 1).encode().size() + net::kSealBytes;
  // Not of its length: for what seems to be longer the rank waits until the server gives it up.
  for (size_t byte = handshake + net::kSealPrefix + 1; byte <= handshake + answer; byte += 7) {
    const auto server = serve(1);
    Relay relay(*server, byte);
    const absl::Status why = meet(relay.address(), key(), info_of(0, 1), kPatient).status();
    // The rank calls again, and is told that its group has met without it.
    EXPECT_THAT(why, fails_with(Code::kFailedPrecondition, {"generation 0 of this group is over",
                                                            "hostile or damaged bytes"}));
    relay.end();
    EXPECT_EQ(2, relay.calls());
  }
}

TEST(Rendezvous, AnotherVersionOfItIsSaidSo) {
  HelloInfo old = launch::rendezvous_hello();
  old.extra = "rendezvous";
  EXPECT_THAT(launch::no_rendezvous(old, "10.0.0.1:4000"),
              fails_with(Code::kFailedPrecondition, {"another version"}));
  old.extra = "tcp";
  EXPECT_TRUE(absl::IsInvalidArgument(launch::no_rendezvous(old, "10.0.0.1:4000")));
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
