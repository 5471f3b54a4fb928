// The handshake: both sides learn each other, and nobody without the key gets anywhere.
#include "transport/net/handshake.h"

#include "tests/test.h"
#include "transport/base/wire.h"
#include "transport/base/worker_keys.h"

namespace baton::net {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

ClusterKey key_of(char c) { return *ClusterKey::from_bytes(std::string(32, c)); }

HelloInfo info(const char* name, uint64_t session) {
  HelloInfo out;
  out.uid = WorkerUid::random();
  out.name = name;
  out.session = session;
  return out;
}

// Moves what `from` wants to say to `to`, piece by piece as `to` asks for it.
absl::Status feed(Handshake& from, std::string& wire, Handshake& to) {
  wire += from.to_send();
  from.sent(from.to_send().size());
  while (to.wanted() > 0 && wire.size() >= to.wanted()) {
    const size_t n = to.wanted();
    absl::Status status = to.receive(wire.substr(0, n));
    wire.erase(0, n);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

struct Outcome {
  absl::Status client, server;
};
Outcome run(Handshake& client, Handshake& server) {
  std::string up, down;
  Outcome out;
  for (int i = 0; i < 8 && out.client.ok() && out.server.ok(); ++i) {
    out.server = feed(client, up, server);
    out.client = feed(server, down, client);
  }
  return out;
}

TEST(Handshake, FindsOutAServerThatAcceptsAnybody) {
  const ClusterKey key = key_of('k');
  Handshake client(Handshake::Role::kClient, key, info("prefill", 7));
  const Opening asked = Opening::decode(client.to_send(), true);
  Opening answer{.highest = 4, .lowest = 4, .share = asked.share, .version = 4, .which = 0};
  const std::string opening = answer.encode(false);
  ASSERT_TRUE(client.receive(opening.substr(0, Opening::kPrefixBytes)).ok());
  ASSERT_TRUE(client.receive(opening.substr(Opening::kPrefixBytes)).ok());
  std::string proof(36, 'z');
  proof.replace(0, 4, std::string_view("\1\0\0\0", 4));
  EXPECT_EQ(client.receive(proof).code(), absl::StatusCode::kPermissionDenied);
}

TEST(Handshake, NamesForeignProtocols) {
  const ClusterKey key = key_of('k');
  Handshake server(Handshake::Role::kServer, key, info("decode", 0));
  std::string http = "GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n";
  http.resize(server.wanted());
  EXPECT_NE(server.receive(http).message().find("does not speak"), absl::string_view::npos);
}

// ---- versions ----

struct Ends {
  Ends(const Handshake::Options& client_options, const Handshake::Options& server_options)
      : client(Handshake::Role::kClient, key, info("prefill", 7), client_options),
        server(Handshake::Role::kServer, key, info("decode", 0), server_options) {}
  const ClusterKey key = key_of('k');
  Handshake client;
  Handshake server;
};

TEST(Handshake, TheHighestCommonVersionCounts) {
  for (const auto& [theirs, ours, common] : std::vector<std::tuple<Versions, Versions, uint16_t>>{
           {{4, 4}, {4, 4}, 4}, {{4, 6}, {5, 9}, 6}, {{5, 9}, {4, 6}, 6}, {{4, 9}, {6, 6}, 6}}) {
    Ends ends({.versions = theirs}, {.versions = ours});
    const Outcome out = run(ends.client, ends.server);
    ASSERT_TRUE(ends.client.done() && ends.server.done()) << out.client << out.server;
    EXPECT_EQ(ends.client.keys().version, common);
    EXPECT_EQ(ends.server.keys().version, common);
    // What a worker does with its peer depends on it.
    EXPECT_EQ(ends.client.peer().protocol, common);
    EXPECT_EQ(ends.server.peer().protocol, common);
  }
}

// Promise(security): Workers without a common wire version name both ranges | versions are
//   exchanged first
TEST(Handshake, WithoutACommonVersionBothNameBothRanges) {
  for (const bool client_is_older : {true, false}) {
    const Versions older{4, 5};
    const Versions newer{6, 9};
    Ends ends({.versions = client_is_older ? older : newer},
              {.versions = client_is_older ? newer : older});
    const Outcome out = run(ends.client, ends.server);
    for (const absl::Status& status : {out.client, out.server}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr("versions 4 to 5"), HasSubstr("versions 6 to 9")));
    }
  }
}

// What a worker of version 3 sent first, and all that it read before it looked at the version.
std::string hello_of_version_3() {
  std::string out(kMagic);
  base::put_number(out, uint32_t{3});
  base::put_number(out, uint32_t{1});
  return out.append(32, 'n');
}

TEST(Handshake, AWorkerOfVersion3LearnsWhichVersionItWouldNeed) {
  const ClusterKey key = key_of('k');
  Handshake server(Handshake::Role::kServer, key, info("decode", 0));
  const std::string hello = hello_of_version_3();
  ASSERT_EQ(server.wanted(), hello.size());
  const absl::Status refused = server.receive(hello);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("version 3"), HasSubstr("versions 4 to 7")));
  ASSERT_GE(server.to_send().size(), hello.size());
  base::WireReader in(server.to_send());
  EXPECT_EQ(in.take(8), kMagic);
  EXPECT_EQ(in.number<uint32_t>(), kHighestProtocol);

  Handshake client(Handshake::Role::kClient, key, info("prefill", 7));
  EXPECT_EQ(client.receive(hello).code(), absl::StatusCode::kFailedPrecondition);
}

// ---- the transcript ----

// Every byte of every message, changed on its way: nobody ends with keys, or with other ones.
// Promise(security): A changed byte of the handshake is detected: identity, version, protection |
//   every byte goes into the keys
TEST(Handshake, AChangeOfAnyByteIsFoundOut) {
  const Handshake::Options options{.versions = {4, 6}, .offers = kAllProtections};
  size_t changes = 0;
  for (int from = 0; from < 2; ++from) {
    size_t total = 1;
    for (size_t at = 0; at < total; ++at) {
      Ends ends(options, options);
      std::string wires[2];
      size_t passed = 0;
      absl::Status status;
      for (int i = 0; i < 8 && status.ok(); ++i) {
        for (const int side : {0, 1}) {
          Handshake& talks = side == 0 ? ends.client : ends.server;
          Handshake& hears = side == 0 ? ends.server : ends.client;
          std::string said(talks.to_send());
          talks.sent(said.size());
          if (side == from) {
            if (at >= passed && at < passed + said.size()) said[at - passed] ^= 0x41;
            passed += said.size();
          }
          wires[side] += said;
          while (status.ok() && hears.wanted() > 0 && wires[side].size() >= hears.wanted()) {
            const std::string bytes = wires[side].substr(0, hears.wanted());
            wires[side].erase(0, bytes.size());
            status = hears.receive(bytes);
          }
        }
      }
      total = std::max(total, passed);
      EXPECT_FALSE(ends.client.done() && ends.server.done())
          << (from == 0 ? "client" : "server") << " byte " << at;
      ++changes;
    }
  }
  EXPECT_GT(changes, 400u);
}

TEST(Handshake, OnlyTheTwoEndsShareTheKeys) {
  Ends one({}, {}), other({}, {});
  run(one.client, one.server);
  run(other.client, other.server);
  ASSERT_TRUE(one.server.done() && other.server.done());
  EXPECT_EQ(one.client.keys().send, one.server.keys().receive);
  EXPECT_EQ(one.client.keys().receive, one.server.keys().send);
  EXPECT_NE(one.client.keys().send, one.client.keys().receive);
  EXPECT_NE(one.client.keys().send, other.client.keys().send);
}

// ---- uids ----

// Promise(security): No member of the cluster can use another worker's uid | a uid is the hash of
//   an X25519 key used in the handshake
TEST(Handshake, AMemberCannotClaimAnothersUid) {
  const ClusterKey key = key_of('k');
  const HelloInfo honest = info("prefill", 7);
  // It holds the cluster key, and knows the uid from the worker's address; it is another process.
  HelloInfo thief = honest;
  base::WorkerSecret own;
  std::fill(own.public_key.begin(), own.public_key.end(), 9);
  thief.uid.bytes =
      base::uid_of(own.public_key);  // of nobody here, as `honest`'s is to another process
  for (const auto role : {Handshake::Role::kClient, Handshake::Role::kServer}) {
    const bool client = role == Handshake::Role::kClient;
    Handshake a(Handshake::Role::kClient, key, client ? thief : honest);
    Handshake b(Handshake::Role::kServer, key, client ? honest : thief);
    const Outcome out = run(a, b);
    const absl::Status& refused = client ? out.server : out.client;
    EXPECT_EQ(refused.code(), absl::StatusCode::kPermissionDenied);
    EXPECT_THAT(std::string(refused.message()), HasSubstr("cannot prove it"));
  }
}

// A member that has seen a worker's public key, as everyone has whom it called, and shows it as its
// own: without the private one it cannot prove itself, whatever it puts in the place of what only
// the two could compute.
TEST(Handshake, ShowingAnothersPublicKeyIsNoProof) {
  const ClusterKey key = key_of('k');
  const HelloInfo victim = info("prefill", 7);
  for (const int guess : {0, 1, 2}) {
    Handshake server(Handshake::Role::kServer, key, info("decode", 0));
    Handshake honest(Handshake::Role::kClient, key, victim);
    Opening opening = Opening::decode(honest.to_send(), true);
    const KeyPair share = KeyPair::make();
    opening.share = share.public_key;  // and opening.static_key is the victim's
    const std::string asked = opening.encode(true);
    ASSERT_TRUE(server.receive(asked.substr(0, Opening::kPrefixBytes)).ok());
    ASSERT_TRUE(server.receive(asked.substr(Opening::kPrefixBytes)).ok());
    const std::string answered(server.to_send());
    const Opening theirs = Opening::decode(answered, false);

    const auto shares = agree(share.private_key, theirs.share);
    const auto their_uid = agree(share.private_key, theirs.static_key);
    ASSERT_TRUE(shares && their_uid);
    std::string secret(view(key.hmac("baton handshake")));
    secret.append(view(*shares));
    if (guess == 1) secret.append(view(Key32{}));
    if (guess == 2) secret.append(view(*shares));
    secret.append(view(*their_uid));
    const Key32 root =
        hkdf_extract(std::string(view(opening.nonce)).append(view(theirs.nonce)), secret);
    const std::string label = "baton client proof" + std::string(view(sha256(asked + answered)));
    const std::string proof = std::string(view(hkdf_expand(root, label))) + std::string(2, 0);
    EXPECT_EQ(server.receive(proof).code(), absl::StatusCode::kPermissionDenied) << guess;
  }
}

// ---- rotation ----

TEST(Handshake, DuringARotationEitherKeyWillDo) {
  const ClusterKey old_key = key_of('o'), new_key = key_of('n');
  const ClusterKey both = new_key.with_previous(old_key);
  const auto meet = [](const ClusterKey& a, const ClusterKey& b) {
    Handshake client(Handshake::Role::kClient, a, info("prefill", 7));
    Handshake server(Handshake::Role::kServer, b, info("decode", 0));
    const Outcome out = run(client, server);
    EXPECT_EQ(client.done(), server.done());
    if (!client.done()) {
      EXPECT_EQ(out.client.code(), absl::StatusCode::kPermissionDenied);
      EXPECT_EQ(out.server.code(), absl::StatusCode::kPermissionDenied);
    }
    return client.done();
  };
  for (const ClusterKey* one : {&old_key, &both, &new_key}) {
    EXPECT_TRUE(meet(*one, both));
    EXPECT_TRUE(meet(both, *one));
    EXPECT_TRUE(meet(*one, *one));
  }
  EXPECT_FALSE(meet(old_key, new_key));
  EXPECT_FALSE(meet(new_key, old_key));
}

TEST(Handshake, KeyIdsTellNothing) {
  const ClusterKey key = key_of('k');
  const auto ids = [&] {
    Handshake client(Handshake::Role::kClient, key, info("prefill", 7));
    return Opening::decode(client.to_send(), true).ids;
  };
  const auto first = ids(), second = ids();
  EXPECT_NE(first[0], second[0]);  // nothing that stays
  EXPECT_NE(first[1], second[1]);  // nor how many there are
  EXPECT_NE(first[1], (std::array<uint8_t, 16>{}));
}

// ---- messages that fill a packet ----

TEST(Handshake, IsAsLongAsAPacketBothWaysWhereAsked) {
  for (const size_t padding : {size_t{0}, size_t{1448}, Handshake::kMostPadding}) {
    Ends ends({}, {});
    ends.client.pad(padding);
    std::string up, down;
    ASSERT_TRUE(feed(ends.client, up, ends.server).ok());
    ASSERT_TRUE(feed(ends.server, down, ends.client).ok());
    EXPECT_EQ(ends.client.waits_for_verdict(), padding > 0);
    EXPECT_GE(ends.client.to_send().size(), padding);
    ASSERT_TRUE(feed(ends.client, up, ends.server).ok());
    EXPECT_GE(ends.server.to_send().size(), padding);
    // The first of it goes alone: the client knows that his own has come.
    const size_t alone = ends.server.alone();
    EXPECT_EQ(alone, padding > 0 ? ends.client.wanted() : 0);
    down.assign(ends.server.to_send().substr(0, alone));
    ends.server.sent(alone);
    EXPECT_EQ(ends.server.alone(), 0u);
    if (alone > 0) {
      ASSERT_TRUE(ends.client.receive(std::exchange(down, {})).ok());
    }
    EXPECT_FALSE(ends.client.waits_for_verdict());
    EXPECT_EQ(ends.client.waits_for_padding(), padding > 0);
    EXPECT_FALSE(ends.server.waits_for_padding()) << "the client looks for that";
    ASSERT_TRUE(feed(ends.server, down, ends.client).ok());
    EXPECT_TRUE(ends.client.done());
    EXPECT_FALSE(ends.client.waits_for_padding());
    ASSERT_TRUE(feed(ends.client, up, ends.server).ok());
    EXPECT_TRUE(ends.server.done());
    EXPECT_EQ(ends.server.peer().name, "prefill");
  }
}

TEST(Handshake, APeerOfAnOlderVersionIsSentNoMoreThanItKnows) {
  for (const bool client_is_older : {true, false}) {
    const Versions older{4, 5};
    Ends ends({.versions = client_is_older ? older : Versions{}},
              {.versions = client_is_older ? Versions{} : older});
    ends.client.pad(1448);
    std::string up, down;
    ASSERT_TRUE(feed(ends.client, up, ends.server).ok());
    ASSERT_TRUE(feed(ends.server, down, ends.client).ok());
    EXPECT_EQ(ends.client.to_send().size(), 32u);
    EXPECT_FALSE(ends.client.waits_for_verdict());
    run(ends.client, ends.server);
    EXPECT_TRUE(ends.client.done() && ends.server.done());
  }
}

TEST(Handshake, AStrangerMakesAServerReadNothingLong) {
  const ClusterKey mine = key_of('k');
  Handshake client(Handshake::Role::kClient, mine, info("prefill", 7));
  Handshake server(Handshake::Role::kServer, mine, info("decode", 0));
  std::string up, down;
  ASSERT_TRUE(feed(client, up, server).ok());
  // Of whoever repeats a first message that he has recorded.
  EXPECT_EQ(server.receive(std::string(32, 'x') + "\xff\xff").code(),
            absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(server.wanted(), 0u);
}

TEST(Handshake, AnImpossiblePaddingIsRefused) {
  Ends ends({}, {});
  ends.client.pad(Handshake::kMostPadding + 1);
  EXPECT_EQ(run(ends.client, ends.server).server.code(), absl::StatusCode::kInvalidArgument);
}

// ---- protection ----

// Promise(security): A side that requires integrity or encryption is not talked into less |
//   requirements go into the keys
TEST(Handshake, WhatOneSideNeedsBothHave) {
  using P = Protection;
  const auto meet = [](Protections a_offers, Protections a_needs, Protections b_offers,
                       Protections b_needs) {
    Ends ends({.offers = a_offers, .needs = a_needs}, {.offers = b_offers, .needs = b_needs});
    run(ends.client, ends.server);
    EXPECT_EQ(ends.client.done(), ends.server.done());
    if (!ends.client.done()) return std::optional<P>();
    EXPECT_EQ(ends.client.keys().protection, ends.server.keys().protection);
    return std::optional<P>(ends.client.keys().protection);
  };
  const Protections plain = kHeadsOnly;
  const Protections all = kAllProtections;
  const Protections integrity = plain | bit(P::kIntegrity);
  const Protections encrypt = plain | bit(P::kEncrypt);
  EXPECT_EQ(meet(all, plain, all, plain), P::kHeads);
  EXPECT_EQ(meet(all, integrity, all, plain), P::kIntegrity);
  EXPECT_EQ(meet(all, plain, all, encrypt), P::kEncrypt);
  EXPECT_EQ(meet(all, integrity, all, encrypt), P::kEncrypt);
  EXPECT_EQ(meet(plain, plain, all, encrypt), std::nullopt);
  EXPECT_EQ(meet(all, integrity, plain, plain), std::nullopt);
  EXPECT_EQ(meet(all, 0xff, all, plain), std::nullopt);
  Ends ends({.offers = all, .needs = encrypt}, {});
  EXPECT_THAT(std::string(run(ends.client, ends.server).client.message()),
              AllOf(HasSubstr("encrypted"), HasSubstr("the peer does not offer it")));
}

}  // namespace
}  // namespace baton::net
