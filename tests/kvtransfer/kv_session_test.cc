// A session that reads blocks where they lie, and a prefill that says and does what a test wants:
// it moves nothing while it is not called.
#include "kvtransfer/kv_session.h"

#include <zlib.h>

#include "absl/strings/escaping.h"
#include "kvtransfer/session/direct_mover.h"
#include "tests/kvtransfer/session_sides.h"
#include "tests/manual_clock.h"
#include "tests/until.h"

namespace baton::kvtransfer {
namespace {

struct DirectSession : ::testing::Test {
  DirectSession() {
    std::memset(prefill.block(5), 42, kBytes);
    KvSessionOptions options;
    options.agent = decode.its.get();
    options.clock = &clock;
    options.start_thread = false;
    session = *session::make_direct_session(decode.cache().dump(), std::move(options));
  }
  ~DirectSession() override { session->close(); }

  // Orders a block of prefill's for this one here, which prefill hears.
  void order(const std::string& transfer, uint32_t block) {
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
  SessionSide decode{"decode/0", true};
  std::unique_ptr<KvSession> session;
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

}  // namespace
}  // namespace baton::kvtransfer
