// Sessions that read and write blocks where they lie. In DirectSession the prefill says and does
// what a test wants: it moves nothing while it is not called.
#include "kvtransfer/kv_session.h"

#include <zlib.h>

#include "absl/strings/escaping.h"
#include "tests/kvtransfer/session_sides.h"
#include "tests/manual_clock.h"
#include "tests/until.h"

namespace baton::kvtransfer {
namespace {

struct DirectSession : ::testing::Test {
  DirectSession() { std::memset(prefill.block(5), 42, kBytes); }

  // Orders a block of prefill's for this one here, which prefill hears. Returns what it hears.
  json order(const std::string& transfer, uint32_t block) {
    KvOrder order{.id = block,
                  .from = {.transfer = transfer,
                           .agent = "prefill",
                           .address = "127.0.0.1:" + std::to_string(prefill.its->port())},
                  .timeout = std::chrono::seconds(10)};
    order.runs.push_back({0, {block}, {0, 16}});
    EXPECT_TRUE(session->load(std::move(order)).ok());
    json want;
    until(
        [&] {
          for (const AgentMessage& each : prefill.its->messages()) {
            json message = json::parse(each.payload);
            if (message["kind"] == "want" && message["transfer"] == transfer) {
              want = std::move(message);
            }
          }
          return !want.is_null();
        },
        [&] { turn(); });
    if (const json& metadata = want["metadata"]; metadata.is_string()) {
      EXPECT_TRUE(
          prefill.its->add_remote(absl::HexStringToBytes(metadata.get<std::string>())).ok());
    }
    json layout = prefill.cache();
    layout["kind"] = "layout";
    say(layout);
    return want;
  }
  // It is prefill's block 5, and has this checksum.
  void ready(const std::string& transfer, uint32_t checksum) {
    say({{"kind", "ready"}, {"transfer", transfer}, {"parts", {{0, 0, {{5, checksum}}}}}});
  }
  void load(uint32_t checksum) {
    order("t", 3);
    ready("t", checksum);
  }
  void say(const json& message) {
    EXPECT_TRUE(prefill.its->notify("decode/0", message.dump()).ok());
  }
  void turn() {
    prefill.its->progress();
    session->turn();
  }
  KvLoaded loaded() {
    std::optional<KvLoaded> out;
    until([&] { return (out = session->next_loaded()).has_value(); }, [&] { turn(); });
    return *out;
  }
  uint32_t checksum() {
    return static_cast<uint32_t>(
        crc32_z(0, reinterpret_cast<const unsigned char*>(prefill.block(5)), kBytes));
  }

  ManualClock clock;
  SessionSide prefill{"prefill/0", false};
  SessionEnd decode{"decode/0", clock, Time::zero(), true};
  KvSession* const session = decode.session.get();
};

TEST_F(DirectSession, BelievesWhatHasTheChecksumThatPrefillTook) {
  load(checksum());
  const KvLoaded here = loaded();
  EXPECT_TRUE(here.status.ok()) << here.status;
  EXPECT_EQ(std::memcmp(decode.block(3), prefill.block(5), kBytes), 0);
  for (const size_t other : {2, 4}) EXPECT_EQ(*decode.block(other), std::byte{0});
}

TEST_F(DirectSession, AWrongChecksumIsALoadThatFailed) {
  load(checksum() ^ 1);
  EXPECT_EQ(loaded().status.code(), absl::StatusCode::kDataLoss);
}

// Promise(vllm): Failed loads move no byte after vLLM was told | a block that is said to be ready
//   afterwards is not read
TEST_F(DirectSession, WhatHasFailedReadsNothingAnyMore) {
  order("t", 3);
  clock.advance(std::chrono::seconds(11));
  EXPECT_EQ(loaded().status.code(), absl::StatusCode::kDeadlineExceeded);
  ready("t", checksum());
  order("u", 4);  // whose messages come behind
  ready("u", checksum());
  EXPECT_TRUE(loaded().status.ok());
  EXPECT_EQ(*decode.block(4), std::byte{42});
  EXPECT_EQ(*decode.block(3), std::byte{0});
}

// A prefill may have been slow, and a name may be loaded again meanwhile.
TEST_F(DirectSession, AWordToAnEarlierLoadOfTheTransferIsNotTakenForThisOne) {
  const json first = order("t", 3);
  clock.advance(std::chrono::seconds(11));
  EXPECT_EQ(loaded().status.code(), absl::StatusCode::kDeadlineExceeded);
  const json second = order("t", 4);
  EXPECT_NE(first.at("load"), second.at("load"));
  say({{"kind", "gone"}, {"transfer", "t"}, {"load", first.at("load")}});
  ready("t", checksum());
  EXPECT_TRUE(loaded().status.ok());
  EXPECT_EQ(*decode.block(4), std::byte{42});
}

// Both ends are ours; nothing moves but by turn().
struct TwoSessions : ::testing::Test {
  void order(KvRequestId id, const std::string& transfer = "t") {
    KvOrder order{.id = id, .from = from->params_of(transfer), .timeout = std::chrono::seconds(10)};
    order.from.workers = {{"prefill/0", from->address()}};
    order.loads = 1;
    order.push = push;
    order.runs.push_back({0, {3}, {0, 16}});
    EXPECT_TRUE(into->load(std::move(order)).ok());
  }
  void give(uint64_t send) {
    ASSERT_NE(send, 0u);
    std::memset(prefill.block(5), static_cast<int>(send), kBytes);
    EXPECT_TRUE(from->save(send, 0, 0, {5}).ok());
    from->hold(send);
  }
  void decode_alone(int turns) {
    for (int i = 0; i < turns; ++i) into->turn();
  }
  KvLoaded loaded() {
    std::optional<KvLoaded> out;
    until([&] { return out.has_value(); },
          [&] {
            into->turn();
            out = into->next_loaded();
            if (!out.has_value()) from->turn();  // else it has not heard of that yet
          });
    return *out;
  }

  bool push = true;
  ManualClock clock;
  SessionEnd decode{"decode/0", clock}, prefill{"prefill/0", clock};
  KvSession *const from = prefill.session.get(), *const into = decode.session.get();
};

// Prefill answers that the first load is over when the second has been ordered.
TEST_F(TwoSessions, ATransferThatWasLoadedIsLoadedAgainAtOnce) {
  for (KvRequestId id = 1; id < 6; ++id) {
    order(id);
    decode_alone(20);  // it said that it has all of the last one, and asks for this one
    const uint64_t send = from->open("t", 16);
    from->expect(send, 1, std::chrono::seconds(10));  // it ends with its last word to that one
    give(send);
    const KvLoaded here = loaded();
    EXPECT_TRUE(here.status.ok()) << here.status;
    EXPECT_EQ(std::memcmp(decode.block(3), prefill.block(5), kBytes), 0) << id;
  }
  EXPECT_EQ(into->session_stats().loads_failed, 0u);
  EXPECT_EQ(from->session_stats().jobs_failed, 0u);
}

// The first load that looks notices it; the others were asked of that prefill too.
TEST_F(TwoSessions, EveryLoadOfAPrefillThatWentEndsAtOnce) {
  for (const KvRequestId id : {1, 2, 3}) order(id, absl::StrCat("t", id));
  until([&] { return prefill.its->has_remote("decode/0"); },
        [&] {
          into->turn();
          from->turn();
        });
  decode_alone(20);
  from->close();
  prefill.its = nullptr;
  until([&] { return !decode.its->has_remote("prefill/0"); }, [&] { into->turn(); });
  clock.advance(std::chrono::seconds(1));  // a load may take ten
  decode_alone(20);
  for (const KvRequestId id : {1, 2, 3}) {
    const absl::Status status = into->load_status(id);
    EXPECT_TRUE(absl::IsUnavailable(status)) << id << ": " << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("is gone"));
  }
}

TEST_F(TwoSessions, ALoadThatWasGivenUpDoesNotEndTheNextOfItsTransfer) {
  for (KvRequestId id = 1; id < 4; id += 2) {
    push = id == 1;
    const uint64_t send = from->open("t", 16);
    order(id);
    until([&] { return prefill.its->has_remote("decode/0"); },  // it has heard of the load
          [&] {
            into->turn();
            from->turn();
          });
    decode_alone(20);
    into->end_load(id);
    EXPECT_EQ(loaded().status.code(), absl::StatusCode::kCancelled);
    until([&] { return !into->turn(); }, [&] { from->turn(); });
    order(id + 1);
    decode_alone(20);
    give(send);
    const KvLoaded here = loaded();
    EXPECT_EQ(here.id, id + 1);
    EXPECT_TRUE(here.status.ok()) << here.status;
    until([&] { return !into->turn() && !from->turn(); });
  }
}

}  // namespace
}  // namespace baton::kvtransfer
