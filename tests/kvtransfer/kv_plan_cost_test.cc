// What a large plan costs: made for 128 layers and eight shards, posted for 4,096 blocks. That
// posting allocates nothing is a fact and asserted; times are printed.
#include "kvtransfer/kv_plan.h"
#include "tests/count_allocations.h"
#include "tests/sim/fabric/fabric.h"
#include "tests/test.h"
#include "transport/worker.h"

namespace baton::kvtransfer {
namespace {

constexpr uint32_t kBlocks = 4096;

KvLayout shard(uint32_t ranks, uint32_t rank, bool tensor_per_layer) {
  const KvHeads heads = shard_heads(8, ranks, rank);
  return KvLayout::paged({.layers = 128,
                          .blocks = kBlocks,
                          .block_tokens = 16,
                          .total_heads = 8,
                          .first_head = heads.first,
                          .heads = heads.end - heads.first,
                          .head_size = 8},
                         KvLayout::Order::kHnd, KvLayout::Pair::kJoined, tensor_per_layer);
}

template <typename F>
double microseconds_of(const F& f) {
  double best = 1e9;
  for (int i = 0; i < 20; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    f();
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    best = std::min(best, took.count());
  }
  return best;
}

std::vector<uint32_t> scattered(uint32_t seed) {
  std::vector<uint32_t> pages(kBlocks);
  std::iota(pages.begin(), pages.end(), 0u);
  std::shuffle(pages.begin(), pages.end(), std::mt19937(seed));
  return pages;
}

// Memory that nobody touches: transfers are posted, not executed.
struct Reserved {
  explicit Reserved(size_t size)
      : bytes(size),
        data(mmap(nullptr, size, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Reserved() { munmap(data, bytes); }
  size_t bytes;
  void* data;
};

std::unique_ptr<Worker> make_worker(sim::SimFabric& fabric, size_t node) {
  WorkerOptions options;
  options.name = node == 0 ? "source" : "target";
  options.key = *ClusterKey::from_bytes("a key for this test only");
  options.clock = &fabric.clock();
  options.extra_providers = {fabric.provider_factory(node)};
  options.require = "sim";
  auto worker = Worker::create(options);
  fabric.attach(**worker, node);
  return *std::move(worker);
}

TEST(KvPlanCost, ALargePlanIsMadeOnceAndPostedWithoutAllocating) {
  const KvLayout source = shard(1, 0, false);
  const double made = microseconds_of([&] {
    for (uint32_t rank = 0; rank < 8; ++rank) {
      ASSERT_TRUE(KvPlan::make(source, shard(8, rank, false)).ok());
    }
  });
  const double made_tensors = microseconds_of([&] {
    for (uint32_t rank = 0; rank < 8; ++rank) {
      ASSERT_TRUE(KvPlan::make(shard(1, 0, true), shard(8, rank, true)).ok());
    }
  });

  sim::SimFabric fabric(sim::SimOptions{.seed = 1, .nodes = 2});
  auto from = make_worker(fabric, 0);
  auto to = make_worker(fabric, 1);
  const KvLayout target = shard(8, 3, false);
  const auto plan = must(KvPlan::make(source, target));
  Reserved here(source.bytes()), there(target.bytes());
  ASSERT_NE(here.data, MAP_FAILED);
  ASSERT_NE(there.data, MAP_FAILED);
  TransferRequest request;
  request.local = *from->register_memory(here.data, here.bytes);
  request.remote = *to->remote_region(*to->register_memory(there.data, there.bytes));
  request.peer = *from->connect(to->address());
  const std::vector<uint32_t> sources = scattered(1), targets = scattered(2);
  size_t moves = 0;
  const auto post = [&] {
    return plan.for_each_move(0, {0, uint64_t{kBlocks} * 16}, {0, sources}, {0, targets},
                              KvPlan::kAllLayers, [&](const KvMove& move) {
                                ++moves;
                                request.local_layout = move.source;
                                request.remote_layout = move.target;
                                return from->submit(request).status();
                              });
  };
  ASSERT_TRUE(post().ok());
  const uint64_t before = allocations;
  const absl::Status status = post();
  EXPECT_EQ(allocations - before, 0u);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(moves, 2u) << "K and V, all layers, all pages: one transfer each time";
  const double posted = microseconds_of([&] { ASSERT_TRUE(post().ok()); });
  std::printf(
      "8 plans of 128 layers: made in %.0f us, %.0f us with a tensor for each layer\n"
      "posted for %u blocks: %.1f us\n",
      made, made_tensors, kBlocks, posted);
  for (auto* worker : {from.get(), to.get()}) fabric.detach(*worker);
}

}  // namespace
}  // namespace baton::kvtransfer
