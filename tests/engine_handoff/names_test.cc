// A prefill by a name that DNS is slow about: other loads come and go meanwhile.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "engine/handoff/fetches.h"
#include "tests/engine_handoff/bare_hand_off.h"
#include "tests/slow_dns.h"

namespace baton::engine::handoff {
namespace {

using std::chrono::milliseconds;

struct HandOffNames : testing::Test {
  template <typename Fact>
  void until(Fact fact) {
    while (!fact()) {
      prefill.turn();
      decode.turn();
      clock.advance(milliseconds(1));
    }
  }
  serve::RemotePrefill slow(const std::string& transfer) const {
    serve::RemotePrefill from = prefill.at(transfer);
    from.address = absl::StrCat("slow.example", from.address.substr(from.address.rfind(':')));
    return from;
  }
  absl::Status load(uint64_t id, const serve::RemotePrefill& from, uint32_t block) {
    kvtransfer::KvLoad order = Bare::order(id, {block});
    order.timeout = std::chrono::hours(1);
    order.silence = Time{};
    return decode->start_load(from, order);
  }
  ManualClock clock;
  Bare prefill{"prefill", clock}, decode{"decode", clock};
};

TEST_F(HandOffNames, NobodyElseWaitsForDns) {
  prefill.fill(1, 3);
  prefill.fill(2, 7);
  prefill.save("t", {1});
  prefill.save("u", {2});
  // Of an agent that decode does not know, so that it is asked for.
  serve::RemotePrefill other = slow("t");
  other.agent = "another";
  ASSERT_TRUE(load(1, other, 5).ok());
  decode.turn();
  dns_asked.acquire();
  ASSERT_TRUE(load(2, prefill.at("u"), 6).ok());
  until([&] { return decode.ended(2); });
  EXPECT_TRUE(decode.holds(6, 7)) << decode.why(2);
  EXPECT_TRUE(decode->load_status(1).ok());
  EXPECT_FALSE(dns_asked.try_acquire()) << "one look-up at a time";
  EXPECT_FALSE(decode->end_load(1));
  until([&] { return decode->end_load(1); });
  dns_answered.release(1'000'000);
}

TEST_F(HandOffNames, WhoIsFoundInTheEndIsAsked) {
  prefill.fill(1, 3);
  prefill.save("t", {1});
  ASSERT_TRUE(load(1, slow("t"), 5).ok());
  decode.turn();
  dns_asked.acquire();
  dns_answered.release(1'000'000);
  until([&] { return decode.ended(1); });
  EXPECT_TRUE(decode.holds(5, 3)) << decode.why(1);
}

TEST_F(HandOffNames, ThatThereIsNoSuchHostIsSaid) {
  serve::RemotePrefill from = prefill.at("t");
  from.address = "no such host:4000";
  ASSERT_TRUE(load(1, from, 5).ok());
  until([&] { return decode.ended(1); });
  EXPECT_THAT(decode.why(1), testing::HasSubstr("no such host"));
}

// Those that begin and do not end until the test lets them.
struct FetchesByName : testing::Test {
  FetchesByName() {
    forget(dns_answered);
    forget(dns_asked);
    kvtransfer::AgentOptions options;
    options.name = "decode";
    options.worker = bare_worker();
    core.agent = *kvtransfer::Agent::create(std::move(options));
  }
  static void forget(std::counting_semaphore<>& signals) {
    while (signals.try_acquire()) {
    }
  }
  // So many were begun, all of which end now, and no more.
  void expect_begun(int count) {
    for (int i = 0; i < count; ++i) dns_asked.acquire();
    dns_answered.release(1'000);
    fetches.close();
    EXPECT_FALSE(dns_asked.try_acquire());
    forget(dns_answered);
  }
  Core core;
  Fetches fetches{core};
};

TEST_F(FetchesByName, EachAgentAtEachAddressIsAskedForOnce) {
  for (int again = 0; again < 2; ++again) {
    EXPECT_TRUE(fetches.fetch("one", "slow.example:1").ok());
    EXPECT_TRUE(fetches.fetch("other", "slow.example:1").ok());
    EXPECT_TRUE(fetches.fetch("one", "slow.example:2").ok());
  }
  expect_begun(3);
}

TEST_F(FetchesByName, WhatIsOverIsAskedForAgain) {
  EXPECT_TRUE(fetches.fetch("one", "slow.example:1").ok());
  dns_asked.acquire();
  dns_answered.release();
  while (!dns_asked.try_acquire()) fetches.fetch("one", "slow.example:1").IgnoreError();
  expect_begun(0);
}

TEST_F(FetchesByName, EightAtATimeAndOthersLater) {
  const auto fetch = [&](int i) {
    EXPECT_TRUE(fetches.fetch("one", absl::StrCat("slow.example:", i)).ok());
  };
  for (int i = 1; i <= 9; ++i) fetch(i);
  expect_begun(8);
  for (int i = 1; i <= 8; ++i) fetch(i);
  for (int i = 1; i <= 8; ++i) dns_asked.acquire();
  // Nobody asks again for those, and they are in nobody's way when they are over.
  dns_answered.release(8);
  while (!dns_asked.try_acquire()) fetch(9);
  expect_begun(0);
}

}  // namespace
}  // namespace baton::engine::handoff
