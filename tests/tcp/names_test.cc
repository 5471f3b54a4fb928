// Names are looked up by the thread that asks, and nobody else waits for DNS.
#include "tests/slow_dns.h"
#include "tests/test.h"
#include "tests/until.h"
#include "transport/worker.h"

namespace baton {
namespace {

std::unique_ptr<Worker> worker(const std::string& name) {
  WorkerOptions options;
  options.name = name;
  options.key = *ClusterKey::from_bytes("a secret of the tests");
  options.providers = {"tcp"};
  return *Worker::create(std::move(options));
}

// Promise(sleep): Only the caller that asks for a name waits for DNS | names are resolved before
//   the worker is locked
TEST(Names, ADnsLookupDelaysNoOtherPeer) {
  const auto here = worker("here"), there = worker("there");
  PeerId peer;
  std::thread caller(
      [&] { peer = *here->connect("slow.example:" + std::to_string(there->port())); });
  dns_asked.acquire();
  // Would wait for ever if the lookup held the worker.
  for (int i = 0; i < 100; ++i) here->progress();
  EXPECT_EQ(here->stats().peers_up, 0U);
  dns_answered.release();
  caller.join();
  until([&] { return here->peer_state(peer) != PeerState::kConnecting; },
        [&] { here->progress(), there->progress(); },
        [&] { return state_of(*here, peer, "here"); });
  EXPECT_EQ(here->peer_state(peer), PeerState::kUp) << here->peer_status(peer);
}

TEST(Names, AnInvalidNameIsAnErrorAtOnce) {
  const auto here = worker("here");
  const auto peer = here->connect("no port");
  EXPECT_TRUE(absl::IsInvalidArgument(peer.status())) << peer.status();
}

}  // namespace
}  // namespace baton
