// A prefill connector and peers that hold the cluster key but not to the protocol: whatever they
// send, the next decode worker is served.
#include "kvtransfer/internal/connector/kv_mailbox.h"
#include "kvtransfer/internal/connector/kv_messages.h"
#include "tests/kvtransfer/kv_pair.h"
#include "tests/test.h"
#include "transport/base/wire.h"

namespace baton::kvtransfer {
namespace {

using ::testing::HasSubstr;

// A bare worker that speaks to the prefill connector of a pair.
class KvHostileTest : public OverEveryProvider<std::string> {
 protected:
  void SetUp() override {
    OverEveryProvider::SetUp();
    if (IsSkipped()) return;
    KvPairOptions with;
    with.provider = GetParam();
    with.allow_pull = true;
    pair_ = std::make_unique<KvPair>(with);
    absl::StatusOr<std::unique_ptr<Worker>> worker =
        Worker::create(options_for(GetParam(), "mallory").worker);
    ASSERT_TRUE(worker.ok()) << worker.status();
    worker_ = *std::move(worker);
    absl::StatusOr<PeerId> peer = worker_->connect(pair_->address());
    ASSERT_TRUE(peer.ok()) << peer.status();
    peer_ = *peer;
    until([&] { return worker_->peer_state(peer_) == PeerState::kUp; });
  }

  template <typename Fact>
  void until(Fact fact, CallSite from = CallSite::here()) {
    pair_->until([&] { return worker_->progress(), fact(); }, from);
  }

  // Sends one notification and waits until it has been delivered.
  void send(std::string_view payload) {
    absl::StatusOr<TransferId> id = worker_->notify(peer_, payload);
    ASSERT_TRUE(id.ok()) << id.status();
    until([&] { return ended(*worker_->state(*id)); });
    ASSERT_TRUE(worker_->release(*id).ok());
  }
  void send(KvMessageKind kind, uint64_t load, std::string_view body = {}) {
    send(kind, load, body, kv_version_of(kind));
  }
  void send(KvMessageKind kind, uint64_t load, std::string_view body, uint16_t version) {
    size_t offset = 0;
    std::string part;
    do {
      encode_kv_part(kind, load, body, offset, part, version);
      ASSERT_NO_FATAL_FAILURE(send(part));
    } while (offset < body.size());
  }

  // The next answer about a load.
  KvMessagePart answer() {
    KvMessagePart part;
    until([&] { return worker_->next_notification(inbox_); });
    EXPECT_TRUE(decode_kv_part(inbox_.payload, part).ok());
    return part;
  }
  bool nothing_comes() {
    for (int i = 0; i < 2000; ++i) until([] { return true; });
    return !worker_->next_notification(inbox_);
  }

  // A request for two blocks of a cache of our own.
  KvLoadRequest request() {
    if (memory_.empty()) {
      memory_.resize(test_layout(4).bytes());
      region_ = *worker_->register_memory(memory_.data(), memory_.size());
    }
    KvLoadRequest request;
    request.decode = "mallory";
    request.timeout = std::chrono::seconds(30);
    request.tokens.assign(8, 1);
    request.blocks = {1, 2};
    request.layout = test_layout(4);
    request.buffers = {{*worker_->remote_region(region_), 0}};
    for (uint32_t layer = 0; layer < request.layout.layers(); ++layer) {
      request.counters.push_back(worker_->remote_counter(*worker_->allocate_counter()));
    }
    return request;
  }
  // The same, but to be read by us.
  KvLoadRequest pull_request() {
    KvLoadRequest pulls = request();
    pulls.buffers.clear();
    pulls.counters.clear();
    pulls.pull = true;
    pulls.lease = kLongEnough;
    return pulls;
  }
  std::string encoded(const KvLoadRequest& request) {
    std::string body;
    EXPECT_TRUE(encode_kv(request, body).ok());
    return body;
  }

  void TearDown() override {
    if (worker_ == nullptr) return;
    // An honest worker is served as ever.
    ASSERT_TRUE(pair_->decode->start(1, pair_->address(), 30).ok());
    until([&] { return pair_->decode->open() == 0; });
    EXPECT_EQ(pair_->decode->load(1).verified, 6u) << pair_->decode->load(1).status;
    EXPECT_FALSE(pair_->decode->load(1).wrong);
    worker_ = nullptr;
    pair_->until([&] { return pair_->prefill->open_jobs() == 0; });
  }

  std::unique_ptr<KvPair> pair_;
  std::vector<std::byte> memory_;
  std::unique_ptr<Worker> worker_;
  MemoryRegion region_;
  PeerId peer_;
  Notification inbox_;
};

TEST_P(KvHostileTest, GarbageIsIgnored) {
  std::mt19937 random(1);
  for (int i = 0; i < 100; ++i) {
    std::string bytes(random() % 3000, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    if (i % 2 == 0) base::put_number(bytes, kKvMagic);
    ASSERT_NO_FATAL_FAILURE(send(bytes));
  }
  EXPECT_EQ(pair_->prefill->jobs_seen(), 0u);
}

TEST_P(KvHostileTest, ADamagedRequestIsAnsweredNotServed) {
  const std::string body = encoded(request());
  std::mt19937 random(2);
  for (uint64_t load = 1; load <= 60; ++load) {
    std::string bad = body.substr(0, random() % body.size());
    if (load % 2 == 0) bad = body + "more";
    ASSERT_NO_FATAL_FAILURE(send(KvMessageKind::kRequest, load, bad));
    const KvMessagePart part = answer();
    EXPECT_EQ(part.kind, KvMessageKind::kFailed);
    EXPECT_EQ(part.load, load);
    EXPECT_TRUE(absl::IsInvalidArgument(decode_kv_failure(part.bytes)));
  }
  EXPECT_EQ(pair_->prefill->jobs_seen(), 0u);
}

TEST_P(KvHostileTest, AnotherVersionIsToldWhatToDo) {
  size_t offset = 0;
  std::string part;
  encode_kv_part(KvMessageKind::kRequest, 1, encoded(request()), offset, part);
  part[4] = 9;
  ASSERT_NO_FATAL_FAILURE(send(part));
  const absl::Status why = decode_kv_failure(answer().bytes);
  EXPECT_TRUE(absl::IsFailedPrecondition(why)) << why;
  EXPECT_THAT(std::string(why.message()), HasSubstr("same release"));
}

TEST_P(KvHostileTest, AForgedKeyMovesNothingAndFailsItsJobOnly) {
  KvLoadRequest forged = request();
  forged.buffers[0].region.key ^= 1;
  ASSERT_NO_FATAL_FAILURE(send(KvMessageKind::kRequest, 1, encoded(forged)));
  const KvMessagePart part = answer();
  EXPECT_EQ(part.kind, KvMessageKind::kFailed);
  EXPECT_FALSE(decode_kv_failure(part.bytes).ok());
  for (std::byte byte : memory_) ASSERT_EQ(byte, std::byte{0});
}

TEST_P(KvHostileTest, ACancelThatOvertakesItsRequestHolds) {
  ASSERT_NO_FATAL_FAILURE(send(KvMessageKind::kCancel, 1));
  KvMessagePart part = answer();
  EXPECT_EQ(part.kind, KvMessageKind::kCancelled);
  EXPECT_EQ(part.load, 1u);
  ASSERT_NO_FATAL_FAILURE(send(KvMessageKind::kRequest, 1, encoded(request())));
  EXPECT_TRUE(nothing_comes());
  EXPECT_EQ(pair_->prefill->jobs_seen(), 0u);
  for (std::byte byte : memory_) ASSERT_EQ(byte, std::byte{0});
}

TEST_P(KvHostileTest, ARequestSentTwiceIsServedOnce) {
  const std::string body = encoded(request());
  ASSERT_NO_FATAL_FAILURE(send(KvMessageKind::kRequest, 1, body));
  EXPECT_EQ(answer().kind, KvMessageKind::kDone);
  ASSERT_NO_FATAL_FAILURE(send(KvMessageKind::kRequest, 1, body));
  ASSERT_NO_FATAL_FAILURE(send(KvMessageKind::kCancel, 1));
  EXPECT_EQ(answer().kind, KvMessageKind::kCancelled);
  EXPECT_EQ(pair_->prefill->jobs_seen(), 1u);
}

TEST_P(KvHostileTest, AnswersToLoadsThatDoNotExistAreIgnored) {
  for (KvMessageKind kind :
       {KvMessageKind::kDone, KvMessageKind::kFailed, KvMessageKind::kCancelled,
        KvMessageKind::kAlive, KvMessageKind::kOffer, KvMessageKind::kReady, KvMessageKind::kPulled,
        KvMessageKind::kRenewLease, KvMessageKind::kLeaseRenewed}) {
    ASSERT_NO_FATAL_FAILURE(send(kind, 1));
  }
  EXPECT_TRUE(nothing_comes());
  // Whether it is alive anyone may ask.
  ASSERT_NO_FATAL_FAILURE(send(KvMessageKind::kProbe, 9));
  const KvMessagePart alive = answer();
  EXPECT_EQ(alive.kind, KvMessageKind::kAlive);
  EXPECT_EQ(alive.load, 9u);
}

TEST_P(KvHostileTest, BlocksAreHeldUntilThePullerReleasesThem) {
  ASSERT_NO_FATAL_FAILURE(
      send(KvMessageKind::kRequest, 1, encoded(pull_request()), kKvPullVersion));
  bool offered = false;
  size_t ready = 0;
  for (bool done = false; !done;) {
    const KvMessagePart part = answer();
    ASSERT_EQ(part.load, 1u);
    offered |= part.kind == KvMessageKind::kOffer;
    ready += part.kind == KvMessageKind::kReady;
    done = part.kind == KvMessageKind::kDone;
    ASSERT_NE(part.kind, KvMessageKind::kFailed);
  }
  EXPECT_TRUE(offered);
  EXPECT_GE(ready, 6u);
  // Nonsense about it changes nothing.
  ASSERT_NO_FATAL_FAILURE(send(KvMessageKind::kRenewLease, 1, "nonsense"));
  ASSERT_NO_FATAL_FAILURE(send(KvMessageKind::kRenew, 1, kv_bytes(KvRenewal{Time(1)})));
  ASSERT_NO_FATAL_FAILURE(send(KvMessageKind::kPulled, 2));
  EXPECT_TRUE(nothing_comes());
  EXPECT_EQ(pair_->prefill->open_jobs(), 1u);
  ASSERT_NO_FATAL_FAILURE(send(KvMessageKind::kRenewLease, 1, kv_bytes(KvLease{7, kLongEnough})));
  const KvMessagePart renewed = answer();
  EXPECT_EQ(renewed.kind, KvMessageKind::kLeaseRenewed);
  KvLease lease;
  ASSERT_TRUE(decode_kv(renewed.bytes, lease).ok());
  EXPECT_EQ(lease.number, 7u);
  ASSERT_NO_FATAL_FAILURE(send(KvMessageKind::kPulled, 1));
  until([&] { return pair_->prefill->open_jobs() == 0; });
  // What was let go of is not held again.
  ASSERT_NO_FATAL_FAILURE(send(KvMessageKind::kRenewLease, 1, kv_bytes(KvLease{8, kLongEnough})));
  EXPECT_TRUE(nothing_comes());
}

// A push has a deadline and no lease: nobody reads what it writes from.
TEST_P(KvHostileTest, WordsAboutLeasesMeanNothingToAPush) {
  KvLoadRequest pushed = request();
  pushed.tokens.resize(4);  // one block, so that the job waits for nothing but its write
  pushed.blocks = {1};
  pair_->prefill->stop_before_layer(1);
  ASSERT_NO_FATAL_FAILURE(send(KvMessageKind::kRequest, 1, encoded(pushed)));
  until([&] { return pair_->prefill->jobs_seen() == 1; });
  ASSERT_NO_FATAL_FAILURE(send(KvMessageKind::kRenewLease, 1, kv_bytes(KvLease{7, kLongEnough})));
  ASSERT_NO_FATAL_FAILURE(send(KvMessageKind::kPulled, 1));
  EXPECT_TRUE(nothing_comes());
  EXPECT_EQ(pair_->prefill->open_jobs(), 1u);
  pair_->prefill->stop_before_layer(UINT32_MAX);
  EXPECT_EQ(answer().kind, KvMessageKind::kDone);
}

TEST_P(KvHostileTest, ADamagedRequestToPullIsAnsweredNotServed) {
  const std::string body = encoded(pull_request());
  for (uint64_t load = 1; load <= 20; ++load) {
    const std::string bad = load % 2 == 0 ? body + "more" : body.substr(0, body.size() / load - 1);
    ASSERT_NO_FATAL_FAILURE(send(KvMessageKind::kRequest, load, bad, kKvPullVersion));
    const KvMessagePart part = answer();
    EXPECT_EQ(part.kind, KvMessageKind::kFailed);
    EXPECT_TRUE(absl::IsInvalidArgument(decode_kv_failure(part.bytes)));
  }
  EXPECT_EQ(pair_->prefill->jobs_seen(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Providers, KvHostileTest, ::testing::ValuesIn(real_providers()),
                         [](const auto& param) { return param.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(KvHostileTest);

// Nobody drives the silent one: what is said to it waits, and no word to another behind it.
TEST(KvMailbox, APeerThatTakesNothingHoldsUpItsOwnMessagesOnly) {
  const ClusterKey key = *ClusterKey::from_bytes("a secret of the tests");
  const auto made = [&](const char* name) {
    return *Worker::create({.name = name, .providers = {"tcp"}, .key = key, .max_transfers = 32});
  };
  const auto worker = made("tells"), silent = made("silent"), other = made("other");
  const PeerId to_silent = *worker->connect(silent->address());
  const PeerId to_other = *worker->connect(other->address());
  KvMailbox mailbox(*worker);
  KvMailbox heard(*other);
  constexpr uint64_t kAll = 100;  // of which the worker takes a third of its transfers
  for (uint64_t i = 0; i < kAll; ++i) mailbox.send(to_silent, KvMessageKind::kDone, i);
  for (uint64_t i = 0; i < kAll; ++i) mailbox.send(to_other, KvMessageKind::kDone, i);
  const Time end = Clock::steady().now() + patient(std::chrono::seconds(60));
  const auto hears_all = [&](Worker& driven, KvMailbox& box) {
    KvMessage message;
    for (uint64_t next = 0; next < kAll;) {
      ASSERT_LT(Clock::steady().now(), end) << next << " came";
      worker->progress();
      driven.progress();
      mailbox.flush();
      while (box.receive(message)) EXPECT_EQ(message.load, next++);
    }
  };
  hears_all(*other, heard);
  KvMailbox late(*silent);
  hears_all(*silent, late);
}

}  // namespace
}  // namespace baton::kvtransfer
