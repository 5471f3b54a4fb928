// A prefill worker that is stopped, or only slow: what decode makes of its silence, in virtual
// time; and over real providers, who answers while the engine computes.
#include "kvtransfer/internal/connector/kv_messages.h"
#include "tests/kvtransfer/kv_pair.h"
#include "tests/kvtransfer/sims/kv_world.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

KvLoad load_of(const World& world, KvRequestId id, Time silence = seconds(1)) {
  KvLoad load;
  load.id = id;
  load.prefill = world.prefill_address();
  load.timeout = seconds(60);
  load.silence = silence;
  return load;
}

World quiet_world() {
  return World({}, 1, KvSendMode::kLayerwise, test_layout(50), test_layout(64));
}

bool all_is_over(const World& world) {
  return world.decode.open() == 0 && world.prefill.open_jobs() == 0;
}

// Promise(kv): A stopped prefill worker costs a load its limit of silence, not its timeout | probes
//   are answered by a thread of their own
TEST(KvSilence, AStoppedPrefillCostsItsLimitAndNotTheLoadsTimeout) {
  World world = quiet_world();
  world.prefill.stop_before_layer(2);
  ASSERT_TRUE(world.decode.start(load_of(world, 1), 40).ok());
  ASSERT_TRUE(world.run([&] { return world.decode.load(1).verified == 2; }, seconds(1)));
  world.stop(kPrefillNode, true);
  const Time stopped = world.now();
  ASSERT_TRUE(world.run([&] { return !world.decode.load(1).status.ok(); }, seconds(2)));
  EXPECT_GE(world.now() - stopped, milliseconds(700));  // it was heard of a quarter before
  const absl::Status why = world.decode.load(1).status;
  EXPECT_TRUE(absl::IsUnavailable(why)) << why;
  EXPECT_THAT(std::string(why.message()), HasSubstr("prefill-0"));
  EXPECT_THAT(std::string(why.message()), HasSubstr("no sign of life for 1 s"));
  // Its blocks are not free: it may go on and write to them.
  EXPECT_EQ(world.decode.open(), 1u);
  // Whoever asks it meanwhile is told at once.
  const absl::Status refused = world.decode.start(load_of(world, 2), 40);
  EXPECT_TRUE(absl::IsUnavailable(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("no sign of life"));
  // It goes on, and hears that nobody waits for it any more.
  world.stop(kPrefillNode, false);
  world.prefill.stop_before_layer(UINT32_MAX);
  ASSERT_TRUE(world.run([&] { return all_is_over(world); }, seconds(2)));
  EXPECT_EQ(world.decode.cache().damaged(), 0u);
  ASSERT_TRUE(world.decode.start(load_of(world, 3), 40).ok());
  ASSERT_TRUE(world.run([&] { return all_is_over(world); }, seconds(2)));
  EXPECT_EQ(world.decode.load(3).verified, 6u) << world.decode.load(3).status;
  EXPECT_EQ(world.decode.cache().damaged(), 0u);
}

TEST(KvSilence, WithoutALimitALoadWaitsUntilItsTimeout) {
  World world = quiet_world();
  world.prefill.stop_before_layer(2);
  ASSERT_TRUE(world.decode.start(load_of(world, 1, Time{}), 40).ok());
  ASSERT_TRUE(world.run([&] { return world.decode.load(1).verified == 2; }, seconds(1)));
  world.stop(kPrefillNode, true);
  EXPECT_FALSE(world.run([&] { return !world.decode.load(1).status.ok(); }, seconds(5)));
  world.stop(kPrefillNode, false);
  world.prefill.stop_before_layer(UINT32_MAX);
  ASSERT_TRUE(world.run([&] { return all_is_over(world); }, seconds(2)));
  EXPECT_TRUE(world.decode.load(1).status.ok()) << world.decode.load(1).status;
}

TEST(KvSilence, ASlowPeerIsNotSilent) {
  World world = quiet_world();
  world.prefill.stop_before_layer(2);
  ASSERT_TRUE(world.decode.start(load_of(world, 1), 40).ok());
  // Nothing is computed for many times the limit; between two looks of its connector passes half.
  for (int i = 0; i < 20; ++i) {
    world.stop(kPrefillNode, true);
    world.run([] { return false; }, milliseconds(500));
    world.stop(kPrefillNode, false);
    world.run([] { return false; }, milliseconds(1));
  }
  world.prefill.stop_before_layer(UINT32_MAX);
  ASSERT_TRUE(world.run([&] { return all_is_over(world); }, seconds(2)));
  EXPECT_EQ(world.decode.load(1).verified, 6u) << world.decode.load(1).status;
}

TEST(KvSilence, ACallerThatDidNotPollBlamesNoPeer) {
  World world = quiet_world();
  world.prefill.stop_before_layer(2);
  ASSERT_TRUE(world.decode.start(load_of(world, 1), 40).ok());
  ASSERT_TRUE(world.run([&] { return world.decode.load(1).verified == 2; }, seconds(1)));
  // Its own engine computes for ten seconds; prefill is stopped for the first nine.
  world.stop(kDecodeNode, true);
  world.stop(kPrefillNode, true);
  world.run([] { return false; }, seconds(9));
  world.stop(kPrefillNode, false);
  world.run([] { return false; }, seconds(1));
  world.stop(kDecodeNode, false);
  world.prefill.stop_before_layer(UINT32_MAX);
  ASSERT_TRUE(world.run([&] { return all_is_over(world); }, seconds(2)));
  EXPECT_EQ(world.decode.load(1).verified, 6u) << world.decode.load(1).status;
}

// It hears of probes, and knows nothing of answers.
TEST(KvSilence, AnOlderPrefillIsWaitedFor) {
  sim::SimFabric fabric({});
  const std::unique_ptr<Worker> older =
      worker_on(fabric, kPrefillNode, on_fabric(fabric, kPrefillNode, "older"));
  const BatonConnectorOptions options = on_fabric(fabric, kDecodeNode, "decode-0");
  std::unique_ptr<Worker> worker = worker_on(fabric, kDecodeNode, options);
  Worker& decode_worker = *worker;
  const auto connector = make_baton_connector(std::move(worker), options);
  TestDecode decode(*connector, test_layout(64), 2);
  KvLoad load;
  load.id = 1;
  load.prefill = older->address();
  load.silence = seconds(1);
  ASSERT_TRUE(decode.start(load, 40).ok());
  size_t heard = 0;
  Notification note;
  for (const Time end = fabric.clock().now() + seconds(10); fabric.clock().now() < end;) {
    while (older->next_notification(note)) ++heard;
    decode.step();
    fabric.run_for(milliseconds(1));
  }
  EXPECT_GT(heard, 30u);
  EXPECT_TRUE(connector->load_status(1).ok()) << connector->load_status(1);
  fabric.detach(decode_worker);
  fabric.detach(*older);
}

// A prefill worker's connector whose engine does nothing, and somebody who asks it.
class KvAnswersTest : public OverEveryProvider<std::string> {
 protected:
  void ask(const BatonConnectorOptions& options) {
    connector_ = make_or_fail(options);
    ASSERT_NE(connector_, nullptr);
    ASSERT_TRUE(connector_->allocate_cache(test_layout(4)).ok());
    absl::StatusOr<std::unique_ptr<Worker>> worker =
        Worker::create(options_for(GetParam(), "decode-0").worker);
    ASSERT_TRUE(worker.ok()) << worker.status();
    worker_ = *std::move(worker);
    absl::StatusOr<PeerId> peer = worker_->connect(connector_->address());
    ASSERT_TRUE(peer.ok()) << peer.status();
    size_t offset = 0;
    std::string probe, cancel;
    encode_kv_part(KvMessageKind::kCancel, 7, {}, offset, cancel);
    encode_kv_part(KvMessageKind::kProbe, 8, {}, offset = 0, probe);
    ASSERT_TRUE(worker_->notify_detached(*peer, cancel).ok());
    ASSERT_TRUE(worker_->notify_detached(*peer, probe).ok());
  }
  // The next message from there.
  KvMessagePart answer(const std::function<void()>& meanwhile) {
    KvMessagePart part;
    until([&] { return worker_->next_notification(inbox_); },
          [&] { worker_->progress(), meanwhile(); },
          [&] { return state_of(worker_->stats(), "decode"); });
    EXPECT_TRUE(decode_kv_part(inbox_.payload, part).ok());
    return part;
  }

  std::unique_ptr<KvConnector> connector_;
  std::unique_ptr<Worker> worker_;
  Notification inbox_;
};

TEST_P(KvAnswersTest, AThreadAnswersWhileTheEngineComputes) {
  BatonConnectorOptions options = options_for(GetParam(), "prefill-0");
  options.answer_thread = true;
  ASSERT_NO_FATAL_FAILURE(ask(options));
  // No call of the connector: its engine is busy.
  const KvMessagePart alive = answer([] {});
  EXPECT_EQ(alive.kind, KvMessageKind::kAlive);
  EXPECT_EQ(alive.version, kKvVersion);
  EXPECT_EQ(alive.load, 8u);
  // What came before it was no probe, and waits for the engine.
  const KvMessagePart cancelled = answer([&] { connector_->progress(); });
  EXPECT_EQ(cancelled.kind, KvMessageKind::kCancelled);
  EXPECT_EQ(cancelled.load, 7u);
}

TEST_P(KvAnswersTest, WithoutAThreadTheEngineAnswers) {
  ASSERT_NO_FATAL_FAILURE(ask(options_for(GetParam(), "prefill-0")));
  EXPECT_EQ(answer([&] { connector_->progress(); }).kind, KvMessageKind::kCancelled);
  EXPECT_EQ(answer([&] { connector_->progress(); }).kind, KvMessageKind::kAlive);
}

TEST_P(KvAnswersTest, AnEngineThatSleepsIsWokenAndAnswers) {
  BatonConnectorOptions options = options_for(GetParam(), "prefill-0");
  options.answer_thread = true;
  ASSERT_NO_FATAL_FAILURE(ask(options));
  const auto sleep = [&] { connector_->wait(milliseconds(1), -1); };
  // Where a busy machine keeps this thread away for long the other one answers first.
  const std::array kinds = {answer(sleep).kind, answer(sleep).kind};
  EXPECT_THAT(kinds, UnorderedElementsAre(KvMessageKind::kCancelled, KvMessageKind::kAlive));
}

// Not even the connection comes about: its kernel takes calls, and nobody answers them.
TEST_P(KvAnswersTest, APrefillThatWasStoppedBeforeItWasAskedIsGivenUpToo) {
  const auto prefill = make_or_fail(options_for(GetParam(), "prefill-0"));
  const auto connector = make_or_fail(options_for(GetParam(), "decode-0"));
  ASSERT_TRUE(prefill != nullptr && connector != nullptr);
  TestDecode decode(*connector, test_layout(64), 2);
  KvLoad load;
  load.id = 1;
  load.prefill = prefill->address();
  load.silence = milliseconds(100);
  ASSERT_TRUE(decode.start(std::move(load), 40).ok());
  until([&] { return !decode.load(1).status.ok(); }, [&] { decode.step(); });
  EXPECT_THAT(std::string(decode.load(1).status.message()), HasSubstr("no sign of life for 0.1 s"));
}

INSTANTIATE_TEST_SUITE_P(Providers, KvAnswersTest, ::testing::ValuesIn(real_providers()),
                         [](const auto& param) { return param.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(KvAnswersTest);

}  // namespace
}  // namespace baton::kvtransfer
