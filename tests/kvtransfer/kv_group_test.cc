// Engines that bring their own memory, over every real provider: heads gathered from two prefill
// workers, one prefill worker for two decode workers, blocks of different sizes; and what is
// refused.
#include <list>

#include "kvtransfer/kv_plan.h"
#include "tests/kvtransfer/kv_pair.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

using ::testing::HasSubstr;

// Ranks of one side, each with a cache in memory of the test's own.
struct Side {
  struct Member {
    std::vector<std::vector<std::byte>> memory;  // outlives the connector
    std::unique_ptr<KvConnector> connector;
  };
  Side(const std::string& provider, const std::string& name, uint32_t ranks, uint32_t block_tokens,
       KvLayout::Order order, KvLayout::Pair pair) {
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      const KvHeads heads = shard_heads(8, ranks, rank);
      layouts.push_back(KvLayout::paged(
          test_shape(60, block_tokens, heads.first, heads.end - heads.first), order, pair, true));
      Member& member = members.emplace_back();
      member.connector = make_or_fail(options_for(provider, name + std::to_string(rank)));
      for (const KvBuffer& buffer : layouts.back().buffers)
        member.memory.emplace_back(buffer.bytes);
      addresses.push_back(member.connector->address());
    }
  }
  std::vector<void*> memory(size_t rank) {
    std::vector<void*> all;
    for (auto& buffer : std::next(members.begin(), long(rank))->memory)
      all.push_back(buffer.data());
    return all;
  }
  KvConnector& connector(size_t rank) { return *std::next(members.begin(), long(rank))->connector; }

  std::list<Member> members;
  std::vector<KvLayout> layouts;
  std::vector<std::string> addresses;
};

class KvGroupTest : public OverEveryProvider<std::string> {
 protected:
  void move_requests(uint32_t prefill_ranks, uint32_t decode_ranks, bool bound) {
    Side prefills(GetParam(), "prefill-", prefill_ranks, 16, KvLayout::Order::kNhd,
                  KvLayout::Pair::kSplit);
    Side decodes(GetParam(), "decode-", decode_ranks, 12, KvLayout::Order::kHnd,
                 KvLayout::Pair::kInBlock);
    std::vector<std::unique_ptr<TestPrefill>> prefill;
    std::vector<std::unique_ptr<TestDecode>> decode;
    for (uint32_t rank = 0; rank < prefill_ranks; ++rank) {
      prefill.push_back(std::make_unique<TestPrefill>(
          prefills.connector(rank), prefills.layouts[rank], rank + 1, prefills.memory(rank)));
    }
    for (uint32_t rank = 0; rank < decode_ranks; ++rank) {
      decode.push_back(std::make_unique<TestDecode>(decodes.connector(rank), decodes.layouts[rank],
                                                    rank + 9, decodes.memory(rank)));
    }
    const auto turn = [&] {
      for (auto& each : prefill) each->step();
      for (auto& each : decode) each->step();
    };
    const uint32_t loads = decode_ranks / prefill_ranks + (decode_ranks < prefill_ranks ? 1 : 0);
    for (KvRequestId id = 1; id <= 5; ++id) {
      const auto tokens = static_cast<uint32_t>(7 + 17 * id);
      const std::string key = "request " + std::to_string(id);
      for (auto& each : prefill) {
        if (!bound) break;
        ASSERT_TRUE(each->bind({.key = key, .tokens = tokens, .loads = loads}, id).ok());
        each->step();
      }
      for (auto& each : decode) {
        KvLoad load;
        load.id = id;
        load.shards = prefills.addresses;
        load.key = key;
        load.loads_of_key = loads;
        load.first_token = id % 2 == 0 ? 12 : 0;
        ASSERT_TRUE(each->start(std::move(load), tokens).ok());
      }
      const auto over = [&](auto& side) {
        for (auto& each : side) {
          if constexpr (requires { each->open(); }) {
            if (each->open() > 0) return false;
          } else {
            if (each->open_jobs() > 0) return false;
          }
        }
        return true;
      };
      until([&] { return over(prefill) && over(decode); }, turn);
      for (auto& each : decode) {
        EXPECT_TRUE(each->load(id).status.ok()) << each->load(id).status;
        EXPECT_EQ(each->load(id).verified, 6u);
        EXPECT_FALSE(each->load(id).wrong);
        EXPECT_EQ(each->load(id).payload, "token of " + std::to_string(id));
        EXPECT_EQ(each->cache().damaged(), 0u);
      }
    }
    for (auto& each : prefill) EXPECT_EQ(each->jobs_seen(), bound ? 0u : 5u);
  }
};

TEST_P(KvGroupTest, OneDecodeGathersTheHeadsOfTwoPrefills) { move_requests(2, 1, false); }
TEST_P(KvGroupTest, OnePrefillFeedsTwoDecodes) { move_requests(1, 2, false); }
TEST_P(KvGroupTest, PrefillMayBeFirst) { move_requests(2, 2, true); }

TEST_P(KvGroupTest, AGroupInTheWrongOrderIsRefused) {
  KvPairOptions with;
  with.provider = GetParam();
  with.prefill_layout = KvLayout::transposed_keys(test_shape(60, 8, 0, 4));
  with.decode_layout = KvLayout::transposed_keys(test_shape(60, 8));
  KvPair pair(with);
  KvLoad load;
  load.id = 1;
  load.shards = {pair.address(), pair.address()};  // it is rank 0, and not also 1
  EXPECT_TRUE(absl::IsInvalidArgument(pair.decode->start(load, 12)));
  load.shards = {"127.0.0.1:1", pair.address()};
  ASSERT_TRUE(pair.decode->start(load, 12).ok());
  pair.run_to_end();
  EXPECT_FALSE(pair.decode->load(1).status.ok());
  EXPECT_EQ(pair.decode->cache().damaged(), 0u);
}

TEST_P(KvGroupTest, MisuseIsRefused) {
  auto connector = make_or_fail(options_for(GetParam(), "prefill-0"));
  EXPECT_TRUE(absl::IsFailedPrecondition(connector->bind({.key = "k", .tokens = 1}).status()));
  const KvLayout layout =
      KvLayout::paged(test_shape(4, 8), KvLayout::Order::kNhd, KvLayout::Pair::kStacked, true);
  std::vector<std::vector<std::byte>> memory;
  std::vector<void*> buffers;
  for (const KvBuffer& buffer : layout.buffers) {
    memory.emplace_back(buffer.bytes);
    buffers.push_back(memory.back().data());
  }
  const absl::Span<void* const> all(buffers);
  EXPECT_TRUE(absl::IsInvalidArgument(connector->register_cache(layout, all.subspan(1))));
  EXPECT_TRUE(absl::IsInvalidArgument(connector->register_cache(KvLayout(), {})));
  KvLayout device = layout;
  device.buffers[2].device = KvDevice::kCuda;
  EXPECT_FALSE(connector->register_cache(device, all).ok());  // it is the host's
  std::vector<void*> unmapped = buffers;
  unmapped.back() = nullptr;
  EXPECT_FALSE(connector->register_cache(layout, unmapped).ok());
  ASSERT_TRUE(connector->register_cache(layout, all).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(connector->register_cache(layout, all)));
  EXPECT_TRUE(absl::IsFailedPrecondition(connector->allocate_cache(layout).status()));

  const auto refused = [&](const KvBinding& binding) {
    return absl::IsInvalidArgument(connector->bind(binding).status());
  };
  EXPECT_TRUE(refused({.key = "", .tokens = 1}));
  EXPECT_TRUE(refused({.key = std::string(257, 'k'), .tokens = 1}));
  EXPECT_TRUE(refused({.key = "k", .tokens = 0}));
  EXPECT_TRUE(refused({.key = "k", .tokens = 1, .loads = 0}));
  EXPECT_TRUE(refused({.key = "k", .tokens = 1, .lease = Time(0)}));
  const auto job = connector->bind({.key = "k", .tokens = 17});
  ASSERT_TRUE(job.ok()) << job.status();
  const std::vector<uint32_t> blocks = {0, 1, 2, 3};
  EXPECT_TRUE(absl::IsOutOfRange(connector->save_layer(*job, 0, 0, blocks)));
  EXPECT_TRUE(absl::IsOutOfRange(connector->save_layer(*job, 6, 0, {0})));
  EXPECT_TRUE(absl::IsOutOfRange(connector->save_layer(*job, 0, 0, {4})));
  EXPECT_TRUE(connector->save_layer(*job, 0, 0, {0, 1, 2}).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(
      connector->give_payload(*job, std::string(KvConnector::kMaxPayload + 1, 'x'))));
  EXPECT_TRUE(absl::IsNotFound(connector->give_payload(99, "x")));
  EXPECT_TRUE(connector->give_payload(*job, "x").ok());
  connector->finish_job(*job, absl::InternalError("given up"));
  EXPECT_TRUE(absl::IsFailedPrecondition(connector->give_payload(*job, "y")));
  until([&] { return connector->is_saved(*job); }, [&] { connector->progress(); });
  EXPECT_TRUE(absl::IsNotFound(connector->load_payload(5).status()));
  EXPECT_TRUE(connector->failed_blocks(5).empty());
  EXPECT_TRUE(absl::IsNotFound(connector->renew_load(5, kLongEnough)));
}

INSTANTIATE_TEST_SUITE_P(Providers, KvGroupTest, ::testing::ValuesIn(real_providers()),
                         [](const auto& param) { return param.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(KvGroupTest);

}  // namespace
}  // namespace baton::kvtransfer
