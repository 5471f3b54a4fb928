// KV plans over agents: placements, and transfers between two layouts over every provider. That
// every byte is where it belongs for any pair of layouts is for kv_plan_test and
// tests/python/kv_plan_test.py.
#include "kvtransfer/agent_kv.h"

#include "tests/fails_with.h"
#include "tests/kvtransfer/agent_fixture.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr KvShape kShape{.layers = 2,
                         .blocks = 8,
                         .block_tokens = 16,
                         .total_heads = 4,
                         .heads = 4,
                         .head_size = 8,
                         .dtype = KvDtype::kBfloat16};

// A cache of one buffer, and its bytes.
struct Cache {
  Cache(const KvShape& shape, KvLayout::Order order, const char* model = "m") {
    KvLayout layout = KvLayout::paged(shape, order, KvLayout::Pair::kInBlock, false);
    layout.model.weights = model;
    bytes.resize(layout.buffers[0].bytes);
    place = must(KvPlacement::of(std::move(layout), {whole()}));
  }
  Descriptor whole() const { return {reinterpret_cast<uint64_t>(bytes.data()), bytes.size(), 0}; }
  // The first byte of K of a token and head, in layer 0.
  uint8_t& at(int64_t block, uint64_t token, uint64_t head) {
    const KvField& key = place.layout.groups[0].fields[0];
    return bytes[static_cast<uint64_t>(block) * key.block_stride + token * key.token_stride +
                 head * key.head_stride];
  }
  std::vector<uint8_t> bytes;
  KvPlacement place;
};

class AgentKvTest : public AgentTest {
 protected:
  void SetUp() override {
    AgentTest::SetUp();
    if (IsSkipped()) return;
    KvShape larger = kShape;
    larger.block_tokens = 32;
    here_.emplace(kShape, KvLayout::Order::kNhd);
    there_.emplace(larger, KvLayout::Order::kHnd);
    ASSERT_TRUE(a_->register_memory({here_->whole()}).ok());
    ASSERT_TRUE(b_->register_memory({there_->whole()}).ok());
    introduce(*a_, *b_);
  }
  absl::StatusOr<AgentKvPlan> plan(Op op) {
    const auto theirs = KvPlacement::decode(there_->place.encode());
    if (!theirs.ok()) return theirs.status();
    return AgentKvPlan::make(*a_, op, here_->place, "beta", *theirs);
  }
  AgentKvRequest request() const {
    return {.local = {{mine_blocks_}}, .remote = {{their_blocks_}}};
  }

  const std::vector<int64_t> mine_blocks_{6, 1, 3};
  const std::vector<int64_t> their_blocks_{2, 5};
  std::optional<Cache> here_, there_;
};

TEST_P(AgentKvTest, WritesAndReadsBetweenTwoLayouts) {
  std::iota(here_->bytes.begin(), here_->bytes.end(), uint8_t{1});
  const auto push = must(plan(Op::kWrite));
  EXPECT_TRUE(push.plan().complete());
  EXPECT_EQ(push.op(), Op::kWrite);
  EXPECT_EQ(push.remote_agent(), "beta");
  const auto write = must(push.make_transfer(*a_, request(), "all of it"));
  ASSERT_TRUE(run(write).ok());
  EXPECT_EQ(heard(*b_, 1)[0].payload, "all of it");
  for (uint64_t token = 0; token < 48; ++token) {
    for (uint64_t head = 0; head < 4; ++head) {
      ASSERT_EQ(there_->at(their_blocks_[token / 32], token % 32, head),
                here_->at(mine_blocks_[token / 16], token % 16, head))
          << token << " " << head;
    }
  }
  EXPECT_EQ(a_->telemetry(write)->bytes, 48 * push.plan().parts()[0].bytes_per_token() * 2);
  EXPECT_TRUE(a_->release(write, kLong).ok());

  const std::vector<uint8_t> before = here_->bytes;
  std::fill(here_->bytes.begin(), here_->bytes.end(), uint8_t{0});
  const auto pull = must(plan(Op::kRead));
  const auto read = must(pull.make_transfer(*a_, request()));
  ASSERT_TRUE(run(read).ok());
  for (const int64_t block : mine_blocks_) {
    const uint64_t stride = here_->place.layout.groups[0].fields[0].block_stride;
    const auto from = static_cast<std::ptrdiff_t>(static_cast<uint64_t>(block) * stride);
    EXPECT_TRUE(std::equal(here_->bytes.begin() + from,
                           here_->bytes.begin() + from + static_cast<std::ptrdiff_t>(stride),
                           before.begin() + from));
  }
}

// Of a sequence of so many tokens the blocks may have more.
TEST_P(AgentKvTest, ALengthEndsWhatIsMoved) {
  std::iota(here_->bytes.begin(), here_->bytes.end(), uint8_t{1});
  const auto push = must(plan(Op::kWrite));
  AgentKvRequest some = request();
  some.length = 33;  // of 48 for which both have blocks
  const auto write = must(push.make_transfer(*a_, some));
  ASSERT_TRUE(run(write).ok());
  const uint64_t unit = push.plan().parts()[0].unit;
  const uint64_t moved = (33 + unit - 1) / unit * unit;
  EXPECT_EQ(a_->telemetry(write)->bytes, moved * push.plan().parts()[0].bytes_per_token() * 2);
  some.tokens = {0, 33};
  EXPECT_TRUE(push.make_transfer(*a_, some).ok());
}

// Memory of a device may have the address of some of the host's.
TEST_P(AgentKvTest, WhatIsRegisteredAsMemoryOfTheHostIsNoDevices) {
  KvPlacement theirs = there_->place;
  KvGroup& group = theirs.layout.groups[0];
  for (KvPlace& place : group.fields[1].places) place.buffer = 1;
  theirs.layout.buffers.push_back(theirs.layout.buffers[0]);
  theirs.layout.buffers[1].device = KvDevice::kCuda;
  theirs.addresses.push_back(theirs.addresses[0]);
  ASSERT_TRUE(theirs.check().ok()) << theirs.check();
  EXPECT_THAT(AgentKvPlan::make(*a_, Op::kWrite, here_->place, "beta", theirs).status(),
              fails_with(Code::kNotFound, {"buffer 1 of the layout", "registered VRAM range"}));
}

TEST_P(AgentKvTest, RequestsThatMakeNoSenseAreRefused) {
  const auto push = must(plan(Op::kWrite));
  const auto refused = [&](const AgentKvRequest& request, const char* why) {
    EXPECT_THAT(push.make_transfer(*a_, request).status(),
                fails_with(Code::kInvalidArgument, {why}));
  };
  const std::vector<int64_t> bad{0, 8}, worse{-1};
  AgentKvRequest one = request();
  one.local = {{bad}};
  refused(one, "local block 1 of group 0 is 8, but that cache has 8 blocks");
  one = request();
  one.remote = {{worse}};
  refused(one, "remote block 0 of group 0 is -1");
  one = request();
  one.local.clear();
  refused(one, "0 lists of local blocks");
  one = request();
  one.tokens = {0, 49};
  refused(one, "tokens [0, 49)");
  one = request();
  one.tokens = {9, 8};
  refused(one, "end before it begins");
  one = request();
  one.layers = {2, 1};
  refused(one, "layers [2, 1)");
  one = request();
  one.tokens = {0, 32};
  one.length = 31;
  refused(one, "tokens [0, 32) of a sequence of 31");
  one = request();
  one.remote.emplace_back();
  refused(one, "2 lists of remote blocks");
  EXPECT_TRUE(absl::IsInvalidArgument(
      push.make_transfer(*a_, request(), std::string(kMaxAgentMessage + 1, 'x')).status()));
  one = request();
  one.local[0].first_block = uint64_t{1} << 33;
  refused(one, "would be number");
  EXPECT_TRUE(absl::IsInvalidArgument(push.make_transfer(*b_, request()).status()));
  EXPECT_EQ(a_->stats().transfers, 0u);

  const auto made = [&](Op op, const KvPlacement& local, const KvPlacement& remote) {
    return AgentKvPlan::make(*a_, op, local, "beta", remote).status();
  };
  EXPECT_TRUE(absl::IsInvalidArgument(made(static_cast<Op>(7), here_->place, there_->place)));
  KvPlacement broken = here_->place;
  broken.addresses.push_back(1);
  EXPECT_TRUE(absl::IsInvalidArgument(made(Op::kWrite, broken, there_->place)));
  EXPECT_TRUE(absl::IsInvalidArgument(made(Op::kRead, here_->place, broken)));
  for (const absl::Status& status : {made(Op::kWrite, here_->place, here_->place),
                                     made(Op::kWrite, there_->place, there_->place)}) {
    EXPECT_THAT(status, fails_with(Code::kNotFound, {"not within one registered DRAM range"}));
  }

  Cache other(kShape, KvLayout::Order::kNhd, "another model");
  ASSERT_TRUE(a_->register_memory({other.whole()}).ok());
  EXPECT_THAT(AgentKvPlan::make(*a_, Op::kWrite, other.place, "beta", there_->place).status(),
              fails_with(Code::kFailedPrecondition, {"another model"}));
  a_->remove_remote("beta");
  EXPECT_TRUE(absl::IsNotFound(push.make_transfer(*a_, request()).status()));
  EXPECT_TRUE(absl::IsNotFound(plan(Op::kRead).status()));
}

INSTANTIATE_TEST_SUITE_P(Providers, AgentKvTest, ::testing::ValuesIn(every_provider()),
                         [](const auto& one) { return one.param; });

TEST(KvPlacement, SurvivesTheWayAndNoDamage) {
  const Cache cache(kShape, KvLayout::Order::kNhd);
  const std::string good = cache.place.encode();
  const auto again = must(KvPlacement::decode(good));
  EXPECT_EQ(again.layout, cache.place.layout);
  EXPECT_EQ(again.addresses, cache.place.addresses);
  for (const std::string& none : {std::string(), good.substr(0, 17), "BATONKVQ" + good.substr(8)}) {
    EXPECT_THAT(std::string(KvPlacement::decode(none).status().message()),
                HasSubstr("not a KV layout"));
  }
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_TRUE(absl::IsDataLoss(KvPlacement::decode(good.substr(0, size)).status())) << size;
    std::string bad = good;
    bad[size] = static_cast<char>(bad[size] ^ 4);
    EXPECT_TRUE(absl::IsDataLoss(KvPlacement::decode(bad).status())) << size;
  }
  std::string newer = good;
  newer[8] = 2;
  EXPECT_THAT(std::string(KvPlacement::decode(newer).status().message()), HasSubstr("version 2,"));
  // Whole, but of nonsense: with two addresses for one buffer.
  KvPlacement odd = cache.place;
  odd.addresses.push_back(1);
  EXPECT_THAT(KvPlacement::decode(odd.encode()).status(),
              fails_with(Code::kDataLoss, {"2 addresses for the 1 buffers"}));
  odd = cache.place;
  odd.addresses[0] = UINT64_MAX - 5;
  EXPECT_TRUE(absl::IsInvalidArgument(odd.check()));
}

TEST(KvPlacement, IsPutTogetherOfGroups) {
  Cache cache(kShape, KvLayout::Order::kNhd);
  Cache more(kShape, KvLayout::Order::kHnd);
  more.place.layout.groups[0].layers = {2, 5};
  KvPlacement both = cache.place;
  ASSERT_TRUE(both.append(more.place).ok());
  EXPECT_EQ(both.layout.layers(), 4u);
  EXPECT_EQ(both.layout.groups[1].fields[0].places[1].buffer, 1u);
  EXPECT_EQ(both.addresses[1], more.whole().address);
  EXPECT_TRUE(absl::IsInvalidArgument(both.append(more.place))) << "the same layers";
  EXPECT_EQ(both.layout.layers(), 4u);

  // The same as addresses, in a buffer that begins earlier.
  KvGroup group = cache.place.layout.groups[0];
  const uint64_t start = cache.whole().address;
  const auto address = [&](size_t field, size_t layer) {
    return start + group.fields[field].places[layer].offset;
  };
  const std::vector<uint64_t> keys{address(0, 0), address(0, 1)};
  const std::vector<uint64_t> values{address(1, 0), address(1, 1)};
  const Descriptor wide{start - 100, cache.bytes.size() + 100, 0};
  const auto found = must(KvPlacement::of_addresses(group, {keys, values}, {wide}));
  EXPECT_EQ(found.layout.groups[0].fields[1].places[1].offset, values[1] - wide.address);
  // Of several buffers, the first that has all of it; one that has its beginning is said to be too
  // small, also where another one begins later.
  const Descriptor small{start, 100, 0}, later{values[1] + 8, cache.bytes.size(), 0};
  const auto whole = must(KvPlacement::of_addresses(group, {keys, values}, {small, later, wide}));
  EXPECT_EQ(whole.layout.groups[0].fields[1].places[1].buffer, 2u);
  EXPECT_EQ(KvPlacement::of_addresses(group, {keys, values}, {wide, small, wide})
                ->layout.groups[0]
                .fields[0]
                .places[0]
                .buffer,
            0u);
  const Descriptor cut{start, cache.bytes.size() - 1, 0};
  const absl::Status short_of =
      KvPlacement::of_addresses(group, {keys, values}, {cut, later}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(short_of)) << short_of;
  EXPECT_THAT(std::string(short_of.message()), ::testing::Not(HasSubstr("in none of")));
  const uint64_t end = start + cache.bytes.size();
  for (const std::vector<uint64_t>& outside : {std::vector<uint64_t>{end, end}, {1, 2}}) {
    EXPECT_THAT(
        std::string(KvPlacement::of_addresses(group, {outside, values}, {wide}).status().message()),
        HasSubstr("in none of the 1 buffers"));
  }
  for (const auto& fields : {std::vector<absl::Span<const uint64_t>>{keys}, {keys, values, keys}}) {
    const absl::Status status = KvPlacement::of_addresses(group, fields, {wide}).status();
    EXPECT_THAT(status, fails_with(Code::kInvalidArgument, {"fields for a group that has 2"}));
  }
  EXPECT_TRUE(absl::IsInvalidArgument(
      KvPlacement::of(cache.place.layout, {wide}, MemoryKind::kFile).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(KvPlacement::of(cache.place.layout, {}).status()));
  const auto of = [&](const KvLayout& layout, const std::vector<Descriptor>& buffers) {
    const absl::Status status = KvPlacement::of(layout, buffers, MemoryKind::kDram).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(of(cache.place.layout, {wide, wide}), HasSubstr("2 buffers for a layout that has 1"));
  EXPECT_THAT(of(cache.place.layout, {{start, cache.bytes.size() - 1, 0}}),
              HasSubstr("but its contents take"));
  KvLayout bad = cache.place.layout;
  bad.groups[0].block_tokens = 0;
  EXPECT_EQ(of(bad, {wide}), std::string(bad.check().message()));
  EXPECT_TRUE(KvPlacement::of(cache.place.layout, {wide}, MemoryKind::kVram).ok());
}

// Buffers are two of the caller's, and may be one and the same memory.
TEST(KvPlacement, FieldsThatOverlapInMemoryAreRefusedThoughInTwoBuffers) {
  KvLayout layout = KvLayout::paged(kShape, KvLayout::Order::kNhd, KvLayout::Pair::kSplit, false);
  layout.model.weights = "m";
  const uint64_t bytes = layout.buffers[0].bytes;
  const uint64_t base = uint64_t{1} << 32;
  const auto with_values_at = [&](uint64_t address) {
    return KvPlacement::of(layout, {{base, bytes, 0}, {address, bytes, 0}}).status();
  };
  EXPECT_TRUE(with_values_at(base + bytes).ok()) << with_values_at(base + bytes);
  for (const uint64_t address : {base, base + bytes / 2, base - 2}) {
    EXPECT_TRUE(absl::IsInvalidArgument(with_values_at(address)));
    EXPECT_THAT(std::string(with_values_at(address).message()), HasSubstr("overlap"));
  }
  // The same address of another device is another memory.
  EXPECT_TRUE(KvPlacement::of(layout, {{base, bytes, 0}, {base, bytes, 1}}).ok());
}

}  // namespace
}  // namespace baton::kvtransfer
