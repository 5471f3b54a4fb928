// Two connectors in one process over every real provider.
#include "kvtransfer/kv_connector.h"

#include "tests/kvtransfer/kv_pair.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class KvConnectorTest : public OverEveryProvider<std::string> {
 protected:
  KvPairOptions options() const { return {.provider = GetParam()}; }
};

TEST_P(KvConnectorTest, SerializedSendsNothingBeforeTheJobIsFinished) {
  KvPairOptions with = options();
  with.mode = KvSendMode::kSerialized;
  KvPair pair(with);
  pair.prefill->stop_before_layer(5);  // all but one layer are saved
  ASSERT_TRUE(pair.decode->start(1, pair.address(), 12).ok());
  pair.until([&] { return pair.prefill->open_jobs() == 1; });
  for (int i = 0; i < 1000; ++i) pair.step();
  EXPECT_EQ(pair.prefill_connector->stats().bytes_sent, 0u);
  EXPECT_EQ(pair.decode->load(1).verified, 0u);
  pair.prefill->stop_before_layer(UINT32_MAX);
  pair.run_to_end();
  EXPECT_EQ(pair.decode->load(1).verified, 6u);
  EXPECT_FALSE(pair.decode->load(1).wrong);
}

TEST_P(KvConnectorTest, ALoadThatTakesTooLongFailsAndItsJobEnds) {
  KvPair pair(options());
  // They have met before: to meet may take a busy machine as long as the load has.
  ASSERT_TRUE(pair.decode->start(1, pair.address(), 12).ok());
  pair.run_to_end();
  pair.prefill->stop_before_layer(1);
  ASSERT_TRUE(pair.decode->start(2, pair.address(), 12, 0, std::chrono::seconds(2)).ok());
  // The engine may wait for the layer that does not come: this returns by itself.
  pair.until([&] { return pair.prefill->open_jobs() == 1; });
  const absl::Status status = pair.decode_connector->wait_for_layer(2, 5);
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(text(status), HasSubstr("2 s"));
  pair.run_to_end();
  EXPECT_EQ(pair.prefill->jobs_seen(), 2u);
  EXPECT_EQ(pair.prefill->unwanted(), 1u);
  EXPECT_EQ(pair.decode->cache().damaged(), 0u);
}

// What holds whether prefill writes or decode reads; the last parameter is whether decode pulls.
class KvEitherWayTest : public OverEveryProvider<std::tuple<std::string, bool>> {
 protected:
  static bool pulls() { return std::get<1>(GetParam()); }
  KvPairOptions options() const { return {.provider = provider(), .allow_pull = pulls()}; }
  static absl::Status start(KvPair& pair, KvRequestId id, uint32_t tokens) {
    return pair.decode->start({.id = id, .prefill = pair.address(), .pull = pulls()}, tokens);
  }
};

TEST_P(KvEitherWayTest, EveryByteOfManyLoadsArrivesOnce) {
  KvPairOptions with = options();
  for (const KvSendMode mode : {KvSendMode::kLayerwise, KvSendMode::kSerialized}) {
    with.mode = mode;
    KvPair pair(with);
    std::mt19937 random(3);
    uint64_t all = 0, pushed = 0;
    for (KvRequestId id = 1; id <= 20; ++id) {
      const uint32_t tokens = 1 + random() % 100;
      KvLoad load;
      load.id = id;
      load.prefill = pair.address();
      load.first_token = random() % tokens / kTestBlockTokens * kTestBlockTokens;
      load.pull = pulls() && id % 5 != 0;  // both ways, beside each other
      const uint32_t blocks =
          (tokens + kTestBlockTokens - 1) / kTestBlockTokens - load.first_token / kTestBlockTokens;
      all += blocks;
      if (!load.pull) pushed += blocks;
      pair.until([&] { return pair.decode->cache().free_blocks() >= 25; });
      ASSERT_TRUE(pair.decode->start(std::move(load), tokens).ok());
    }
    pair.run_to_end();
    for (KvRequestId id = 1; id <= 20; ++id) {
      const TestLoad& load = pair.decode->load(id);
      EXPECT_TRUE(load.status.ok()) << load.status;
      EXPECT_EQ(load.verified, 6u);
      EXPECT_FALSE(load.wrong) << id;
      EXPECT_EQ(load.payload, "token of " + std::to_string(id));
    }
    EXPECT_EQ(pair.decode->cache().damaged(), 0u);
    EXPECT_EQ(pair.prefill->cache().free_blocks(), 60u);
    EXPECT_EQ(pair.prefill_connector->stats().bytes_sent, pushed * 6 * 8 * 200);
    EXPECT_EQ(pair.decode_connector->stats().bytes_loaded, all * 6 * 8 * 200);
    EXPECT_THAT(pair.decode_connector->stats().route, HasSubstr(provider()));
  }
}

// A request in several parts, and more ready blocks than one message names.
TEST_P(KvEitherWayTest, LongSequencesOfShortBlocks) {
  KvPairOptions with = options();
  with.mode = KvSendMode::kSerialized;  // all blocks of a layer are ready at once
  constexpr uint32_t kTokens = 20'000;
  with.prefill_layout = with.decode_layout = KvLayout::dense(2, kTokens, 1, 1, 8, "test");
  KvPair pair(with);
  ASSERT_TRUE(start(pair, 1, kTokens).ok());
  pair.run_to_end();
  EXPECT_EQ(pair.decode->load(1).verified, 2u) << pair.decode->load(1).status;
  EXPECT_FALSE(pair.decode->load(1).wrong);
}

TEST_P(KvEitherWayTest, OtherLayoutsAndFewSlots) {
  KvPairOptions with = options();
  with.max_transfers = 3;
  with.prefill_layout = hybrid_layout(60, 8, 4, 20);
  with.decode_layout = hybrid_layout(80, 12, 8, 14);
  KvPair pair(with);
  for (KvRequestId id = 1; id <= 4; ++id) {
    ASSERT_TRUE(start(pair, id, 20 * static_cast<uint32_t>(id)).ok());
  }
  pair.run_to_end();
  for (KvRequestId id = 1; id <= 4; ++id) {
    EXPECT_EQ(pair.decode->load(id).verified, 6u) << pair.decode->load(id).status;
    EXPECT_FALSE(pair.decode->load(id).wrong);
  }
  EXPECT_EQ(pair.decode->cache().damaged(), 0u);
}

TEST_P(KvEitherWayTest, ACancelledLoadsBlocksCanBeReusedAtOnceOnBothSides) {
  KvPairOptions with = options();
  with.shape = "2MB/s";    // so that cancels meet bytes under way,
  with.max_transfers = 3;  // and what waits for a slot
  KvPair pair(with);
  std::mt19937 random(5);
  size_t cancelled = 0;
  for (KvRequestId id = 1; id <= 12; ++id) {
    pair.until([&] { return pair.decode->cache().free_blocks() >= 20; });
    ASSERT_TRUE(start(pair, id, 80).ok());
    pair.decode->cancel(id, random() % 4);
    // Freed blocks are overwritten and given to the next load at once.
    const uint32_t steps = random() % 200;
    for (uint32_t i = 0; i < steps; ++i) pair.step();
    EXPECT_EQ(pair.decode->cache().damaged(), 0u);
  }
  pair.run_to_end();
  for (KvRequestId id = 1; id <= 12; ++id) {
    EXPECT_FALSE(pair.decode->load(id).wrong);
    EXPECT_EQ(pair.decode->load(id).wrongly_kept, 0u);
    cancelled += absl::IsCancelled(pair.decode->load(id).status);
  }
  EXPECT_GT(cancelled, 0u);
  EXPECT_EQ(pair.decode->cache().damaged(), 0u);
  EXPECT_EQ(pair.prefill->cache().free_blocks(), 60u);
}

TEST_P(KvEitherWayTest, APrefillThatStopsFailsItsLoads) {
  KvPair pair(options());
  pair.prefill->stop_before_layer(2);
  ASSERT_TRUE(start(pair, 1, 12).ok());
  pair.until([&] { return pair.decode->load(1).verified == 2; });
  pair.prefill.reset();
  pair.prefill_connector = nullptr;
  pair.until([&] { return pair.decode->open() == 0; });
  EXPECT_TRUE(absl::IsUnavailable(pair.decode->load(1).status)) << pair.decode->load(1).status;
  EXPECT_THAT(text(pair.decode->load(1).status),
              AllOf(HasSubstr("prefill-0"), HasSubstr("2 of 6 layers"), HasSubstr("another")));
  EXPECT_EQ(pair.decode->cache().damaged(), 0u);
}

TEST_P(KvEitherWayTest, ALoadThatPrefillCannotServeSaysWhy) {
  KvPairOptions half = options();
  half.prefill_layout = test_layout(60, 0, 4);
  const struct {
    KvPairOptions with;
    std::function<void(TestPrefill&)> change;
    absl::StatusCode code;
    std::vector<const char*> says;
  } cases[] = {
      {half, [](TestPrefill&) {}, absl::StatusCode::kFailedPrecondition, {"[0, 4)", "[0, 8)"}},
      {options(),
       [](TestPrefill& prefill) { prefill.refuse(absl::ResourceExhaustedError("too long")); },
       absl::StatusCode::kResourceExhausted,
       {"too long"}},
      {options(),
       [](TestPrefill& prefill) { prefill.forget_a_block(); },
       absl::StatusCode::kInternal,
       {"blocks missing"}},
  };
  for (const auto& each : cases) {
    KvPair pair(each.with);
    each.change(*pair.prefill);
    ASSERT_TRUE(start(pair, 1, 12).ok());
    pair.run_to_end();
    const TestLoad& load = pair.decode->load(1);
    EXPECT_EQ(load.status.code(), each.code) << load.status;
    for (const char* word : each.says) EXPECT_THAT(text(load.status), HasSubstr(word));
    EXPECT_EQ(load.wrongly_kept, 0u);
    EXPECT_EQ(pair.prefill->cache().free_blocks(), 60u);
  }
}

TEST_P(KvConnectorTest, TheTimelineHasEveryTransferAndEveryArrival) {
  Timeline timeline("test");
  KvPairOptions with = options();
  with.timeline = &timeline;
  KvPair pair(with);
  ASSERT_TRUE(pair.decode->start(7, pair.address(), 30).ok());
  pair.run_to_end();
  uint64_t bytes = 0;
  std::vector<std::string> arrivals;
  for (const Span& span : timeline.spans()) {
    EXPECT_LE(span.begin, span.end);
    if (span.track == "transfer") {
      EXPECT_EQ(span.request, 7u);
      EXPECT_THAT(span.name, HasSubstr("tx layer "));
      bytes += span.bytes;
    } else if (span.track == "arrival") {
      EXPECT_EQ(span.request, 7u);
      arrivals.push_back(span.name);
    }
  }
  EXPECT_EQ(bytes, 8u * 6 * 8 * 200);
  EXPECT_THAT(arrivals, ::testing::SizeIs(6));
  EXPECT_TRUE(std::is_sorted(arrivals.begin(), arrivals.end()));
}

TEST_P(KvConnectorTest, MisuseIsRefused) {
  KvPair pair(options());
  KvConnector& decode = *pair.decode_connector;
  KvLoad load;
  load.id = 1;
  load.prefill = pair.address();
  load.tokens.assign(9, 1);
  load.blocks = {0, 1, 2};
  const auto refused = [&](auto change) {
    KvLoad bad = load;
    change(bad);
    return absl::IsInvalidArgument(decode.start_load(bad));
  };
  EXPECT_TRUE(refused([](KvLoad& l) { l.blocks.pop_back(); }));
  EXPECT_TRUE(refused([](KvLoad& l) { l.blocks[0] = 80; }));
  EXPECT_TRUE(refused([](KvLoad& l) { l.first_token = 3; }));
  EXPECT_TRUE(refused([](KvLoad& l) { l.first_token = 12; }));
  EXPECT_TRUE(refused([](KvLoad& l) { l.tokens.clear(); }));
  EXPECT_TRUE(refused([](KvLoad& l) { l.timeout = Time(0); }));
  EXPECT_TRUE(refused([](KvLoad& l) { l.transfer.emplace(); }));
  EXPECT_TRUE(refused([](KvLoad& l) {
    l.pull = true;
    l.lease = Time(0);
  }));
  EXPECT_TRUE(refused([](KvLoad& l) { l.prefill = "baton1:nonsense"; }));
  EXPECT_TRUE(absl::IsNotFound(decode.load_status(1)));
  EXPECT_EQ(decode.layers_loaded(1), 0u);
  EXPECT_TRUE(decode.end_load(1));
  ASSERT_TRUE(decode.start_load(load).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(decode.start_load(load)));
  EXPECT_TRUE(absl::IsInvalidArgument(decode.wait_for_layer(1, 6)));

  KvConnector& prefill = *pair.prefill_connector;
  pair.until([&] { return pair.prefill->jobs_seen() == 1; });
  EXPECT_TRUE(absl::IsNotFound(prefill.save_layer(999, 0, 0, {0})));
  EXPECT_FALSE(prefill.is_wanted(999));
  EXPECT_TRUE(prefill.is_saved(999));
  EXPECT_TRUE(absl::IsFailedPrecondition(prefill.allocate_cache(test_layout(4)).status()));
  pair.until([&] { return decode.end_load(1); });
}

INSTANTIATE_TEST_SUITE_P(Providers, KvConnectorTest, ::testing::ValuesIn(real_providers()),
                         [](const auto& param) { return param.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(KvConnectorTest);
INSTANTIATE_TEST_SUITE_P(Providers, KvEitherWayTest,
                         ::testing::Combine(::testing::ValuesIn(real_providers()),
                                            ::testing::Bool()),
                         [](const auto& param) {
                           return std::get<0>(param.param) +
                                  (std::get<1>(param.param) ? "_pull" : "_push");
                         });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(KvEitherWayTest);

}  // namespace
}  // namespace baton::kvtransfer
