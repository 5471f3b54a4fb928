// Tensor-parallel groups of engines that bring their own memory, over a simulated fabric: heads are
// gathered from several prefill workers, one prefill worker feeds several decode workers, prefill
// may be first; with loss, cancels and deaths. No byte comes wrong or late, and all that begins
// ends.
#include <gtest/gtest.h>

#include <list>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kvtransfer/baton_connector.h"
#include "kvtransfer/kv_plan.h"
#include "tests/kvtransfer/kv_engines.h"
#include "tests/sanitized.h"
#include "transport/sim/fabric.h"

namespace baton::kvtransfer {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr uint32_t kHeads = 8;

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
  Groups(uint32_t seed, uint32_t prefill_ranks, uint32_t decode_ranks, double bytes_per_second)
      : random_(seed), fabric_(network(prefill_ranks + decode_ranks, bytes_per_second)) {
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
  std::mt19937& random() { return random_; }

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
      for (auto& decode : decode_) decode->step();
      if (ready()) return true;
      fabric_.run_for(microseconds(50));
    }
    return false;
  }
  bool run_to_end(Time limit = seconds(30)) {
    return run(
        [&] {
          for (auto& decode : decode_) {
            if (decode->open() > 0) return false;
          }
          for (size_t i = 0; i < prefill_.size(); ++i) {
            if (now() < prefill_members_[i]->dead_at && prefill_[i]->open_jobs() > 0) return false;
          }
          return true;
        },
        limit);
  }

  void expect_intact() {
    for (auto& decode : decode_) {
      EXPECT_EQ(decode->cache().damaged(), 0u) << "a byte came to a block that was free";
    }
    EXPECT_TRUE(fabric_.violations().empty()) << fabric_.violations().front();
  }

 private:
  Time now() const { return fabric_.clock().now(); }

  sim::SimOptions network(uint32_t nodes, double bytes_per_second) {
    sim::SimOptions sim;
    sim.seed = random_();
    sim.nodes = nodes;
    sim.rails = 1 + random_() % 2;
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
    options.worker.extra_providers = {fabric_.provider_factory(member.node)};
    options.worker.require = "sim";
    absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::create(options.worker);
    if (!worker.ok()) std::abort();
    fabric_.attach(**worker, member.node);
    member.worker = worker->get();
    member.connector = make_baton_connector(*std::move(worker), options);
  }

  std::mt19937 random_;
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
constexpr Degrees kDegrees[] = {{2, 1}, {1, 2}, {4, 2}, {2, 4}, {3, 1}, {1, 1}};

TEST(KvGroupsOverSim, HeadsAreGatheredAndHandedOut) {
  const auto seeds = static_cast<uint32_t>(rounds_of(48, 12));
  for (uint32_t seed = 0; seed < seeds; ++seed) {
    SCOPED_TRACE(seed);
    const Degrees degrees = kDegrees[seed % std::size(kDegrees)];
    Groups groups(seed + 1, degrees.prefill, degrees.decode, 100e6);
    for (KvRequestId id = 1; id <= 3; ++id) groups.load(id, 1 + groups.random()() % 60);
    ASSERT_TRUE(groups.run_to_end());
    for (uint32_t rank = 0; rank < degrees.decode; ++rank) {
      for (KvRequestId id = 1; id <= 3; ++id) {
        const TestLoad& load = groups.decode(rank).load(id);
        EXPECT_TRUE(load.status.ok()) << load.status;
        EXPECT_EQ(load.verified, 6u);
        EXPECT_FALSE(load.wrong);
        EXPECT_EQ(load.payload, "token of " + std::to_string(id));
        EXPECT_EQ(load.wrongly_kept, 0u);
      }
    }
    for (uint32_t rank = 0; rank < degrees.prefill; ++rank) {
      EXPECT_EQ(groups.prefill(rank).jobs_seen(), 3u) << "each is computed once";
    }
    groups.expect_intact();
  }
}

TEST(KvGroupsOverSim, PrefillMayBeFirst) {
  const auto seeds = static_cast<uint32_t>(rounds_of(40, 10));
  for (uint32_t seed = 0; seed < seeds; ++seed) {
    SCOPED_TRACE(seed);
    const Degrees degrees = kDegrees[seed % std::size(kDegrees)];
    Groups groups(seed + 100, degrees.prefill, degrees.decode, 100e6);
    const uint32_t tokens = 1 + groups.random()() % 60;
    for (uint32_t rank = 0; rank < degrees.prefill; ++rank) {
      KvBinding binding{.key = "request 1", .tokens = tokens, .loads = groups.loads_of_key()};
      ASSERT_TRUE(groups.prefill(rank).bind(binding, 1).ok());
      EXPECT_TRUE(absl::IsAlreadyExists(groups.prefill(rank).bind(binding, 1)));
    }
    // For some time, perhaps to the end of its computing, nobody asks.
    groups.run([] { return false; }, microseconds(groups.random()() % 4000));
    groups.load(1, tokens);
    ASSERT_TRUE(groups.run_to_end());
    for (uint32_t rank = 0; rank < degrees.decode; ++rank) {
      const TestLoad& load = groups.decode(rank).load(1);
      EXPECT_TRUE(load.status.ok()) << load.status;
      EXPECT_EQ(load.verified, 6u);
      EXPECT_FALSE(load.wrong);
      EXPECT_EQ(load.payload, "token of 1");
    }
    EXPECT_EQ(groups.prefill(0).jobs_seen(), 0u) << "a bound job is not given again";
    groups.expect_intact();
  }
}

TEST(KvGroupsOverSim, ABoundJobEndsWithItsLeaseAndLivesWhileItIsRenewed) {
  Groups groups(7, 1, 1, 100e6);
  KvConnector& prefill = groups.connector(0);
  const auto job = prefill.bind({.key = "k", .tokens = 8, .lease = milliseconds(10)});
  ASSERT_TRUE(job.ok()) << job.status();
  for (int i = 0; i < 5; ++i) {
    groups.run([] { return false; }, milliseconds(8));
    EXPECT_TRUE(prefill.is_wanted(*job));
    EXPECT_TRUE(prefill.renew_job(*job, milliseconds(10)).ok());
  }
  prefill.finish_job(*job, absl::OkStatus());
  EXPECT_FALSE(prefill.is_saved(*job)) << "a load may still come";
  groups.run([] { return false; }, milliseconds(12));
  EXPECT_FALSE(prefill.is_wanted(*job));
  EXPECT_TRUE(prefill.is_saved(*job));
  EXPECT_TRUE(absl::IsNotFound(prefill.renew_job(*job, seconds(1))));
  // The key is free again.
  const auto again = prefill.bind({.key = "k", .tokens = 8, .lease = milliseconds(10)});
  ASSERT_TRUE(again.ok());
  groups.run([] { return false; }, milliseconds(12));
  const std::vector<uint32_t> blocks = {1};
  const absl::Status status = prefill.save_layer(*again, 0, 0, blocks);
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
}

TEST(KvGroupsOverSim, CancelsAndDeathsLeaveNothingBehind) {
  size_t failed = 0, kept = 0, lost = 0;
  const auto seeds = static_cast<uint32_t>(rounds_of(60, 12));
  for (uint32_t seed = 0; seed < seeds; ++seed) {
    SCOPED_TRACE(seed);
    const Degrees degrees = kDegrees[seed % std::size(kDegrees)];
    Groups groups(seed + 200, degrees.prefill, degrees.decode, 5e6);
    for (KvRequestId id = 1; id <= 3; ++id) groups.load(id, 20 + groups.random()() % 40);
    const bool dies = seed % 2 == 0;
    if (dies) {
      groups.kill_prefill(0, microseconds(500 + groups.random()() % 20'000));
    } else if (seed % 4 == 1) {
      groups.prefill(0).stop_before_layer(3);
      groups.run([] { return false; }, milliseconds(30));
      groups.prefill(0).refuse(absl::InternalError("by the test"));
    } else {
      for (uint32_t rank = 0; rank < degrees.decode; ++rank) {
        groups.decode(rank).cancel(1 + groups.random()() % 3, groups.random()() % 6);
      }
    }
    ASSERT_TRUE(groups.run_to_end());
    groups.run([] { return false; }, milliseconds(20));
    for (uint32_t rank = 0; rank < degrees.decode; ++rank) {
      for (KvRequestId id = 1; id <= 3; ++id) {
        const TestLoad& load = groups.decode(rank).load(id);
        EXPECT_FALSE(load.wrong);
        EXPECT_TRUE(load.verified == 6 || !load.status.ok());
        EXPECT_EQ(load.wrongly_kept, 0u) << "a block was said to be there and is not";
        if (load.status.ok()) continue;
        ++failed;
        kept += load.kept;
        lost += load.blocks.size() - load.kept;
      }
    }
    groups.expect_intact();
  }
  EXPECT_GT(failed, seeds / 2);
  EXPECT_GT(kept, 0u) << "what has come before prefill gave up need not be computed again";
  EXPECT_GT(lost, 0u);
}

TEST(KvGroupsOverSim, ARenewedLoadOutlivesItsTimeout) {
  for (bool renewed : {true, false}) {
    Groups groups(9, 2, 1, 100e6);
    for (size_t rank : {0, 1}) groups.prefill(rank).stop_before_layer(2);
    groups.load(1, 20, milliseconds(30));
    groups.run([] { return false; }, milliseconds(20));
    KvConnector& decode = groups.decode_connector(0);
    EXPECT_TRUE(absl::IsUnavailable(decode.load_payload(1).status()));
    if (renewed) {
      EXPECT_TRUE(decode.renew_load(1, seconds(2)).ok());
      EXPECT_TRUE(absl::IsInvalidArgument(decode.renew_load(1, Time(0))));
    }
    groups.run([] { return false; }, milliseconds(50));
    for (size_t rank : {0, 1}) groups.prefill(rank).stop_before_layer(UINT32_MAX);
    ASSERT_TRUE(groups.run_to_end());
    const TestLoad& load = groups.decode(0).load(1);
    EXPECT_EQ(load.status.ok(), renewed) << load.status;
    EXPECT_EQ(load.verified, renewed ? 6u : 2u);
    EXPECT_FALSE(load.wrong);
    EXPECT_TRUE(absl::IsNotFound(decode.renew_load(1, seconds(1))));
    groups.expect_intact();
  }
}

}  // namespace
}  // namespace baton::kvtransfer
