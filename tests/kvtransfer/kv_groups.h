// Tensor-parallel groups of engines without a model, with memory of their own, over a simulated
// fabric.
#pragma once

#include <list>

#include "kvtransfer/baton_connector.h"
#include "kvtransfer/kv_plan.h"
#include "tests/kvtransfer/kv_engines.h"
#include "tests/sim/fabric/fabric.h"
#include "tests/test.h"

namespace baton::kvtransfer {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

inline constexpr uint32_t kHeads = 8;

// A worker with a cache of any shape, in memory of its own.
struct Member {
  size_t node = 0;
  Worker* worker = nullptr;
  KvLayout layout;
  std::vector<std::vector<std::byte>> memory;  // outlives the connector
  std::unique_ptr<KvConnector> connector;
  Time dead_at = kNever;

  std::vector<void*> buffers() {
    for (const KvBuffer& buffer : layout.buffers) memory.emplace_back(buffer.bytes);
    std::vector<void*> all;
    for (auto& each : memory) all.push_back(each.data());
    return all;
  }
};

class Groups {
 public:
  // `lease` not zero: decode pulls. Prefill grants `max_lease` at most.
  Groups(uint32_t seed, uint32_t prefill_ranks, uint32_t decode_ranks, double bytes_per_second,
         Time lease = Time::zero(), Time max_lease = BatonConnectorOptions().max_lease)
      : lease_(lease),
        max_lease_(max_lease),
        random_(seed),
        fabric_(network(prefill_ranks + decode_ranks, bytes_per_second)) {
    const auto side = [&](uint32_t ranks, bool decode) {
      const uint32_t sizes[] = {4, 8, 12, 16};
      const uint32_t block = sizes[random_() % 4];
      const auto order = static_cast<KvLayout::Order>(random_() % 2);
      const auto pair = static_cast<KvLayout::Pair>(random_() % 4);
      const bool tensors = random_() % 2 == 0;
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        const KvHeads heads = shard_heads(kHeads, ranks, rank);
        const KvShape shape = test_shape(60, block, heads.first, heads.end - heads.first);
        Member& member = members_.emplace_back();
        member.node = members_.size() - 1;
        member.layout = KvLayout::paged(shape, order, pair, tensors);
        make(member, (decode ? "decode-" : "prefill-") + std::to_string(rank));
        if (decode) {
          decode_.push_back(std::make_unique<TestDecode>(*member.connector, member.layout,
                                                         seed + rank, member.buffers()));
        } else {
          prefill_.push_back(std::make_unique<TestPrefill>(*member.connector, member.layout,
                                                           seed + rank, member.buffers()));
          addresses_.push_back(member.connector->address());
        }
        (decode ? decode_members_ : prefill_members_).push_back(&member);
      }
    };
    side(prefill_ranks, false);
    side(decode_ranks, true);
  }
  ~Groups() {
    for (Member& member : members_) fabric_.detach(*member.worker);
  }

  TestPrefill& prefill(size_t rank) { return *prefill_[rank]; }
  TestDecode& decode(size_t rank) { return *decode_[rank]; }
  KvConnector& connector(size_t prefill_rank) { return *prefill_members_[prefill_rank]->connector; }
  KvConnector& decode_connector(size_t rank) { return *decode_members_[rank]->connector; }
  sim::SimFabric& fabric() { return fabric_; }
  uint32_t rails() const { return rails_; }
  std::mt19937& random() { return random_; }

  Time now() const { return fabric_.clock().now(); }

  void kill_decode(size_t rank, Time when) {
    fabric_.kill(decode_members_[rank]->node, when);
    decode_members_[rank]->dead_at = when;
  }
  void kill_prefill(size_t rank, Time when) {
    fabric_.kill(prefill_members_[rank]->node, when);
    prefill_members_[rank]->dead_at = when;
  }

  // Every decode worker loads request `id` from all prefill workers.
  void load(KvRequestId id, uint32_t tokens, Time timeout = seconds(60)) {
    for (auto& decode : decode_) {
      KvLoad load;
      load.id = id;
      load.timeout = timeout;
      load.shards = addresses_;
      load.key = "request " + std::to_string(id);
      load.loads_of_key = loads_of_key();
      load.pull = lease_ != Time::zero();
      if (load.pull) load.lease = lease_;
      ASSERT_TRUE(decode->start(std::move(load), tokens).ok());
    }
  }
  // Of the decode workers, those that one prefill worker hears from.
  uint32_t loads_of_key() const {
    return static_cast<uint32_t>(std::max<size_t>(1, decode_.size() / prefill_.size()));
  }

  bool run(const std::function<bool()>& ready, Time limit) {
    for (const Time end = now() + limit; now() < end;) {
      for (size_t i = 0; i < prefill_.size(); ++i) {
        if (now() < prefill_members_[i]->dead_at) prefill_[i]->step();
      }
      for (size_t i = 0; i < decode_.size(); ++i) {
        if (now() < decode_members_[i]->dead_at) decode_[i]->step();
      }
      if (ready()) return true;
      fabric_.run_for(microseconds(50));
    }
    return false;
  }
  bool run_to_end(Time limit = seconds(30)) {
    return run(
        [&] {
          for (size_t i = 0; i < decode_.size(); ++i) {
            if (now() < decode_members_[i]->dead_at && decode_[i]->open() > 0) return false;
          }
          for (size_t i = 0; i < prefill_.size(); ++i) {
            if (now() < prefill_members_[i]->dead_at && prefill_[i]->open_jobs() > 0) return false;
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
      if (now() < prefill_members_[i]->dead_at) {
        EXPECT_EQ(prefill_[i]->cache().free_blocks(), 60u);
      }
    }
  }
  void expect_intact() {
    for (auto& decode : decode_) {
      EXPECT_EQ(decode->cache().damaged(), 0u) << "a byte came to a block that was free";
    }
    EXPECT_TRUE(fabric_.violations().empty()) << fabric_.violations().front();
  }

 private:
  sim::SimOptions network(uint32_t nodes, double bytes_per_second) {
    sim::SimOptions sim;
    sim.seed = random_();
    sim.nodes = nodes;
    sim.rails = rails_ = 1 + random_() % 2;
    sim.link.bytes_per_second = bytes_per_second;
    sim.link.latency = microseconds(1 + random_() % 50);
    sim.link.loss = random_() % 2 == 0 ? 0.01 : 0;
    sim.link.duplicate = random_() % 2 == 0 ? 0.02 : 0;
    sim.link.reorder = random_() % 2 == 0 ? 0.05 : 0;
    sim.slice_bytes = size_t{2048} << random_() % 6;
    return sim;
  }

  void make(Member& member, const std::string& name) {
    BatonConnectorOptions options;
    options.worker.name = name;
    options.worker.key = *ClusterKey::from_bytes("a key for this test only");
    options.worker.clock = &fabric_.clock();
    options.worker.settings = {{"peer.redial_ms", "5000"}};
    options.worker.extra_providers = {fabric_.provider_factory(member.node)};
    options.worker.require = "sim";
    absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::create(options.worker);
    options.allow_pull = lease_ != Time::zero();
    options.max_lease = max_lease_;
    fabric_.attach(**worker, member.node);
    member.worker = worker->get();
    member.connector = make_baton_connector(*std::move(worker), options);
  }

  const Time lease_, max_lease_;
  std::mt19937 random_;
  uint32_t rails_ = 0;
  sim::SimFabric fabric_;
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
