// KV between connectors whose caches are a device's: pushed or pulled, from one rank or two, into
// blocks of another size. Every number ends where it belongs. tests/engine_handoff/compose_test.cc
// has the same of sessions.
#include "kvtransfer/baton_connector.h"
#include "tests/gpudirect/fake/installed_fake.h"
#include "tests/std.h"
#include "tests/until.h"

namespace baton::kvtransfer {
namespace {

using gpudirect::CleanFake;
using gpudirect::FakeDriver;

constexpr uint32_t kLayers = 2, kBlocks = 6, kHeads = 4, kHeadSize = 8, kTokens = 40;
constexpr uint32_t kPrefillBlock = 16, kDecodeBlock = 8;

// Each block has K and then V, [token][head][element], in bf16.
KvLayout layout_of(uint32_t block_tokens, uint32_t first_head, uint32_t heads) {
  const KvShape shape{.layers = kLayers,
                      .blocks = kBlocks,
                      .block_tokens = block_tokens,
                      .total_heads = kHeads,
                      .first_head = first_head,
                      .heads = heads,
                      .head_size = kHeadSize};
  KvLayout layout = KvLayout::paged(shape, KvLayout::Order::kNhd, KvLayout::Pair::kInBlock, true);
  layout.model.weights = "a model";
  for (KvBuffer& buffer : layout.buffers) buffer.device = KvDevice::kCuda;
  return layout;
}

// A worker: its cache, and a connector over it.
struct Side {
  Side(FakeDriver& driver, const std::string& name, uint32_t block_tokens, uint32_t rank,
       uint32_t ranks)
      : fake(driver), tokens(block_tokens), heads(kHeads / ranks), first_head(rank * heads) {
    const KvLayout layout = layout_of(block_tokens, first_head, heads);
    for (const KvBuffer& buffer : layout.buffers) {
      memory.push_back(reinterpret_cast<void*>(fake.allocate(64 << 10, 0)));
      views.push_back(fake.view(reinterpret_cast<uint64_t>(memory.back()), buffer.bytes));
      std::memset(views.back(), 0, buffer.bytes);
    }
    BatonConnectorOptions options;
    options.worker.key = *ClusterKey::from_bytes("a secret for these tests, 32 bytes long");
    options.worker.providers = {"tcp"};
    options.worker.name = name;
    options.allow_pull = true;
    connector = *make_baton_connector(options);
    EXPECT_TRUE(connector->register_cache(layout, memory).ok());
  }
  ~Side() {
    connector.reset();
    for (void* each : memory) fake.free(reinterpret_cast<uint64_t>(each));
  }
  // Calls visit(place, number) with every number of K and V of the sequence in those blocks.
  template <typename Visit>
  void for_each(const std::vector<uint32_t>& blocks, const Visit& visit) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      for (uint32_t i = 0; i < kTokens * 2 * heads * kHeadSize; ++i) {
        const uint32_t element = i % kHeadSize, head = i / kHeadSize % heads;
        const uint32_t value = i / kHeadSize / heads % 2, token = i / kHeadSize / heads / 2;
        const auto number = static_cast<uint16_t>(1 + layer * 7919 + value * 104729 + token * 131 +
                                                  (first_head + head) * 17 + element);
        const size_t row = (blocks[token / tokens] * 2 + value) * tokens + token % tokens;
        const size_t place = (row * heads + head) * kHeadSize + element;
        visit(reinterpret_cast<uint16_t*>(views[layer])[place], number);
      }
    }
  }

  FakeDriver& fake;
  const uint32_t tokens, heads, first_head;
  std::vector<void*> memory;
  std::vector<std::byte*> views;
  std::unique_ptr<KvConnector> connector;
};

class DeviceConnectors : public testing::TestWithParam<std::tuple<bool, uint32_t>> {};

TEST_P(DeviceConnectors, EndInTheSameNumbers) {
  const auto [push, ranks] = GetParam();
  const std::vector<uint32_t> here = {4, 1, 2}, there = {5, 0, 3, 1, 2};
  gpudirect::FakeOptions without;
  without.attributes.erase(gpudirect::kDmaBufSupported);
  CleanFake driver(without);
  const auto turn = [&] { driver.fake().run_all(); };
  std::vector<std::unique_ptr<Side>> prefill;
  KvLoad load;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    prefill.push_back(std::make_unique<Side>(driver.fake(), "prefill", kPrefillBlock, rank, ranks));
    prefill.back()->for_each(here, [](uint16_t& at, uint16_t number) { at = number; });
    load.shards.push_back(prefill.back()->connector->address());
  }
  Side decode(driver.fake(), "decode", kDecodeBlock, 0, 1);
  load.id = 1;
  load.pull = !push;
  load.tokens.assign(kTokens, 3);
  load.blocks = there;
  ASSERT_TRUE(decode.connector->start_load(load).ok());
  size_t computed = 0;
  std::vector<uint64_t> jobs(prefill.size());
  until(
      [&] {
        for (size_t i = 0; i < prefill.size(); ++i) {
          KvConnector& each = *prefill[i]->connector;
          each.progress();
          const std::optional<KvJob> job = each.next_job();
          if (!job) continue;
          jobs[i] = job->job;
          for (uint32_t layer = 0; layer < kLayers; ++layer) {
            EXPECT_TRUE(each.save_layer(job->job, layer, 0, here).ok());
          }
          EXPECT_TRUE(each.give_payload(job->job, "a token").ok());
          each.finish_job(job->job, absl::OkStatus());
          ++computed;
        }
        decode.connector->progress();
        return !decode.connector->load_status(1).ok() ||
               (computed == prefill.size() && decode.connector->layers_loaded(1) == kLayers &&
                decode.connector->load_payload(1).ok());
      },
      turn);
  EXPECT_TRUE(decode.connector->load_status(1).ok()) << decode.connector->load_status(1);
  size_t wrong = 0;
  decode.for_each(there, [&](uint16_t& at, uint16_t number) { wrong += at == number ? 0 : 1; });
  EXPECT_EQ(wrong, 0U);
  EXPECT_EQ(*decode.connector->load_payload(1), "a token");
  until([&] { return decode.connector->end_load(1); }, turn);
  for (size_t i = 0; i < prefill.size(); ++i) {
    until([&] { return prefill[i]->connector->is_saved(jobs[i]); }, turn);
  }
}

INSTANTIATE_TEST_SUITE_P(All, DeviceConnectors,
                         testing::Combine(testing::Bool(), testing::Values(1U, 2U)),
                         [](const auto& each) {
                           return std::string(std::get<0>(each.param) ? "push" : "pull") +
                                  (std::get<1>(each.param) == 1 ? "_one_rank" : "_two_ranks");
                         });

}  // namespace
}  // namespace baton::kvtransfer
