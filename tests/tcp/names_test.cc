// Names are looked up by the thread that asks, and nobody else waits for DNS.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <netdb.h>

#include <cstring>
#include <semaphore>
#include <string>
#include <thread>

#include "transport/worker.h"

namespace {
std::binary_semaphore asked{0};
std::binary_semaphore answered{0};
}  // namespace

// In place of the C library's.
extern "C" int getaddrinfo(const char* node, const char* service, const addrinfo* hints,
                           addrinfo** found) {
  using Real = int (*)(const char*, const char*, const addrinfo*, addrinfo**);
  static const Real real = reinterpret_cast<Real>(dlsym(RTLD_NEXT, "getaddrinfo"));
  if (node == nullptr || std::strcmp(node, "slow.example") != 0) {
    return real(node, service, hints, found);
  }
  asked.release();
  answered.acquire();
  return real("127.0.0.1", service, hints, found);
}

namespace baton {
namespace {

std::unique_ptr<Worker> worker(const std::string& name) {
  WorkerOptions options;
  options.name = name;
  options.key = *ClusterKey::from_bytes("a secret of the tests");
  options.providers = {"tcp"};
  return *Worker::create(std::move(options));
}

TEST(Names, NobodyElseWaitsForDns) {
  const auto here = worker("here"), there = worker("there");
  PeerId peer;
  std::thread caller(
      [&] { peer = *here->connect("slow.example:" + std::to_string(there->port())); });
  asked.acquire();
  // Would wait for ever if the lookup held the worker.
  for (int i = 0; i < 100; ++i) here->progress();
  EXPECT_EQ(here->stats().peers_up, 0U);
  answered.release();
  caller.join();
  while (here->peer_state(peer) == PeerState::kConnecting) {
    here->progress();
    there->progress();
  }
  EXPECT_EQ(here->peer_state(peer), PeerState::kUp) << here->peer_status(peer);
}

TEST(Names, ANameThatIsNoneIsAnErrorAtOnce) {
  const auto here = worker("here");
  const auto peer = here->connect("no port");
  EXPECT_TRUE(absl::IsInvalidArgument(peer.status())) << peer.status();
}

}  // namespace
}  // namespace baton
