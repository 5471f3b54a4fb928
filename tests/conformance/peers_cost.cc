// What idle peers cost: peers_cost PROVIDER PEERS [KIB]. Two workers of this process have so many
// connections with each other; prints the time of one progress() of the one that was called, and
// the memory that a connection takes, of both its ends. Fails where that is more than KIB.
#include "tests/sim/fabric/fabric.h"
#include "tests/std.h"
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

// On a node of the fabric, or over the provider of this name.
std::unique_ptr<Worker> worker(const std::string& name, const std::string& provider,
                               sim::SimFabric* fabric, size_t node) {
  WorkerOptions options;
  options.name = name;
  options.key = *ClusterKey::from_bytes("0123456789abcdef");
  if (fabric != nullptr) {
    options.clock = &fabric->clock();
    options.extra_providers = {fabric->provider_factory(node)};
  } else {
    options.providers = {provider};
  }
  if (provider == "tcp") options.settings = {{"tcp.sockets", "1"}, {"tcp.buffer_kib", "0"}};
  auto made = Worker::create(std::move(options));
  if (!made.ok()) {
    std::fprintf(stderr, "%s\n", made.status().ToString().c_str());
    return nullptr;
  }
  if (fabric != nullptr) fabric->attach(**made, node);
  return *std::move(made);
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
  std::optional<sim::SimFabric> fabric;
  if (std::string(argv[1]) == "sim") fabric.emplace(sim::SimOptions{});
  sim::SimFabric* const network = fabric ? &*fabric : nullptr;
  const auto called = worker("called", argv[1], network, 0);
  const auto caller = worker("caller", argv[1], network, 1);
  if (called == nullptr || caller == nullptr) return 1;

  const long before = resident();
  for (int i = 0; i < peers; ++i) {
    const PeerId peer = *caller->connect(called->address());
    const auto known = [&] { return caller->peer_state(peer) != PeerState::kConnecting; };
    if (fabric) fabric->run_until(known, std::chrono::seconds(1));
    while (!fabric && !known()) {
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
  const bool all = called->stats().peers_up == static_cast<uint64_t>(peers);
  if (fabric) {
    fabric->detach(*called);
    fabric->detach(*caller);
  }
  return all ? 0 : 1;
}
