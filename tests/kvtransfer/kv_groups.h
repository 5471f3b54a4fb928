// Tensor-parallel groups of engines without a model, or one of each side, over a simulated fabric,
// in virtual time.
#pragma once

#include <list>

#include "kvtransfer/baton_connector.h"
#include "kvtransfer/kv_plan.h"
#include "tests/kvtransfer/kv_engines.h"
#include "tests/sanitized.h"
#include "tests/seeds.h"
#include "tests/sim/fabric/fabric.h"
#include "tests/test.h"

namespace baton::kvtransfer {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

inline constexpr uint32_t kHeads = 8;

// Calls `test` with each seed, until one fails. How many there were.
template <typename Test>
uint64_t with_seeds(uint64_t usually, const Test& test) {
  const Seeds seeds(usually);
  for (uint64_t seed = seeds.begin; seed < seeds.end; ++seed) {
    SCOPED_TRACE(testing::Message() << "BATON_SEED=" << seed);
    test(static_cast<uint32_t>(seed));
    if (testing::Test::HasFatalFailure()) break;
  }
  return seeds.count();
}

// A worker with a cache of any shape.
struct Member {
  size_t node = 0;
  Worker* worker = nullptr;
  KvLayout layout;
  std::vector<std::vector<std::byte>> memory;  // outlives the connector
  std::unique_ptr<KvConnector> connector;
  Time dead_at = kNever;
  bool stopped = false;  // its process is: its adapter goes on, as a kernel does for it

  std::vector<void*> buffers() {
    for (const KvBuffer& buffer : layout.buffers) memory.emplace_back(buffer.bytes);
    std::vector<void*> all;
    for (auto& each : memory) all.push_back(each.data());
    return all;
  }
};

inline sim::SimOptions bad_network(std::mt19937& random, uint32_t most_rails = 3) {
  sim::SimOptions sim;
  sim.seed = random();
  sim.rails = 1 + random() % most_rails;
  sim.link.bytes_per_second = 50e6 * (1 + random() % 20);
  sim.link.latency = microseconds(1 + random() % 50);
  sim.link.loss = random() % 2 == 0 ? 0.01 : 0;
  sim.link.duplicate = random() % 2 == 0 ? 0.02 : 0;
  sim.link.reorder = random() % 2 == 0 ? 0.05 : 0;
  sim.slice_bytes = size_t{2048} << random() % 6;
  return sim;
}

class Groups {
 public:
  // In memory of their own. `lease` not zero: decode pulls. Prefill grants `max_lease` at most.
  Groups(uint32_t seed, uint32_t prefill_ranks, uint32_t decode_ranks, double bytes_per_second,
         Time lease = Time::zero(), Time max_lease = BatonConnectorOptions().max_lease)
      : lease_(lease), random_(seed) {
    options_.allow_pull = lease_ != Time::zero();
    options_.max_lease = max_lease;
    sim::SimOptions network = bad_network(random_, 2);
    network.nodes = prefill_ranks + decode_ranks;
    network.link.bytes_per_second = bytes_per_second;
    fabric_.emplace(network);
    rails_ = static_cast<uint32_t>(network.rails);
    for (const bool decode : {false, true}) {
      const uint32_t ranks = decode ? decode_ranks : prefill_ranks;
      const uint32_t sizes[] = {4, 8, 12, 16};
      const uint32_t block = sizes[random_() % 4];
      const auto order = static_cast<KvLayout::Order>(random_() % 2);
      const auto pair = static_cast<KvLayout::Pair>(random_() % 4);
      const bool tensors = random_() % 2 == 0;
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        const KvHeads heads = shard_heads(kHeads, ranks, rank);
        const KvShape shape = test_shape(60, block, heads.first, heads.end - heads.first);
        add(decode, KvLayout::paged(shape, order, pair, tensors), seed + rank, true);
      }
    }
  }
  // One of each side, with caches in their connectors' memory.
  Groups(const sim::SimOptions& network, uint32_t seed, const KvLayout& prefill,
         const KvLayout& decode, KvSendMode mode = KvSendMode::kLayerwise)
      : random_(seed) {
    options_.mode = mode;
    fabric_.emplace(network);
    add(false, prefill, seed, false);
    add(true, decode, seed + 1, false);
  }
  ~Groups() {
    for (Member& member : members_) fabric_->detach(*member.worker);
  }

  TestPrefill& prefill(size_t rank = 0) { return *prefill_[rank]; }
  TestDecode& decode(size_t rank = 0) { return *decode_[rank]; }
  KvConnector& connector(size_t rank = 0) { return *prefill_members_[rank]->connector; }
  KvConnector& decode_connector(size_t rank = 0) { return *decode_members_[rank]->connector; }
  const std::string& address() const { return addresses_[0]; }
  sim::SimFabric& fabric() { return *fabric_; }
  uint32_t rails() const { return rails_; }
  std::mt19937& random() { return random_; }

  Time now() const { return fabric_->clock().now(); }

  void kill_decode(size_t rank, Time when) { kill(*decode_members_[rank], when); }
  void kill_prefill(size_t rank, Time when) { kill(*prefill_members_[rank], when); }
  // Nothing of the first one's connector is called.
  void stop_decode(bool stopped) { decode_members_[0]->stopped = stopped; }
  void stop_prefill(bool stopped) { prefill_members_[0]->stopped = stopped; }

  // Every decode worker loads request `id` from all prefill workers.
  void load(KvRequestId id, uint32_t tokens, Time timeout = seconds(60)) {
    for (auto& decode : decode_) {
      KvLoad load{.id = id,
                  .shards = addresses_,
                  .key = "request " + std::to_string(id),
                  .loads_of_key = loads_of_key(),
                  .timeout = timeout,
                  .pull = lease_ != Time::zero()};
      if (load.pull) load.lease = lease_;
      ASSERT_TRUE(decode->start(std::move(load), tokens).ok());
    }
  }
  // Of the decode workers, those that one prefill worker hears from.
  uint32_t loads_of_key() const {
    return static_cast<uint32_t>(std::max<size_t>(1, decode_.size() / prefill_.size()));
  }

  // Runs all engines, 50 us of virtual time a step.
  bool run(const std::function<bool()>& ready, Time limit) {
    for (const Time end = now() + limit; now() < end;) {
      for (size_t i = 0; i < prefill_.size(); ++i) {
        if (runs(*prefill_members_[i])) prefill_[i]->step();
      }
      for (size_t i = 0; i < decode_.size(); ++i) {
        if (runs(*decode_members_[i])) decode_[i]->step();
      }
      if (ready()) return true;
      fabric_->run_for(microseconds(50));
    }
    return false;
  }
  void pass(Time time) {
    run([] { return false; }, time);
  }
  // Decode's engine computes something else meanwhile.
  void pass_without_decode(Time time) {
    stop_decode(true);
    pass(time);
    stop_decode(false);
  }
  bool run_to_end(Time limit = seconds(30)) {
    return run(
        [&] {
          for (size_t i = 0; i < decode_.size(); ++i) {
            if (runs(*decode_members_[i]) && decode_[i]->open() > 0) return false;
          }
          for (size_t i = 0; i < prefill_.size(); ++i) {
            if (runs(*prefill_members_[i]) && prefill_[i]->open_jobs() > 0) return false;
          }
          return true;
        },
        limit);
  }

  // Loads 1 to `loads` have come whole at every decode worker.
  void expect_complete(KvRequestId loads) {
    for (const auto& decode : decode_) {
      for (KvRequestId id = 1; id <= loads; ++id) {
        const TestLoad& load = decode->load(id);
        EXPECT_TRUE(load.status.ok()) << load.status;
        EXPECT_EQ(load.verified, 6u);
        EXPECT_FALSE(load.wrong);
        EXPECT_EQ(load.payload, "token of " + std::to_string(id));
        EXPECT_EQ(load.wrongly_kept, 0u);
      }
    }
    expect_intact();
  }
  // No living prefill worker holds a block.
  void expect_all_free() {
    for (size_t i = 0; i < prefill_.size(); ++i) {
      if (runs(*prefill_members_[i])) {
        EXPECT_EQ(prefill_[i]->cache().free_blocks(), 60u);
      }
    }
  }
  void expect_intact() {
    for (auto& decode : decode_) {
      EXPECT_EQ(decode->cache().damaged(), 0u) << "a byte came to a block that was free";
    }
    EXPECT_TRUE(fabric_->violations().empty()) << fabric_->violations().front();
  }

 private:
  bool runs(const Member& member) const { return now() < member.dead_at && !member.stopped; }
  void kill(Member& member, Time when) {
    fabric_->kill(member.node, when);
    member.dead_at = when;
  }
  void add(bool decode, const KvLayout& layout, uint32_t seed, bool own_memory) {
    Member& member = members_.emplace_back();
    member.node = members_.size() - 1;
    member.layout = layout;
    auto& side = decode ? decode_members_ : prefill_members_;
    BatonConnectorOptions options = options_;
    options.worker.name = absl::StrCat(decode ? "decode-" : "prefill-", side.size());
    options.worker.key = *ClusterKey::from_bytes("a key for this test only");
    options.worker.clock = &fabric_->clock();
    options.worker.settings = {{"peer.redial_ms", "5000"}};
    options.worker.extra_providers = {fabric_->provider_factory(member.node)};
    options.worker.require = "sim";
    absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::create(options.worker);
    fabric_->attach(**worker, member.node);
    member.worker = worker->get();
    member.connector = make_baton_connector(*std::move(worker), options);
    side.push_back(&member);
    std::vector<void*> memory;
    if (own_memory) memory = member.buffers();
    if (decode) {
      decode_.push_back(std::make_unique<TestDecode>(*member.connector, layout, seed, memory));
    } else {
      prefill_.push_back(std::make_unique<TestPrefill>(*member.connector, layout, seed, memory));
      addresses_.push_back(member.connector->address());
    }
  }

  const Time lease_ = Time::zero();
  BatonConnectorOptions options_;
  std::mt19937 random_;
  uint32_t rails_ = 0;
  std::optional<sim::SimFabric> fabric_;
  std::list<Member> members_;
  std::vector<Member*> prefill_members_, decode_members_;
  std::vector<std::string> addresses_;
  std::vector<std::unique_ptr<TestPrefill>> prefill_;
  std::vector<std::unique_ptr<TestDecode>> decode_;
};

struct Degrees {
  uint32_t prefill, decode;
};
inline constexpr Degrees kDegrees[] = {{2, 1}, {1, 2}, {4, 2}, {2, 4}, {3, 1}, {1, 1}};

}  // namespace baton::kvtransfer
