// The handshake: both sides learn each other, and nobody without the key gets anywhere.
#include "transport/net/handshake.h"

#include <gtest/gtest.h>

namespace baton::net {
namespace {

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
  for (int i = 0; i < 6 && out.client.ok() && out.server.ok(); ++i) {
    out.server = feed(client, up, server);
    out.client = feed(server, down, client);
  }
  return out;
}

TEST(Handshake, IntroducesBothSides) {
  const ClusterKey key = key_of('k');
  Handshake client(Handshake::Role::kClient, key, info("prefill", 7));
  Handshake server(Handshake::Role::kServer, key, info("decode", 0));
  const Outcome out = run(client, server);
  EXPECT_TRUE(out.client.ok() && out.server.ok());
  ASSERT_TRUE(client.done() && server.done());
  EXPECT_EQ(client.peer().name, "decode");
  EXPECT_EQ(server.peer().name, "prefill");
  EXPECT_EQ(server.peer().session, 7u);
  EXPECT_EQ(server.purpose(), Handshake::Purpose::kRail);
}

TEST(Handshake, RefusesAnotherKeyOnBothSides) {
  const ClusterKey mine = key_of('k'), theirs = key_of('x');
  Handshake client(Handshake::Role::kClient, mine, info("prefill", 7));
  Handshake server(Handshake::Role::kServer, theirs, info("decode", 0));
  const Outcome out = run(client, server);
  EXPECT_EQ(out.server.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(out.client.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_NE(out.client.message().find("cluster key"), absl::string_view::npos);
  EXPECT_FALSE(client.done() || server.done());
}

TEST(Handshake, FindsOutAServerThatAcceptsAnybody) {
  const ClusterKey key = key_of('k');
  Handshake client(Handshake::Role::kClient, key, info("prefill", 7));
  std::string hello(client.to_send());
  ASSERT_TRUE(client.receive(hello).ok());  // echoes the hello
  std::string proof(36, 'z');
  proof.replace(0, 4, std::string_view("\1\0\0\0", 4));
  EXPECT_EQ(client.receive(proof).code(), absl::StatusCode::kPermissionDenied);
}

TEST(Handshake, NamesForeignProtocolsAndVersions) {
  const ClusterKey key = key_of('k');
  Handshake server(Handshake::Role::kServer, key, info("decode", 0));
  std::string http = "GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n";
  http.resize(server.wanted());
  EXPECT_NE(server.receive(http).message().find("does not speak"), absl::string_view::npos);

  Handshake client(Handshake::Role::kClient, key, info("prefill", 7));
  Handshake other(Handshake::Role::kServer, key, info("decode", 0));
  std::string hello(client.to_send());
  hello[8] = 99;
  const absl::Status status = other.receive(hello);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find("99"), absl::string_view::npos);
}

TEST(Handshake, HelloInfoSurvivesOnlyWhole) {
  HelloInfo whole = info("name", 3);
  whole.extra = "extra";
  const std::string wire = whole.encode();
  ASSERT_TRUE(HelloInfo::decode(wire).ok());
  for (size_t cut = 0; cut < wire.size(); ++cut) {
    EXPECT_FALSE(HelloInfo::decode(wire.substr(0, cut)).ok());
  }
  whole.rail = 5;  // of 1
  EXPECT_FALSE(HelloInfo::decode(whole.encode()).ok());
}

TEST(ClusterKey, ExplainsShortAndMissingKeys) {
  EXPECT_FALSE(ClusterKey::from_bytes("short").ok());
  EXPECT_EQ(ClusterKey::from_file("/nonexistent/key").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace baton::net
