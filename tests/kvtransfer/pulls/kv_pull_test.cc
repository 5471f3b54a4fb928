// Loads that pull, over every real provider: who holds which blocks until when, and prefill workers
// that do not keep to the protocol. What pushes share with them is in kv_connector_test.cc.
#include "kvtransfer/internal/connector/kv_messages.h"
#include "tests/kvtransfer/kv_pair.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

KvLoad pull(KvRequestId id, const std::string& prefill, uint32_t first_token = 0) {
  KvLoad load;
  load.id = id;
  load.prefill = prefill;
  load.first_token = first_token;
  load.pull = true;
  return load;
}

class KvPullTest : public OverEveryProvider<std::tuple<std::string, bool>> {
 protected:
  KvPairOptions options() const {
    KvPairOptions options;
    options.provider = std::get<0>(GetParam());
    options.threads = std::get<1>(GetParam());
    options.allow_pull = true;
    return options;
  }
};

// Also one that is gone: it may have stood still, and go on.
TEST_P(KvPullTest, ADecodeThatStopsHoldsBlocksForItsLeaseAndNoLonger) {
  KvPairOptions with = options();
  with.max_lease = std::chrono::seconds(1);  // less than is asked for
  KvPair pair(with);
  pair.prefill->stop_before_layer(2);
  ASSERT_TRUE(pair.decode->start(pull(1, pair.address()), 12).ok());
  pair.until([&] { return pair.prefill->jobs_seen() == 1; });
  pair.decode.reset();
  pair.decode_connector = nullptr;
  pair.until([&] { return pair.prefill->open_jobs() == 0; });
  EXPECT_EQ(pair.prefill->cache().free_blocks(), 60u);
}

// Not before: who is gone may have stood still in the middle of a copy, and go on with it.
TEST_P(KvPullTest, ADecodeThatIsGoneLetsNothingGo) {
  KvPair pair(options());
  pair.prefill->stop_before_layer(2);
  KvLoad load = pull(1, pair.address());
  load.lease = kLongEnough;
  ASSERT_TRUE(pair.decode->start(std::move(load), 12).ok());
  pair.until([&] { return pair.decode->load(1).verified == 2; });
  pair.decode.reset();
  pair.decode_connector = nullptr;
  pair.until([&] { return pair.prefill_connector->stats().jobs_failed == 1; });
  for (int i = 0; i < 100; ++i) pair.step();
  EXPECT_EQ(pair.prefill->open_jobs(), 1u);
  EXPECT_EQ(pair.prefill->cache().free_blocks(), 57u);
}

TEST_P(KvPullTest, APrefillWithoutAllowPullSaysSo) {
  KvPairOptions with = options();
  with.allow_pull = false;
  KvPair pair(with);
  ASSERT_TRUE(pair.decode->start(pull(1, pair.address()), 12).ok());
  pair.run_to_end();
  const absl::Status status = pair.decode->load(1).status;
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(text(status), AllOf(HasSubstr("prefill-0"), HasSubstr("allow_pull")));
  ASSERT_TRUE(pair.decode->start(2, pair.address(), 12).ok());
  pair.run_to_end();
  EXPECT_TRUE(pair.decode->load(2).status.ok());
}

INSTANTIATE_TEST_SUITE_P(Providers, KvPullTest,
                         ::testing::Combine(::testing::ValuesIn(real_providers()),
                                            ::testing::Bool()),
                         [](const auto& param) {
                           return std::get<0>(param.param) +
                                  (std::get<1>(param.param) ? "_threads" : "_inline");
                         });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(KvPullTest);

// A bare worker that plays prefill for an honest decode connector.
class KvFalsePrefillTest : public OverEveryProvider<std::string> {
 protected:
  void SetUp() override {
    OverEveryProvider::SetUp();
    if (IsSkipped()) return;
    auto worker = Worker::create(options_for(GetParam(), "mallory").worker);
    ASSERT_TRUE(worker.ok()) << worker.status();
    worker_ = *std::move(worker);
    connector_ = make_or_fail(options_for(GetParam(), "decode-0"));
    ASSERT_NE(connector_, nullptr);
    decode_.emplace(*connector_, test_layout(80), 2);
    ASSERT_TRUE(decode_->start(pull(1, worker_->address()), 12).ok());
    EXPECT_EQ(hear_request(), kKvPullVersion);
  }
  // The next request's version. What is sent from now on is about that load.
  uint16_t hear_request() {
    until([&] { return worker_->next_notification(request_); });
    KvMessagePart part;
    EXPECT_TRUE(decode_kv_part(request_.payload, part).ok());
    EXPECT_EQ(part.kind, KvMessageKind::kRequest);
    number_ = part.load;
    return part.version;
  }
  template <typename Fact>
  void until(Fact fact, CallSite from = CallSite::here()) {
    const auto turn = [&] {
      worker_->progress();
      decode_->step();
    };
    turn();
    baton::until(
        fact, turn, [&] { return state_of(worker_->stats(), "prefill"); }, from);
  }
  void send(KvMessageKind kind, std::string_view body, uint16_t version) {
    size_t offset = 0;
    std::string part;
    encode_kv_part(kind, number_, body, offset, part, version);
    ASSERT_TRUE(worker_->notify_detached(request_.peer, part).ok());
  }
  void send(KvMessageKind kind, std::string_view body) { send(kind, body, kv_version_of(kind)); }
  // Of a cache of ours that may be read.
  std::string offer() {
    memory_.resize(test_layout(4).bytes());
    auto region = worker_->register_memory(memory_.data(), memory_.size());
    EXPECT_TRUE(region.ok());
    KvOffer offer;
    offer.lease = kLongEnough;
    offer.layout = test_layout(4);
    offer.buffers = {{*worker_->remote_region(*region), 0}};
    if (forge_) offer.buffers[0].region.key ^= 1;
    std::string body;
    EXPECT_TRUE(encode_kv(offer, body).ok());
    return body;
  }
  // How the load ended.
  absl::Status end() {
    until([&] { return decode_->open() == 0; });
    EXPECT_EQ(decode_->cache().damaged(), 0u);
    EXPECT_EQ(decode_->load(1).verified, 0u);
    return decode_->load(1).status;
  }

  std::vector<std::byte> memory_;
  std::unique_ptr<Worker> worker_;
  std::unique_ptr<KvConnector> connector_;
  std::optional<TestDecode> decode_;
  Notification request_;
  uint64_t number_ = 0;
  bool forge_ = false;
};

// As one answers that speaks version 3 alone.
TEST_P(KvFalsePrefillTest, AnOlderReleaseRefusesAtOnceAndIsNamed) {
  send(KvMessageKind::kFailed,
       encode_kv_failure(absl::FailedPreconditionError(
           "KV message of version 4, this worker speaks version 3; install the same release")));
  const absl::Status status = end();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(text(status), AllOf(HasSubstr("mallory"), HasSubstr("speaks version 3")));
}

TEST_P(KvFalsePrefillTest, AnAnswerOfAnUnknownVersionFailsTheLoad) {
  send(KvMessageKind::kFailed, "whatever", 9);
  EXPECT_THAT(text(end()), HasSubstr("version 9"));
}

// Promise(kv): A malicious prefill worker fails its own loads only | every offer and block
//   is checked against the request
TEST_P(KvFalsePrefillTest, AnOfferThatMakesNoSenseFailsTheLoad) {
  send(KvMessageKind::kOffer, "nonsense");
  EXPECT_TRUE(absl::IsInvalidArgument(end()));
}

TEST_P(KvFalsePrefillTest, BlocksThatWereNotAskedForFailTheLoad) {
  send(KvMessageKind::kReady, kv_bytes(KvReady{0, 2, {0, 1}}));  // may overtake
  send(KvMessageKind::kOffer, offer());
  EXPECT_THAT(text(end()), HasSubstr("[2, 4) of layer 0"));
}

TEST_P(KvFalsePrefillTest, LayersThatDoNotExistFailTheLoad) {
  send(KvMessageKind::kOffer, offer());
  send(KvMessageKind::kReady, kv_bytes(KvReady{6, 0, {0}}));
  EXPECT_THAT(text(end()), HasSubstr("layer 6"));
}

TEST_P(KvFalsePrefillTest, BlocksOutsideItsCacheFailTheLoad) {
  send(KvMessageKind::kOffer, offer());
  send(KvMessageKind::kReady, kv_bytes(KvReady{0, 0, {4}}));
  EXPECT_TRUE(absl::IsInvalidArgument(end()));
}

TEST_P(KvFalsePrefillTest, AForgedKeyFailsTheLoad) {
  forge_ = true;
  send(KvMessageKind::kOffer, offer());
  send(KvMessageKind::kReady, kv_bytes(KvReady{0, 0, {0, 1, 2}}));
  EXPECT_FALSE(end().ok());
}

TEST_P(KvFalsePrefillTest, ASecondOfferIsNotLookedAt) {
  send(KvMessageKind::kOffer, offer());
  send(KvMessageKind::kOffer, "nonsense");
  send(KvMessageKind::kFailed, encode_kv_failure(absl::InternalError("let go")));
  EXPECT_THAT(text(end()), HasSubstr("let go"));
}

// They may overtake the offer, but more of them than any load has are not waited with.
TEST_P(KvFalsePrefillTest, BlocksWithoutAnOfferAreNotCollectedForEver) {
  const std::string ready = kv_bytes(KvReady{0, 0, std::vector<uint32_t>(KvReady::kMaxBlocks)});
  const size_t enough = kMaxKvMessage / sizeof(uint32_t) / KvReady::kMaxBlocks + 2;
  for (size_t i = 0; i < enough && decode_->open() > 0; ++i) {
    send(KvMessageKind::kReady, ready);
    until([] { return true; });
  }
  EXPECT_THAT(text(end()), HasSubstr("before the layout of their cache"));
}

// Nothing of it is for a load that is written.
TEST_P(KvFalsePrefillTest, WordsAboutPullsMeanNothingToAPush) {
  ASSERT_TRUE(decode_->start(2, worker_->address(), 12).ok());
  EXPECT_LT(hear_request(), kKvPullVersion);
  send(KvMessageKind::kOffer, offer());
  send(KvMessageKind::kReady, kv_bytes(KvReady{0, 0, {0}}));
  send(KvMessageKind::kLeaseRenewed, kv_bytes(KvLease{1, kLongEnough}));
  send(KvMessageKind::kFailed, encode_kv_failure(absl::InternalError("let go")));
  until([&] { return decode_->open() == 1; });
  EXPECT_THAT(text(decode_->load(2).status), HasSubstr("let go"));
}

TEST_P(KvFalsePrefillTest, DoneWithoutBlocksIsNoKv) {
  send(KvMessageKind::kOffer, offer());
  send(KvMessageKind::kDone, "token");
  send(KvMessageKind::kFailed, encode_kv_failure(absl::InternalError("let go")));
  EXPECT_TRUE(absl::IsInternal(end()));
  EXPECT_EQ(decode_->load(1).wrongly_kept, 0u);
}

INSTANTIATE_TEST_SUITE_P(Providers, KvFalsePrefillTest, ::testing::ValuesIn(real_providers()),
                         [](const auto& param) { return param.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(KvFalsePrefillTest);

}  // namespace
}  // namespace baton::kvtransfer
