// Names of prefill workers that DNS is slow about: no call waits for it, and no other load.
#include "tests/held_port.h"
#include "tests/kvtransfer/kv_pair.h"
#include "tests/manual_clock.h"
#include "tests/slow_dns.h"
#include "tests/test.h"
#include "transport/address.h"
#include "transport/net/endpoint.h"

namespace baton::kvtransfer {
namespace {

using std::chrono::seconds;

// The port of a worker's listener, out of its address.
std::string slow_name(const std::string& address) {
  const absl::StatusOr<Address> decoded = Address::decode(address);
  for (const auto& [provider, where] : decoded->providers) {
    if (const auto at = net::literal(where); provider == "tcp" && at.ok()) {
      const std::string text = at->front().text();
      return "slow.example" + text.substr(text.rfind(':'));
    }
  }
  return "";
}

struct KvNames : ::testing::TestWithParam<bool> {
  KvLoad load_of(KvRequestId id, const std::string& prefill) const {
    return {.id = id, .prefill = prefill, .timeout = kLongEnough, .pull = GetParam()};
  }
  // Load 1, of one block.
  absl::Status start_block(const std::string& prefill, Time timeout = kLongEnough) {
    KvLoad load = load_of(1, prefill);
    load.tokens = {1, 2, 3, 4};
    load.blocks = {7};
    load.timeout = timeout;
    return pair.decode_connector->start_load(load);
  }
  KvPair pair{{.provider = "tcp", .allow_pull = true}};
  std::string slow = slow_name(pair.address());
};
INSTANTIATE_TEST_SUITE_P(Both, KvNames, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "pull" : "push"; });

TEST_P(KvNames, ADnsLookupBlocksNoCall) {
  ASSERT_NE(slow, "");
  ASSERT_TRUE(pair.decode->start(load_of(1, slow), 40).ok());
  ASSERT_TRUE(pair.decode->start(load_of(2, slow), 40).ok());  // one look-up for both
  dns_asked.acquire();
  // Another load comes and goes meanwhile.
  ASSERT_TRUE(pair.decode->start(load_of(3, pair.address()), 40).ok());
  pair.until([&] { return pair.decode->load(3).state == TestLoad::State::kEnded; });
  EXPECT_EQ(pair.decode->load(3).verified, 6U) << pair.decode->load(3).status;
  EXPECT_TRUE(pair.decode_connector->load_status(1).ok());
  EXPECT_EQ(pair.decode_connector->layers_loaded(1), 0U);
  EXPECT_EQ(pair.decode_connector->failed_blocks(1).size(), 10U);
  EXPECT_TRUE(absl::IsUnavailable(pair.decode_connector->load_payload(1).status()));
  EXPECT_TRUE(pair.decode_connector->renew_load(2, kLongEnough).ok());
  EXPECT_FALSE(dns_asked.try_acquire());
  dns_answered.release();
  pair.run_to_end();
  for (const KvRequestId id : {1, 2}) {
    EXPECT_EQ(pair.decode->load(id).verified, 6U) << pair.decode->load(id).status;
    EXPECT_FALSE(pair.decode->load(id).wrong);
  }
  // It is known now.
  ASSERT_TRUE(pair.decode->start(load_of(4, slow), 40).ok());
  pair.run_to_end();
  EXPECT_EQ(pair.decode->load(4).verified, 6U);
  EXPECT_FALSE(dns_asked.try_acquire());
}

TEST_P(KvNames, ALoadMayEndBeforeItsNameIsKnown) {
  ASSERT_TRUE(start_block(slow).ok());
  dns_asked.acquire();
  EXPECT_TRUE(pair.decode_connector->end_load(1)) << "nobody was asked anything";
  EXPECT_TRUE(absl::IsNotFound(pair.decode_connector->load_status(1)));
  // The block and the number are free for another.
  ASSERT_TRUE(start_block(slow, std::chrono::milliseconds(1)).ok());
  until([&] { return !pair.decode_connector->load_status(1).ok(); },
        [&] { pair.decode_connector->wait(kLongEnough, -1); });
  EXPECT_TRUE(absl::IsDeadlineExceeded(pair.decode_connector->load_status(1)));
  dns_answered.release();
  // What is found then is of no use to it, and harms nobody.
  ASSERT_TRUE(pair.decode->start(load_of(2, slow), 40).ok());
  pair.until([&] { return pair.decode->load(2).state == TestLoad::State::kEnded; });
  EXPECT_EQ(pair.decode->load(2).verified, 6U) << pair.decode->load(2).status;
  EXPECT_TRUE(absl::IsDeadlineExceeded(pair.decode_connector->load_status(1)));
  EXPECT_TRUE(pair.decode_connector->end_load(1));
  pair.run_to_end();
  EXPECT_EQ(pair.prefill->jobs_seen(), 1U);
}

// Who sleeps hears that there is no such host, and that his load failed.
TEST_P(KvNames, AWaiterLearnsThatTheHostIsUnknown) {
  ASSERT_TRUE(start_block("no such host:4000").ok());
  const absl::Status why = pair.decode_connector->wait_for_layer(1, 0);
  EXPECT_TRUE(absl::IsNotFound(why)) << why;
  EXPECT_THAT(std::string(why.message()), ::testing::HasSubstr("no such host"));
  EXPECT_TRUE(pair.decode_connector->end_load(1));
}

// It may be known that nobody is there before anybody has asked whose connection that was.
TEST_P(KvNames, AWaiterLearnsThatNoProcessListens) {
  const HeldPort held;
  const std::string address = held.address();
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(start_block("slow.example" + address.substr(address.rfind(':')), kNever).ok());
    dns_asked.acquire();
    dns_answered.release();
    const absl::Status why = pair.decode_connector->wait_for_layer(1, 0);
    EXPECT_TRUE(absl::IsUnavailable(why)) << why;
    EXPECT_TRUE(pair.decode_connector->end_load(1));
  }
}

// Of a group one is slow: the others are asked at once, and it when it is found.
TEST_P(KvNames, ShardsAreAskedAsTheyAreFound) {
  BatonConnectorOptions options = options_for("tcp", "prefill-1");
  options.allow_pull = true;
  const auto connector = make_or_fail(options);
  TestPrefill other(*connector, test_layout(60), 3);
  KvLoad load = load_of(1, "");
  load.shards = {slow, connector->address()};
  ASSERT_TRUE(pair.decode->start(load, 40).ok());
  dns_asked.acquire();
  const auto turn = [&] {
    pair.step();
    other.step();
  };
  until([&] { return other.jobs_seen() == 1; }, turn);
  EXPECT_EQ(pair.prefill->jobs_seen(), 0U);
  dns_answered.release();
  until([&] { return pair.decode->open() + pair.prefill->open_jobs() + other.open_jobs() == 0; },
        turn);
  EXPECT_EQ(pair.decode->load(1).verified, 6U) << pair.decode->load(1).status;
}

// Whose time is a test's.
struct KvNamesInTime : KvNames {
  KvNamesInTime() : now{{.provider = "tcp", .allow_pull = true, .clock = &clock}} {}
  // Prefill computes so many layers, which come.
  bool layers_come(uint32_t layers) {
    now.prefill->stop_before_layer(layers);
    now.until([&] {
      return now.decode->load(1).verified == layers ||
             now.decode->load(1).state == TestLoad::State::kEnded;
    });
    return now.decode->load(1).verified == layers;
  }
  void find_name() {
    dns_asked.acquire();
    dns_answered.release();
  }
  ManualClock clock;
  KvPair now;
};
INSTANTIATE_TEST_SUITE_P(Both, KvNamesInTime, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "pull" : "push"; });

// Prefill is told of it when it is found: it would give the load up in the time first said.
TEST_P(KvNamesInTime, WhatWasRenewedMeanwhileHasThatTime) {
  KvLoad load = load_of(1, slow_name(now.address()));
  load.timeout = seconds(10);
  load.lease = kLongEnough;
  ASSERT_TRUE(now.decode->start(load, 40).ok());
  ASSERT_TRUE(now.decode_connector->renew_load(1, seconds(1000)).ok());
  find_name();
  ASSERT_TRUE(layers_come(2)) << now.decode->load(1).status;
  clock.advance(seconds(30));  // less than the lease
  EXPECT_TRUE(layers_come(4)) << now.decode->load(1).status;
  now.prefill->stop_before_layer(UINT32_MAX);
  now.run_to_end();
  EXPECT_EQ(now.decode->load(1).verified, 6U) << now.decode->load(1).status;
}

}  // namespace
}  // namespace baton::kvtransfer
