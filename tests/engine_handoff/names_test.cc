// A prefill by a name that DNS is slow about: other loads come and go meanwhile.
#include "tests/engine_handoff/bare_hand_off.h"
#include "tests/slow_dns.h"
#include "tests/test.h"

namespace baton::engine::handoff {
namespace {

using std::chrono::milliseconds;

struct HandOffNames : testing::Test {
  HandOffNames() {
    for (auto* left : {&dns_asked, &dns_answered}) {
      while (left->try_acquire()) {
      }
    }
  }
  ~HandOffNames() override { dns_answered.release(1'000); }
  void turn() {
    prefill.turn();
    decode.turn();
    clock.advance(milliseconds(1));
  }
  template <typename Fact>
  void until(Fact fact, CallSite from = CallSite::here()) {
    baton::until(
        fact, [&] { turn(); }, [&] { return decode.state("decode"); }, from);
  }
  kvtransfer::KvTransfer slow(const std::string& transfer) const {
    kvtransfer::KvTransfer from = prefill.at(transfer);
    from.address = absl::StrCat("slow.example", from.address.substr(from.address.rfind(':')));
    return from;
  }
  // Of an agent that decode does not know.
  static kvtransfer::KvTransfer unknown(uint64_t id, const std::string& agent, int port) {
    return {.transfer = absl::StrCat("t", id),
            .agent = agent,
            .address = absl::StrCat("slow.example:", port)};
  }
  absl::Status load(uint64_t id, const kvtransfer::KvTransfer& from, uint32_t block) {
    kvtransfer::KvLoad order = Bare::order(id, {block});
    order.timeout = std::chrono::hours(1);
    order.silence = Time{};
    order.transfer = from;
    return decode->start_load(order);
  }
  ManualClock clock;
  Bare prefill{"prefill", clock}, decode{"decode", clock};
};

TEST_F(HandOffNames, ADnsLookupDelaysNoOtherRequest) {
  prefill.fill(1, 3);
  prefill.fill(2, 7);
  prefill.save("t", {1});
  prefill.save("u", {2});
  // Of an agent that decode does not know, so that it is asked for.
  kvtransfer::KvTransfer other = slow("t");
  other.agent = "another";
  ASSERT_TRUE(load(1, other, 5).ok());
  decode.turn();
  dns_asked.acquire();
  ASSERT_TRUE(load(2, prefill.at("u"), 6).ok());
  until([&] { return decode.ended(2); });
  EXPECT_TRUE(decode.holds(6, 7)) << decode.why(2);
  EXPECT_TRUE(decode->load_status(1).ok());
  EXPECT_FALSE(dns_asked.try_acquire()) << "one look-up at a time";
  until([&] { return decode->end_load(1); });
}

TEST_F(HandOffNames, APeerIsAskedOnceItsNameResolves) {
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
  kvtransfer::KvTransfer from = prefill.at("t");
  from.address = "no such host:4000";
  ASSERT_TRUE(load(1, from, 5).ok());
  until([&] { return decode.ended(1); });
  EXPECT_THAT(decode.why(1), testing::HasSubstr("no such host"));
}

TEST_F(HandOffNames, EachAddressIsLookedUpOnce) {
  for (uint64_t id = 1; id <= 6; id += 3) {
    ASSERT_TRUE(load(id, unknown(id, "one", 1), 5).ok());
    ASSERT_TRUE(load(id + 1, unknown(id + 1, "other", 1), 5).ok());
    ASSERT_TRUE(load(id + 2, unknown(id + 2, "one", 2), 5).ok());
  }
  for (int i = 0; i < 2; ++i) until([&] { return dns_asked.try_acquire(); });
  for (int i = 0; i < 1'000; ++i) turn();  // a second of the clock's, in which it would ask again
  EXPECT_FALSE(dns_asked.try_acquire());
}

TEST_F(HandOffNames, EightAtATimeAndOthersLater) {
  for (uint64_t id = 1; id <= 9; ++id) {
    ASSERT_TRUE(load(id, unknown(id, absl::StrCat("agent", id), static_cast<int>(id)), 5).ok());
  }
  for (int i = 0; i < 8; ++i) until([&] { return dns_asked.try_acquire(); });
  for (int i = 0; i < 100; ++i) turn();
  EXPECT_FALSE(dns_asked.try_acquire());
  dns_answered.release();
  until([&] { return dns_asked.try_acquire(); });
}

}  // namespace
}  // namespace baton::engine::handoff
