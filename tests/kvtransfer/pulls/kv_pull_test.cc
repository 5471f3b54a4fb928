// Loads that pull, over every real provider: who holds which blocks until when. What pushes share
// with them is in kv_connector_test.cc.
#include "tests/fails_with.h"
#include "tests/kvtransfer/kv_pair.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

KvLoad pull(KvRequestId id, const std::string& prefill) {
  return {.id = id, .prefill = prefill, .pull = true};
}

class KvPullTest : public OverEveryProvider<std::string> {
 protected:
  KvPairOptions options() const { return {.provider = GetParam(), .allow_pull = true}; }
};

// Should it still be in the middle of a read, that read does not count: prefill does not say any
// more that the blocks are held.
TEST_P(KvPullTest, ADecodeThatIsGoneFreesBlocksBeforeItsLeaseIsOver) {
  KvPair pair(options());
  pair.prefill->stop_before_layer(2);
  KvLoad load = pull(1, pair.address());
  load.lease = kLongEnough;
  ASSERT_TRUE(pair.decode->start(std::move(load), 12).ok());
  pair.until([&] { return pair.decode->load(1).verified == 2; });
  pair.decode.reset();
  pair.decode_connector = nullptr;
  pair.until([&] { return pair.prefill->open_jobs() == 0; });
  EXPECT_EQ(pair.prefill_connector->stats().jobs_failed, 1u);
  EXPECT_EQ(pair.prefill->cache().free_blocks(), 60u);
}

TEST_P(KvPullTest, APrefillWithoutAllowPullSaysSo) {
  KvPairOptions with = options();
  with.allow_pull = false;
  KvPair pair(with);
  ASSERT_TRUE(pair.decode->start(pull(1, pair.address()), 12).ok());
  pair.run_to_end();
  const absl::Status status = pair.decode->load(1).status;
  EXPECT_THAT(status, fails_with(Code::kFailedPrecondition, {"prefill-0", "allow_pull"}));
  ASSERT_TRUE(pair.decode->start(2, pair.address(), 12).ok());
  pair.run_to_end();
  EXPECT_TRUE(pair.decode->load(2).status.ok());
}

INSTANTIATE_TEST_SUITE_P(Providers, KvPullTest, ::testing::ValuesIn(real_providers()),
                         [](const auto& param) { return param.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(KvPullTest);

}  // namespace
}  // namespace baton::kvtransfer
