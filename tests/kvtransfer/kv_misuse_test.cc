// What engines do wrong with connectors: blocks and keys that are used twice, more of everything
// than there is room for. Whatever it is ends, and the next load comes.
#include "kvtransfer/kv_plan.h"
#include "tests/fails_with.h"
#include "tests/kvtransfer/kv_pair.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

constexpr uint32_t kLayers = 6;  // of test_layout()

class KvMisuse : public OverEveryProvider<std::string> {
 protected:
  // Connectors with caches, and no engine.
  void make(uint32_t blocks, bool allow_pull = false) {
    KvPairOptions with;
    with.provider = GetParam();
    with.allow_pull = allow_pull;
    with.prefill_layout = with.decode_layout = test_layout(blocks, 0, 1);
    pair_.emplace(with);
    pair_->prefill.reset();
    pair_->decode.reset();
  }
  KvConnector& prefill() { return *pair_->prefill_connector; }
  KvConnector& decode() { return *pair_->decode_connector; }
  KvLoad load(KvRequestId id, const std::vector<uint32_t>& blocks) {
    return {.id = id,
            .prefill = prefill().address(),
            .tokens = std::vector<int32_t>(blocks.size() * kTestBlockTokens, 1),
            .blocks = blocks};
  }
  template <typename Fact>
  void until(Fact fact, CallSite from = CallSite::here()) {
    const auto both = [&] {
      prefill().progress();
      decode().progress();
      return fact();
    };
    pair_->until(both, from);
  }
  // Computes a job: each of its blocks is block 0 of the cache.
  void serve(uint64_t job, size_t tokens) {
    const std::vector<uint32_t> blocks(tokens / kTestBlockTokens);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      prefill().save_layer(job, layer, 0, blocks).IgnoreError();  // it may not be wanted any more
    }
    prefill().finish_job(job, absl::OkStatus());
    open_.push_back(job);
  }
  // Serves all who ask, and forgets what is over. Whether all is.
  bool serve_all() {
    while (const std::optional<KvJob> job = prefill().next_job()) {
      serve(job->job, job->tokens.size());
    }
    std::erase_if(open_, [&](uint64_t job) { return prefill().is_saved(job); });
    return open_.empty();
  }

  std::optional<KvPair> pair_;
  std::vector<uint64_t> open_;  // jobs that are finished, and not yet saved
};

TEST_P(KvMisuse, ABlockIsOneLoadsUntilItHasEnded) {
  make(20);
  ASSERT_TRUE(decode().start_load(load(1, {0, 1, 2})).ok());
  const absl::Status status = decode().start_load(load(2, {4, 3, 2}));
  EXPECT_THAT(status, fails_with(Code::kInvalidArgument, {"block 2 is in use"}));
  EXPECT_TRUE(absl::IsInvalidArgument(decode().start_load(load(2, {5, 6, 5}))));
  KvLoad nowhere = load(2, {7, 8});
  nowhere.prefill = "baton1:nonsense";
  EXPECT_FALSE(decode().start_load(nowhere).ok());
  // Of what was refused nothing is kept.
  ASSERT_TRUE(decode().start_load(load(2, {3, 4, 5, 6, 7, 8})).ok());
  until([&] {
    serve_all();
    return decode().layers_loaded(1) == kLayers && decode().layers_loaded(2) == kLayers;
  });
  // Complete, but what arrived may arrive once more.
  EXPECT_TRUE(absl::IsInvalidArgument(decode().start_load(load(3, {0}))));
  until([&] { return decode().end_load(1); });
  ASSERT_TRUE(decode().start_load(load(3, {0})).ok());
  until([&] {
    const bool over = decode().end_load(2);
    return decode().end_load(3) && over && serve_all();
  });
}

TEST_P(KvMisuse, ABlockOfAFailedLoadIsItsUntilItHasEnded) {
  make(20);
  KvLoad first = load(1, {0, 1});
  ASSERT_TRUE(decode().start_load(first).ok());
  until([&] {
    while (const std::optional<KvJob> job = prefill().next_job()) {
      prefill().finish_job(job->job, absl::InternalError("the engine has a fault"));
      open_.push_back(job->job);
    }
    return !decode().load_status(1).ok();
  });
  EXPECT_TRUE(absl::IsInvalidArgument(decode().start_load(load(2, {1}))));
  until([&] { return decode().end_load(1); });
  EXPECT_TRUE(decode().start_load(load(2, {1})).ok());
}

TEST_P(KvMisuse, AKeyIsOneRequests) {
  make(20);
  KvLoad first = load(1, {0, 1, 2});
  first.key = "k";
  ASSERT_TRUE(decode().start_load(first).ok());
  KvLoad second = load(2, {3, 4, 5});
  second.key = "k";
  ASSERT_TRUE(decode().start_load(second).ok());
  until([&] { return !decode().load_status(2).ok(); });
  EXPECT_TRUE(absl::IsAlreadyExists(decode().load_status(2))) << decode().load_status(2);
  until([&] {
    serve_all();
    return decode().layers_loaded(1) == kLayers;
  });
}

TEST_P(KvMisuse, NoWorkerLoadsFromItself) {
  make(20, true);
  KvLoad own = load(1, {1, 2});
  own.prefill = decode().address();
  ASSERT_TRUE(decode().start_load(own).ok());
  until([&] { return !decode().load_status(1).ok(); });
  EXPECT_TRUE(absl::IsInvalidArgument(decode().load_status(1)));
  EXPECT_TRUE(decode().end_load(1));
}

TEST_P(KvMisuse, HundredsOfLoadsAtOnce) {
  constexpr uint32_t kLoads = 300;
  for (const bool pull : {false, true}) {
    make(kLoads, pull);
    for (uint32_t i = 0; i < kLoads; ++i) {
      KvLoad one = load(i + 1, {i});
      one.pull = pull;
      one.silence = kLongEnough;
      ASSERT_TRUE(decode().start_load(one).ok());
      prefill().progress();  // it answers meanwhile
    }
    KvRequestId ended = 0;
    until([&] {
      const bool served = serve_all();
      while (ended < kLoads && decode().layers_loaded(ended + 1) == kLayers &&
             decode().end_load(ended + 1)) {
        ++ended;
      }
      return served && ended == kLoads;
    });
    // All that they had is free again.
    ASSERT_TRUE(decode().start_load(load(1, {0})).ok());
    until([&] {
      serve_all();
      return decode().layers_loaded(1) == kLayers;
    });
  }
}

TEST_P(KvMisuse, MoreBindingsThanAPrefillTakes) {
  make(20);
  std::vector<uint64_t> jobs;
  absl::Status status;
  while (status.ok()) {
    const auto job = prefill().bind({.key = std::to_string(jobs.size()), .tokens = 4});
    status = job.status();
    if (job.ok()) jobs.push_back(*job);
    ASSERT_LT(jobs.size(), 10'000U);
  }
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  for (const uint64_t job : jobs) prefill().finish_job(job, absl::CancelledError("not now"));
  for (const uint64_t job : jobs) until([&] { return prefill().is_saved(job); });
  EXPECT_TRUE(prefill().bind({.key = "0", .tokens = 4}).ok());
}

TEST_P(KvMisuse, AGroupInTheWrongOrderIsRefused) {
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

TEST_P(KvMisuse, OfAPrefillThatBringsItsOwnMemory) {
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
  const auto job = must(connector->bind({.key = "k", .tokens = 17}));
  const std::vector<uint32_t> blocks = {0, 1, 2, 3};
  EXPECT_TRUE(absl::IsOutOfRange(connector->save_layer(job, 0, 0, blocks)));
  EXPECT_TRUE(absl::IsOutOfRange(connector->save_layer(job, 6, 0, {0})));
  EXPECT_TRUE(absl::IsOutOfRange(connector->save_layer(job, 0, 0, {4})));
  EXPECT_TRUE(connector->save_layer(job, 0, 0, {0, 1, 2}).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(
      connector->give_payload(job, std::string(KvConnector::kMaxPayload + 1, 'x'))));
  EXPECT_TRUE(absl::IsNotFound(connector->give_payload(99, "x")));
  EXPECT_TRUE(connector->give_payload(job, "x").ok());
  connector->finish_job(job, absl::InternalError("given up"));
  EXPECT_TRUE(absl::IsFailedPrecondition(connector->give_payload(job, "y")));
  baton::until([&] { return connector->is_saved(job); }, [&] { connector->progress(); });
  EXPECT_TRUE(absl::IsNotFound(connector->load_payload(5).status()));
  EXPECT_TRUE(connector->failed_blocks(5).empty());
  EXPECT_TRUE(absl::IsNotFound(connector->renew_load(5, kLongEnough)));
}

INSTANTIATE_TEST_SUITE_P(Providers, KvMisuse, ::testing::ValuesIn(real_providers()),
                         [](const auto& param) { return param.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(KvMisuse);

}  // namespace
}  // namespace baton::kvtransfer
