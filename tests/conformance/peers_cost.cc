// What idle peers cost: peers_cost PROVIDER PEERS [KIB]. Two workers of this process have so many
// connections with each other; prints the time of one progress() of the one that was called, and
// the memory that a connection takes, of both its ends. Fails where that is more than KIB.
#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "transport/worker.h"

namespace {

using namespace baton;

// Of this process, in KiB.
long resident() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmRSS:", 0) == 0) return std::atol(line.c_str() + 6);
  }
  return 0;
}

std::unique_ptr<Worker> worker(const std::string& name, const std::string& provider) {
  WorkerOptions options;
  options.name = name;
  options.key = *ClusterKey::from_bytes("0123456789abcdef");
  options.providers = {provider};
  if (provider == "tcp") options.settings = {{"tcp.sockets", "1"}, {"tcp.buffer_kib", "0"}};
  auto made = Worker::create(std::move(options));
  if (made.ok()) return *std::move(made);
  std::fprintf(stderr, "%s\n", made.status().ToString().c_str());
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  const int peers = argc == 3 || argc == 4 ? std::atoi(argv[2]) : 0;
  const double most = argc == 4 ? std::atof(argv[3]) : 0;
  if (peers < 1 || (argc == 4 && most <= 0)) {
    std::fprintf(stderr, "usage: peers_cost PROVIDER PEERS [KIB], such as: peers_cost tcp 1000\n");
    return 2;
  }
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  const auto called = worker("called", argv[1]), caller = worker("caller", argv[1]);
  if (called == nullptr || caller == nullptr) return 1;

  const long before = resident();
  for (int i = 0; i < peers; ++i) {
    const PeerId peer = *caller->connect(called->address());
    while (caller->peer_state(peer) == PeerState::kConnecting) {
      caller->progress();
      called->progress();
    }
    if (caller->peer_state(peer) == PeerState::kUp) continue;
    std::fprintf(stderr, "peer %d: %s\n", i, caller->peer_status(peer).ToString().c_str());
    return 1;
  }
  // Until those that are silent are left alone.
  for (int i = 0; i < 40'000; ++i) called->progress();
  const long after = resident();
  constexpr int kRounds = 20'000;
  const Time begin = Clock::steady().now();
  for (int i = 0; i < kRounds; ++i) called->progress();
  const Time took = Clock::steady().now() - begin;
  const double kib = static_cast<double>(after - before) / peers;
  std::printf("%s, %d peers: progress() %.0f ns, a connection %.1f KiB\n", argv[1], peers,
              static_cast<double>(took.count()) / kRounds, kib);
  if (argc == 4 && kib > most) {
    std::fprintf(stderr, "that is more than %.1f KiB\n", most);
    return 1;
  }
  return called->stats().peers_up == static_cast<uint64_t>(peers) ? 0 : 1;
}
