// bf16 and fp32 into fp8 between two agents: every byte as KvRequantisePlan::run() makes
// it, over every provider; what is refused; and aborts, fences and ends in the middle.
#include "kvtransfer/agent_kv.h"
#include "kvtransfer/kv_requantise.h"
#include "tests/kvtransfer/agent_fixture.h"
#include "tests/kvtransfer/requantise/fp8_layout.h"
#include "tests/kvtransfer/requantise/requantised.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

using ::testing::HasSubstr;

// A cache that is registered with an agent.
struct PagedMemory {
  PagedMemory(Agent& agent, KvLayout layout) : owner(&agent) {
    for (const KvBuffer& buffer : layout.buffers) {
      bytes.emplace_back(buffer.bytes, std::byte{0x55});
    }
    for (auto& buffer : bytes) {
      pointers.push_back(buffer.data());
      ranges.push_back({reinterpret_cast<uint64_t>(buffer.data()), buffer.size(), 0});
    }
    const absl::StatusOr<KvPlacement> made = KvPlacement::of(std::move(layout), ranges);
    EXPECT_TRUE(made.ok()) << made.status();
    place = *made;
    const absl::Status registered = agent.register_memory(ranges);
    EXPECT_TRUE(registered.ok()) << registered;
  }
  ~PagedMemory() {
    if (owner != nullptr) owner->deregister_memory(ranges).IgnoreError();
  }
  void fill(uint32_t seed) {
    std::mt19937 random(seed);
    for (auto& buffer : bytes) {
      for (std::byte& byte : buffer) byte = static_cast<std::byte>(random());  // NaN and all
    }
  }
  Agent* owner;  // null: it has gone
  std::vector<std::vector<std::byte>> bytes;
  std::vector<std::byte*> pointers;
  std::vector<Descriptor> ranges;
  KvPlacement place;
};

// As requantised(), of two caches.
std::vector<std::vector<std::byte>> expected_of(const PagedMemory& source,
                                                const PagedMemory& target,
                                                absl::Span<const int64_t> from_blocks,
                                                absl::Span<const int64_t> to_blocks,
                                                KvTokens tokens, KvTokens layers,
                                                const KvShare& share = {}) {
  return requantised(source.place.layout, source.bytes, target.place.layout, target.bytes,
                     {.share = share,
                      .from = {from_blocks.begin(), from_blocks.end()},
                      .to = {to_blocks.begin(), to_blocks.end()},
                      .tokens = tokens,
                      .layers = layers});
}

class AgentRequantiseTest : public OverEveryProvider<std::string> {
 protected:
  void SetUp() override {
    OverEveryProvider::SetUp();
    if (IsSkipped()) return;
    AgentOptions options = agent_options("alpha", GetParam());
    options.staging_bytes = 128 << 10;  // slots of 32 KiB: most transfers are many chunks
    a_ = make_agent(std::move(options));
    b_ = make_agent(agent_options("beta", GetParam()));
    introduce(*a_, *b_);
  }
  void run(const AgentKvPlan& plan, const AgentKvRequest& request, std::string_view message = {}) {
    const auto id = plan.make_transfer(*a_, request, message);
    ASSERT_TRUE(id.ok()) << id.status();
    ASSERT_TRUE(a_->post(*id).ok());
    const absl::Status ended = a_->wait(*id, kLong);
    ASSERT_TRUE(ended.ok()) << ended;
    EXPECT_TRUE(a_->release(*id, kLong).ok());
  }
  std::unique_ptr<Agent> a_, b_;
};

TEST_P(AgentRequantiseTest, RandomPairsAreWhatTheReferenceSays) {
  for (uint32_t seed = 0; seed < 24; ++seed) {
    SCOPED_TRACE(seed);
    const Op op = seed % 2 == 0 ? Op::kWrite : Op::kRead;
    const RequantisedPair pair = random_pair(seed);
    const RequantisedBlocks& of = pair.blocks;
    PagedMemory source(op == Op::kWrite ? *a_ : *b_, pair.source);
    PagedMemory target(op == Op::kWrite ? *b_ : *a_, pair.target);
    source.fill(seed);
    introduce(*a_, *b_);
    const auto decoded = KvPlacement::decode((op == Op::kWrite ? target : source).place.encode());
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    const auto plan = AgentKvPlan::make_requantising(
        *a_, op, (op == Op::kWrite ? source : target).place, "beta", *decoded, of.share);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_TRUE(plan->requantises());
    const auto want = requantised(pair.source, source.bytes, pair.target, target.bytes, of);
    AgentKvRequest request{.tokens = of.tokens, .layers = of.layers};
    request.local = {{op == Op::kWrite ? of.from : of.to}};
    request.remote = {{op == Op::kWrite ? of.to : of.from}};
    run(*plan, request);
    ASSERT_EQ(target.bytes, want);
  }
}

// Prefill has 2 layers of 4 heads in bf16, decode the same in fp8 with larger blocks.
class AgentRequantiseOneTest : public AgentRequantiseTest {
 protected:
  static constexpr uint32_t kTokens = 1600;
  void SetUp() override {
    AgentRequantiseTest::SetUp();
    if (!IsSkipped()) lay_out();
  }
  void TearDown() override {
    prefill_.reset();
    decode_.reset();
  }
  void lay_out() {
    KvShape shape{.layers = 2,
                  .blocks = 100,
                  .block_tokens = 16,
                  .total_heads = 4,
                  .heads = 4,
                  .head_size = 16};
    prefill_.emplace(*a_,
                     KvLayout::paged(shape, KvLayout::Order::kNhd, KvLayout::Pair::kSplit, true));
    shape.blocks = 50;
    shape.block_tokens = 32;
    decode_.emplace(*b_, fp8_layout(shape, KvLayout::Order::kHnd, 1));
    prefill_->fill(7);
    from_.resize(100);
    to_.resize(50);
    std::iota(from_.rbegin(), from_.rend(), 0);
    std::iota(to_.begin(), to_.end(), 0);
    introduce(*a_, *b_);
  }
  absl::StatusOr<AgentKvPlan> push() {
    return AgentKvPlan::make_requantising(*a_, Op::kWrite, prefill_->place, "beta", decode_->place);
  }
  AgentKvRequest request() const { return {.local = {{from_}}, .remote = {{to_}}}; }
  auto expected() const {
    return expected_of(*prefill_, *decode_, from_, to_, {0, kTokens}, {0, 2});
  }
  std::optional<PagedMemory> prefill_, decode_;
  std::vector<int64_t> from_, to_;
};

TEST_P(AgentRequantiseOneTest, ATransferIsLikeOthers) {
  const auto plan = push();
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_TRUE(plan->complete());
  const uint64_t row = 4 * (16 + 4) * 2;  // of fp8 and scales, for a token and layer
  EXPECT_EQ(plan->plan().parts()[0].bytes_per_token(), row);
  const auto id = plan->make_transfer(*a_, request(), "request 5");
  ASSERT_TRUE(id.ok()) << id.status();
  EXPECT_TRUE(absl::IsFailedPrecondition(a_->wait(*id, Time::zero()))) << "not posted";
  const auto want = expected();
  ASSERT_TRUE(a_->post(*id).ok());
  ASSERT_TRUE(a_->wait(*id, kLong).ok());
  EXPECT_EQ(decode_->bytes, want);
  EXPECT_EQ(a_->telemetry(*id)->bytes, row * 2 * kTokens);
  EXPECT_GT(a_->telemetry(*id)->descriptors, 0u);
  std::vector<AgentMessage> heard;
  until([&] { return !heard.empty(); }, [&] { heard = b_->messages(); });
  EXPECT_EQ(heard[0].payload, "request 5");
  // Once more, of other values and with another message.
  prefill_->fill(8);
  const auto again = expected();
  ASSERT_NE(again, want);
  const std::string_view message = "again";
  ASSERT_TRUE(a_->post(*id, &message).ok());
  ASSERT_TRUE(a_->wait(*id, kLong).ok());
  EXPECT_EQ(decode_->bytes, again);
  for (heard.clear(); heard.empty();) heard = b_->messages();
  EXPECT_EQ(heard[0].payload, "again");
  EXPECT_TRUE(a_->release(*id, kLong).ok());
  EXPECT_TRUE(absl::IsNotFound(a_->post(*id)));
  // What is for nobody is done as soon as it is posted.
  AgentKvRequest nothing = request();
  nothing.tokens = {0, 0};
  const auto none = plan->make_transfer(*a_, nothing);
  ASSERT_TRUE(none.ok());
  ASSERT_TRUE(a_->post(*none).ok());
  EXPECT_EQ(*a_->state(*none), AgentTransferState::kDone);
}

TEST_P(AgentRequantiseOneTest, AbortedTransfersGiveTheirStagingBack) {
  const auto plan = push();
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (int i = 0; i < 10; ++i) {
    const auto id = plan->make_transfer(*a_, request());
    ASSERT_TRUE(a_->post(*id).ok());
    if (i % 3 == 0) {
      ASSERT_TRUE(a_->abort(*id).ok());
      const absl::Status ended = a_->wait(*id, kLong);
      EXPECT_TRUE(absl::IsCancelled(ended) || ended.ok()) << ended;
    }
    if (i % 3 == 1) {
      a_->abandon(*id);
    } else {
      EXPECT_TRUE(a_->release(*id, kLong).ok());
    }
  }
  // No thread reads what is not registered any more.
  ASSERT_TRUE(a_->deregister_memory(prefill_->ranges).ok());
  for (auto& buffer : prefill_->bytes) std::fill(buffer.begin(), buffer.end(), std::byte{0});
  const auto late = plan->make_transfer(*a_, request());
  EXPECT_FALSE(late.ok() && a_->post(*late).ok()) << "of memory that is not registered";
  ASSERT_TRUE(a_->register_memory(prefill_->ranges).ok());
  prefill_->fill(9);
  const auto again = push();
  ASSERT_TRUE(again.ok()) << again.status();
  const auto want = expected();
  run(*again, request());
  EXPECT_EQ(decode_->bytes, want);

  // Reads, in the middle of which they are aborted.
  introduce(*b_, *a_);
  const auto pull =
      AgentKvPlan::make_requantising(*b_, Op::kRead, decode_->place, "alpha", prefill_->place);
  ASSERT_TRUE(pull.ok()) << pull.status();
  const AgentKvRequest back{.local = {{to_}}, .remote = {{from_}}};
  for (int i = 0; i < 8; ++i) {
    const auto id = pull->make_transfer(*b_, back);
    ASSERT_TRUE(b_->post(*id).ok());
    until([&] { return b_->telemetry(*id)->descriptors != 0; });
    ASSERT_TRUE(b_->abort(*id).ok());
    EXPECT_TRUE(b_->release(*id, kLong).ok());
  }
  for (auto& buffer : decode_->bytes) std::fill(buffer.begin(), buffer.end(), std::byte{0});
  const auto last = pull->make_transfer(*b_, back);
  ASSERT_TRUE(b_->post(*last).ok());
  ASSERT_TRUE(b_->wait(*last, kLong).ok());
  EXPECT_EQ(decode_->bytes, want);
}

TEST_P(AgentRequantiseOneTest, SeveralAtATimeShareTheStaging) {
  const auto plan = push();
  ASSERT_TRUE(plan.ok()) << plan.status();
  const auto want = expected();
  std::vector<AgentTransferId> ids;
  for (uint64_t i = 0; i < 8; ++i) {  // each an eighth of the tokens
    AgentKvRequest one = request();
    one.tokens = {i * kTokens / 8, (i + 1) * kTokens / 8};
    ids.push_back(*plan->make_transfer(*a_, one));
  }
  for (const AgentTransferId id : ids) ASSERT_TRUE(a_->post(id).ok());
  for (const AgentTransferId id : ids) EXPECT_TRUE(a_->wait(id, kLong).ok());
  EXPECT_EQ(decode_->bytes, want);
}

TEST_P(AgentRequantiseOneTest, RequestsAndPairsThatMakeNoSenseAreRefused) {
  const auto plain = AgentKvPlan::make(*a_, Op::kWrite, prefill_->place, "beta", decode_->place);
  EXPECT_TRUE(absl::IsFailedPrecondition(plain.status()));
  EXPECT_THAT(std::string(plain.status().message()), HasSubstr("make a plan that requantises"));
  // fp8 does not become bf16 again.
  const auto back =
      AgentKvPlan::make_requantising(*a_, Op::kRead, prefill_->place, "beta", decode_->place);
  EXPECT_TRUE(absl::IsFailedPrecondition(back.status())) << back.status();
  const auto plan = push();
  ASSERT_TRUE(plan.ok()) << plan.status();
  AgentKvRequest bad = request();
  const std::vector<int64_t> outside{0, 100}, few{0};
  bad.local = {{outside}};
  EXPECT_THAT(std::string(plan->make_transfer(*a_, bad).status().message()),
              HasSubstr("local block 1 of group 0 is 100"));
  bad = request();
  bad.remote = {{few}};
  bad.tokens = {0, 100};
  const absl::Status short_of = plan->make_transfer(*a_, bad).status();
  EXPECT_TRUE(absl::IsInvalidArgument(short_of)) << short_of;
  EXPECT_TRUE(absl::IsInvalidArgument(plan->make_transfer(*b_, request()).status()));
  // The cache on this side is said to be a device's.
  KvPlacement device = prefill_->place;
  for (KvBuffer& buffer : device.layout.buffers) buffer.device = KvDevice::kCuda;
  const auto on_device =
      AgentKvPlan::make_requantising(*a_, Op::kWrite, device, "beta", decode_->place);
  EXPECT_TRUE(absl::IsNotFound(on_device.status())) << on_device.status();
  // Equal types: as they are.
  PagedMemory same(*b_, prefill_->place.layout);
  introduce(*a_, *b_);
  const auto equal =
      AgentKvPlan::make_requantising(*a_, Op::kWrite, prefill_->place, "beta", same.place);
  ASSERT_TRUE(equal.ok()) << equal.status();
  EXPECT_FALSE(equal->requantises());
  run(*equal, {.local = {{from_}}, .remote = {{from_}}});
  EXPECT_EQ(same.bytes, prefill_->bytes);
  a_->remove_remote("beta");
  EXPECT_TRUE(absl::IsNotFound(plan->make_transfer(*a_, request()).status()));
}

INSTANTIATE_TEST_SUITE_P(Providers, AgentRequantiseTest, ::testing::ValuesIn(every_provider()),
                         [](const auto& one) { return one.param; });
INSTANTIATE_TEST_SUITE_P(Providers, AgentRequantiseOneTest, ::testing::ValuesIn(every_provider()),
                         [](const auto& one) { return one.param; });

TEST(AgentRequantise, StagingThatIsTooSmallForABlockIsRefusedByNumber) {
  // Two groups, of which the second one needs more: 4 slots of 10,240 bytes, in whole pages.
  KvShape small{
      .layers = 1, .blocks = 1, .block_tokens = 32, .total_heads = 4, .heads = 4, .head_size = 16};
  KvShape large = small;
  large.block_tokens = 64;
  const auto status = [&](uint64_t staging_bytes) {
    AgentOptions options = agent_options("alpha", "tcp");
    options.staging_bytes = staging_bytes;
    const auto a = make_agent(std::move(options));
    const auto b = make_agent(agent_options("beta", "tcp"));
    const auto bf16 = [](const KvShape& shape) {
      return KvLayout::paged(shape, KvLayout::Order::kNhd, KvLayout::Pair::kSplit, true);
    };
    KvLayout layouts[] = {bf16(large), fp8_layout(large, KvLayout::Order::kNhd, 1)};
    for (KvLayout& layout : layouts) layout.groups[0].layers = {1};
    PagedMemory from(*a, bf16(small)), more(*a, layouts[0]);
    PagedMemory to(*b, fp8_layout(small, KvLayout::Order::kNhd, 1)), more_there(*b, layouts[1]);
    KvPlacement here = from.place, there = to.place;
    EXPECT_TRUE(here.append(more.place).ok());
    EXPECT_TRUE(there.append(more_there.place).ok());
    introduce(*a, *b);
    return AgentKvPlan::make_requantising(*a, Op::kWrite, here, "beta", there).status();
  };
  for (const uint64_t less : {uint64_t{1}, uint64_t{40960}, uint64_t{49151}}) {
    EXPECT_TRUE(absl::IsResourceExhausted(status(less))) << status(less);
    EXPECT_THAT(std::string(status(less).message()), HasSubstr("to at least 49152")) << less;
  }
  EXPECT_TRUE(status(49152).ok()) << status(49152);
}

// A layer has a window, and lies in a group of its own.
TEST(AgentRequantise, OnlyTheLastTokensOfAWindowAreConverted) {
  const auto a = make_agent(agent_options("alpha", "shm"));
  const auto b = make_agent(agent_options("beta", "shm"));
  KvShape shape{
      .layers = 1, .blocks = 8, .block_tokens = 4, .total_heads = 2, .heads = 2, .head_size = 8};
  PagedMemory full(*a, KvLayout::paged(shape, KvLayout::Order::kNhd, KvLayout::Pair::kSplit, true));
  PagedMemory near(*a,
                   KvLayout::paged(shape, KvLayout::Order::kHnd, KvLayout::Pair::kJoined, true));
  KvPlacement both = full.place;
  near.place.layout.groups[0].layers = {1};
  ASSERT_TRUE(both.append(near.place).ok());
  PagedMemory full_there(*b, fp8_layout(shape, KvLayout::Order::kHnd, 2));
  KvLayout window = fp8_layout(shape, KvLayout::Order::kNhd, 1);
  window.groups[0].window = 8;
  window.groups[0].layers = {1};
  PagedMemory near_there(*b, window);
  KvPlacement target = near_there.place;  // its groups are in another order
  ASSERT_TRUE(target.append(full_there.place).ok());
  full.fill(1);
  near.fill(2);
  introduce(*a, *b);
  const auto plan = AgentKvPlan::make_requantising(*a, Op::kWrite, both, "beta", target);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const std::vector<int64_t> blocks{0, 1, 2, 3, 4, 5};
  const auto want = expected_of(full, full_there, blocks, blocks, {0, 24}, {0, 9});
  near_there.place.layout.groups[0].window = near.place.layout.groups[0].window = 0;
  const auto want_near = expected_of(near, near_there, blocks, blocks, {16, 24}, {0, 9});
  const std::vector<int64_t> last{4, 5};
  const auto id = plan->make_transfer(
      *a, {.tokens = {0, 24}, .local = {{blocks}, {blocks}}, .remote = {{last, 4}, {blocks}}});
  ASSERT_TRUE(id.ok()) << id.status();
  ASSERT_TRUE(a->post(*id).ok());
  ASSERT_TRUE(a->wait(*id, kLong).ok());
  EXPECT_EQ(full_there.bytes, want);
  EXPECT_EQ(near_there.bytes, want_near);
}

// The other agent stands still in the middle: a fence waits for it, other transfers go on, and when
// it has gone the transfer fails.
TEST(AgentRequantise, FencesAndEndsWithAnAgentThatIsSilentAndGoes) {
  const auto a = make_agent(agent_options("alpha", "tcp"));
  auto silent = make_agent(agent_options("silent", "tcp", false));
  const auto other = make_agent(agent_options("other", "tcp"));
  KvShape shape{.layers = 2,
                .blocks = 400,
                .block_tokens = 16,
                .total_heads = 4,
                .heads = 4,
                .head_size = 64};
  PagedMemory from(*a, KvLayout::paged(shape, KvLayout::Order::kNhd, KvLayout::Pair::kSplit, true));
  PagedMemory to(*silent, fp8_layout(shape, KvLayout::Order::kNhd, 1));
  PagedMemory too(*other, fp8_layout(shape, KvLayout::Order::kNhd, 1));
  from.fill(3);
  introduce(*a, *silent);
  introduce(*a, *other);
  std::vector<int64_t> blocks(400);
  std::iota(blocks.begin(), blocks.end(), 0);
  const AgentKvRequest request{.local = {{blocks}}, .remote = {{blocks}}};
  const auto plan = AgentKvPlan::make_requantising(*a, Op::kWrite, from.place, "silent", to.place);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const auto first = plan->make_transfer(*a, request);
  ASSERT_TRUE(a->post(*first).ok());
  // Who waits for the other agent cannot have ended.
  EXPECT_TRUE(absl::IsAlreadyExists(a->post(*first)));
  EXPECT_TRUE(absl::IsFailedPrecondition(a->deregister_memory(from.ranges)));
  // It is in the middle of it.
  until([&] { return to.bytes[0][0] != std::byte{0x55}; }, [&] { silent->progress(); });
  ASSERT_EQ(to.bytes[1].back(), std::byte{0x55}) << "it is done already";
  // What is at the processor ends first; what was sent needs the other agent's word.
  const absl::Status early = a->release(*first, std::chrono::milliseconds(50));
  EXPECT_TRUE(early.ok() || absl::IsDeadlineExceeded(early)) << early;
  if (!early.ok()) {
    EXPECT_THAT(std::string(early.message()), HasSubstr("has not yet confirmed"));
    until([&] { return *a->local_free(*first); });  // nothing is converted any more
  }
  const auto elsewhere =
      AgentKvPlan::make_requantising(*a, Op::kWrite, from.place, "other", too.place);
  ASSERT_TRUE(elsewhere.ok()) << elsewhere.status();
  const auto second = elsewhere->make_transfer(*a, request);
  const auto want = expected_of(from, too, blocks, blocks, {0, 6400}, {0, 2});
  ASSERT_TRUE(a->post(*second).ok());
  EXPECT_TRUE(a->wait(*second, kLong).ok());
  EXPECT_EQ(too.bytes, want);
  until([&] { return absl::IsNotFound(a->status(*first)); },
        [&] {
          silent->progress();
          a->release(*first, Time::zero()).IgnoreError();
        });

  const auto third = plan->make_transfer(*a, request);
  ASSERT_TRUE(a->post(*third).ok());
  silent.reset();
  to.owner = nullptr;
  const absl::Status gone = a->wait(*third, kLong);
  EXPECT_FALSE(gone.ok());
  a->release(*third, kLong).IgnoreError();
  EXPECT_TRUE(absl::IsNotFound(a->status(*third)));
}

// More than there is address space for.
TEST(AgentRequantise, StagingForWhichThereIsNoMemoryIsRefused) {
  AgentOptions options = agent_options("alpha", "tcp");
  options.staging_bytes = uint64_t{1} << 60;
  const auto a = make_agent(std::move(options));
  const auto b = make_agent(agent_options("beta", "tcp"));
  const KvShape shape{
      .layers = 1, .blocks = 1, .block_tokens = 4, .total_heads = 2, .heads = 2, .head_size = 8};
  PagedMemory from(*a, KvLayout::paged(shape, KvLayout::Order::kNhd, KvLayout::Pair::kSplit, true));
  PagedMemory to(*b, fp8_layout(shape, KvLayout::Order::kNhd, 1));
  introduce(*a, *b);
  for (int i = 0; i < 2; ++i) {
    const absl::Status full =
        AgentKvPlan::make_requantising(*a, Op::kWrite, from.place, "beta", to.place).status();
    EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
    EXPECT_THAT(std::string(full.message()), HasSubstr("AgentOptions::staging_bytes"));
  }
}

// Its own thread converts; what is sent waits for the other agent, which is driven by the test.
TEST(AgentRequantise, WhileTheOtherAgentIsSilent) {
  const auto a = make_agent(agent_options("alpha", "tcp", false));
  const auto b = make_agent(agent_options("beta", "tcp", false));
  const KvShape shape{
      .layers = 2, .blocks = 40, .block_tokens = 16, .total_heads = 2, .heads = 2, .head_size = 16};
  PagedMemory from(*a, KvLayout::paged(shape, KvLayout::Order::kNhd, KvLayout::Pair::kSplit, true));
  PagedMemory to(*b, fp8_layout(shape, KvLayout::Order::kNhd, 1));
  from.fill(3);
  introduce(*a, *b);
  const auto plan = AgentKvPlan::make_requantising(*a, Op::kWrite, from.place, "beta", to.place);
  ASSERT_TRUE(plan.ok()) << plan.status();
  std::vector<int64_t> blocks(40);
  std::iota(blocks.begin(), blocks.end(), 0);
  const AgentKvRequest all{.local = {{blocks}}, .remote = {{blocks}}};
  const auto until = [&](const auto& ready) { run_agents(*a, *a, ready); };

  const auto id = plan->make_transfer(*a, all);
  EXPECT_TRUE(*a->local_free(*id)) << "it does not run";
  ASSERT_TRUE(a->post(*id).ok());
  EXPECT_FALSE(*a->local_free(*id));
  until([&] { return a->telemetry(*id)->descriptors > 0; });
  EXPECT_FALSE(*a->local_free(*id));
  AgentMemory other(*a, 64, 1);
  EXPECT_TRUE(a->deregister_memory({other.whole()}).ok()) << "it is none of its";
  EXPECT_TRUE(absl::IsFailedPrecondition(a->deregister_memory(from.ranges)));
  const absl::Status early = a->release(*id, Time::zero());
  EXPECT_TRUE(early.ok() || absl::IsDeadlineExceeded(early)) << early;
  if (!early.ok()) {
    const absl::Status posted = a->post(*id);
    EXPECT_TRUE(absl::IsFailedPrecondition(posted)) << posted;
    EXPECT_THAT(std::string(posted.message()), HasSubstr("is being released"));
    until([&] { return *a->local_free(*id); });
    run_agents(*a, *b, [&] { return *a->state(*id) != AgentTransferState::kRunning; });
    EXPECT_TRUE(absl::IsCancelled(a->status(*id))) << a->status(*id);
    EXPECT_TRUE(a->release(*id).ok());
  }

  // Of no tokens, but with words: they are said; and aborted while they are.
  AgentKvRequest none = all;
  none.tokens = {0, 0};
  const auto words = plan->make_transfer(*a, none, "words");
  ASSERT_TRUE(words.ok()) << words.status();
  ASSERT_TRUE(a->post(*words).ok());
  EXPECT_EQ(*a->state(*words), AgentTransferState::kRunning);
  run_agents(*a, *b, [&] { return *a->state(*words) != AgentTransferState::kRunning; });
  EXPECT_TRUE(a->status(*words).ok()) << a->status(*words);
  EXPECT_EQ(b->messages().size(), 1u);
  a->remove_remote("beta");
  introduce(*a, *b);  // nobody has answered there yet
  const auto anew = AgentKvPlan::make_requantising(*a, Op::kWrite, from.place, "beta", to.place);
  ASSERT_TRUE(anew.ok()) << anew.status();
  const auto unsaid = anew->make_transfer(*a, none, "words");
  ASSERT_TRUE(a->post(*unsaid).ok());
  until([&] { return a->stats().worker.open_transfers == 1; });
  ASSERT_TRUE(a->abort(*unsaid).ok());
  until([&] { return *a->state(*unsaid) != AgentTransferState::kRunning; });
  EXPECT_TRUE(absl::IsCancelled(a->status(*unsaid))) << a->status(*unsaid);
}

// Without a thread of their own the bytes move inside of the calls; the agent converts all the
// same.
TEST(AgentRequantise, WithoutProgressThreads) {
  for (const Op op : {Op::kWrite, Op::kRead}) {
    const auto a = make_agent(agent_options("alpha", "tcp", false));
    const auto b = make_agent(agent_options("beta", "tcp", false));
    KvShape shape{.layers = 2,
                  .blocks = 40,
                  .block_tokens = 16,
                  .total_heads = 2,
                  .heads = 2,
                  .head_size = 16};
    PagedMemory from(op == Op::kWrite ? *a : *b,
                     KvLayout::paged(shape, KvLayout::Order::kNhd, KvLayout::Pair::kSplit, true));
    PagedMemory to(op == Op::kWrite ? *b : *a, fp8_layout(shape, KvLayout::Order::kNhd, 1));
    from.fill(3);
    introduce(*a, *b);
    const auto plan = AgentKvPlan::make_requantising(*a, op, (op == Op::kWrite ? from : to).place,
                                                     "beta", (op == Op::kWrite ? to : from).place);
    ASSERT_TRUE(plan.ok()) << plan.status();
    std::vector<int64_t> blocks(40);
    std::iota(blocks.begin(), blocks.end(), 0);
    const auto want = expected_of(from, to, blocks, blocks, {0, 640}, {0, 2});
    const auto id = plan->make_transfer(*a, {.local = {{blocks}}, .remote = {{blocks}}}, "done");
    ASSERT_TRUE(a->post(*id).ok());
    run_agents(*a, *b, [&] { return *a->state(*id) != AgentTransferState::kRunning; });
    EXPECT_TRUE(a->status(*id).ok()) << a->status(*id);
    EXPECT_EQ(to.bytes, want);
    EXPECT_EQ(b->messages().size(), 1u);
  }
}

}  // namespace
}  // namespace baton::kvtransfer
