// Two workers joined by the verbs provider over a fake of the verbs calls, in virtual time.
#pragma once

#include "tests/manual_clock.h"
#include "tests/test.h"
#include "tests/until.h"
#include "tests/verbs/fake/fake_verbs.h"
#include "transport/worker.h"
#include "verbs/provider.h"

namespace baton {

struct VerbsPair {
  using Settings = std::vector<std::pair<std::string, std::string>>;
  struct Side {
    std::vector<std::byte> memory;
    std::unique_ptr<Worker> worker;
    MemoryRegion region;
    RemoteRegion remote;
    PeerId peer;
  };
  static constexpr size_t kBytes = 8 << 20;

  explicit VerbsPair(FakeOptions options, Settings extra = {},
                     std::shared_ptr<const verbs::Locality> where = nullptr)
      : settings(std::move(extra)), locality(std::move(where)) {
    // The tests are of the provider: without more from them, a peer whose rails are lost is down.
    if (std::none_of(settings.begin(), settings.end(),
                     [](const auto& each) { return each.first == "peer.redial_ms"; })) {
      settings.emplace_back("peer.redial_ms", "0");
    }
    options.clock = &clock;
    fake.emplace(options);
    start(a, "a");
    start(b, "b");
  }
  ~VerbsPair() {
    a.worker.reset();
    b.worker.reset();
    EXPECT_THAT(fake->violations(), testing::IsEmpty());
    if (expect_ready) {
      EXPECT_EQ(fake->stats().not_ready, 0u) << "a message found no receive posted";
    }
    EXPECT_EQ(fake->objects(), 0u) << "left behind";
  }

  void start(Side& side, const char* name) {
    WorkerOptions options;
    options.name = name;
    options.key = *ClusterKey::from_bytes("a secret of the tests");
    options.clock = &clock;
    options.settings = settings;
    options.extra_providers = {verbs::verbs_over(fake->api(), locality)};
    side.worker = must(Worker::create(options));
    side.memory.assign(kBytes, std::byte{0});
    auto region = must(side.worker->register_memory(side.memory.data(), kBytes));
    side.region = region;
    side.remote = *side.worker->remote_region(region);
  }

  // Rounds of progress, a little virtual time after each.
  void step() {
    if (a.worker != nullptr) a.worker->progress();
    if (b.worker != nullptr) b.worker->progress();
    clock.advance(tick);
  }
  void steps(int count) {
    for (int i = 0; i < count; ++i) step();
  }
  template <typename Fact>
  void until(Fact&& fact, CallSite from = CallSite::here()) {
    const auto state = [&] { return a.worker ? state_of(*a.worker, a.peer, "a") : ""; };
    baton::until(
        fact, [&] { step(); }, state, from);
  }
  // Whether it comes in so much virtual time.
  bool within(Time limit, const std::function<bool()>& ready) {
    const Time end = clock.now() + limit;
    while (!ready()) {
      if (clock.now() >= end) return false;
      step();
    }
    return true;
  }
  // Connects, and waits until everything is quiet: all rails are up at both ends.
  void connect() {
    a.peer = must(a.worker->connect(b.worker->address()));
    until([&] {
      while (auto event = b.worker->next_peer_event()) b.peer = event->peer;
      return b.peer.generation != 0 && a.worker->peer_state(a.peer) == PeerState::kUp;
    });
    steps(200);
  }

  // Connects, expecting that it fails; why.
  std::string refusal() {
    auto peer = must(a.worker->connect(b.worker->address()));
    until([&] { return a.worker->peer_state(peer) == PeerState::kDown; });
    return std::string(a.worker->peer_status(peer).message());
  }

  TransferRequest request(Op op, size_t bytes = kBytes) const {
    return {.op = op,
            .peer = a.peer,
            .local = a.region,
            .local_layout = Layout::contiguous(0, bytes),
            .remote = b.remote,
            .remote_layout = Layout::contiguous(0, bytes)};
  }
  absl::Status finish(TransferId id) {
    until([&] { return ended(*a.worker->state(id)); });
    absl::Status status = a.worker->status(id);
    const absl::Status released = a.worker->release(id);
    return released.ok() ? status : released;
  }
  absl::Status run(const TransferRequest& r) {
    auto id = a.worker->submit(r);
    return id.ok() ? finish(*id) : id.status();
  }
  void fill(int seed) {
    for (size_t i = 0; i < kBytes; ++i) {
      a.memory[i] = std::byte(static_cast<uint8_t>(seed + static_cast<int>(i * 7 + (i >> 12))));
    }
    std::fill(b.memory.begin(), b.memory.end(), std::byte{0});
  }

  Settings settings;
  std::shared_ptr<const verbs::Locality> locality;
  ManualClock clock;
  Time tick = std::chrono::microseconds(20);
  bool expect_ready = true;  // that no message ever finds the receives used up
  std::optional<FakeVerbs> fake;
  Side a;
  Side b;
};

}  // namespace baton
