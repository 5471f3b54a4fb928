// Many loads on one connector: a round looks at those that something happened to, however many are
// open. Looks are counted, not time.
#include "kvtransfer/internal/connector/kv_jobs.h"
#include "kvtransfer/internal/connector/kv_loads.h"
#include "tests/kvtransfer/kv_engines.h"
#include "tests/kvtransfer/kv_pair.h"
#include "tests/manual_clock.h"
#include "tests/test.h"
#include "transport/address.h"
#include "transport/net/endpoint.h"

namespace baton::kvtransfer {
namespace {

using std::chrono::hours;
using std::chrono::minutes;
using std::chrono::seconds;

constexpr uint32_t kMany = 1000;

// A worker with a cache of one layer, each block of which has one token.
struct Node {
  Node(const std::string& name, const Clock& clock) : worker(make(name, clock)), mailbox(*worker) {
    const KvShape shape{1, kMany, 1, 1, 0, 1, 8, KvDtype::kByte};
    cache.layout = KvLayout::paged(shape, KvLayout::Order::kNhd, KvLayout::Pair::kStacked, true);
    cache.layers = layers_of(cache.layout);
    memory.resize(cache.layout.buffers[0].bytes);
    const MemoryRegion region =
        *worker->register_memory(memory.data(), memory.size(), Access::kRemoteReadWrite);
    cache.buffers.push_back({region, {*worker->remote_region(region), 0}});
  }
  static std::unique_ptr<Worker> make(const std::string& name, const Clock& clock) {
    WorkerOptions options;
    options.name = name;
    options.key = test_key();
    options.providers = {"tcp"};
    options.clock = &clock;
    return *Worker::create(std::move(options));
  }
  std::unique_ptr<Worker> worker;
  KvMailbox mailbox;
  KvCacheMemory cache;
  std::vector<char> memory;
};

struct KvMany : ::testing::Test {
  KvMany() {
    loads.set_cache(&decode.cache);
    jobs.set_cache(&prefill.cache);
  }
  ~KvMany() override {
    decode.worker = nullptr;  // before what its callbacks use
    prefill.worker = nullptr;
  }
  absl::Status start(KvRequestId id, bool pull, Time timeout = hours(1), Time silence = Time{},
                     const std::string& where = "") {
    KvLoad load;
    load.id = id;
    load.prefill = where.empty() ? prefill.worker->address() : where;
    load.tokens = {static_cast<int32_t>(id)};
    load.blocks = {static_cast<uint32_t>(id)};
    load.timeout = timeout;
    load.silence = silence;
    load.pull = pull;
    load.lease = lease;
    return loads.start(std::move(load));
  }
  void move() {
    decode.worker->progress();
    prefill.worker->progress();
    KvMessage message;
    while (prefill.mailbox.receive(message)) {
      if (message.kind == KvMessageKind::kRequest) {
        jobs.on_request(message.peer, message.load, message.body, message.version);
      }
    }
    while (decode.mailbox.receive(message)) {
      peer_ = message.peer;
      if (message.kind == KvMessageKind::kOffer) {
        loads.on_offer(message.peer, message.load, message.body);
      } else if (message.kind == KvMessageKind::kFailed) {
        loads.on_failed(message.peer, message.load, message.body);
      }
    }
    decode.mailbox.flush();
    prefill.mailbox.flush();
  }
  // As BatonConnector makes them, without messages.
  void rounds(int count) {
    for (int i = 0; i < count; ++i) {
      loads.progress();
      loads.next_deadline();
      jobs.progress();
      jobs.end_leases();
      jobs.next_deadline();
    }
  }
  uint64_t looks() const { return loads.looked_at() + jobs.looked_at(); }
  // Loads that are looked at when so much time has gone by.
  uint64_t looked_at_after(Time span) {
    const uint64_t before = loads.looked_at();
    clock.advance(span);
    loads.progress();
    return loads.looked_at() - before;
  }
  ManualClock clock;
  Time lease = hours(3);
  PeerId peer_;  // prefill
  Node decode{"decode", clock}, prefill{"prefill", clock};
  KvLoads loads{*decode.worker, decode.mailbox, nullptr, "decode"};
  KvJobs jobs{*prefill.worker,
              prefill.mailbox,
              nullptr,
              {.serialized = false, .allow_pull = true, .max_lease = hours(3)}};
};

TEST_F(KvMany, ARoundLooksAtNoneToWhichNothingHappened) {
  for (uint32_t i = 0; i < kMany; ++i) {
    ASSERT_TRUE(start(i, i % 2 == 1, i == 7 || i == 8 ? minutes(5) : hours(1)).ok());
    move();
  }
  for (uint32_t taken = 0; taken < kMany;) {
    move();
    if (jobs.next_job().has_value()) ++taken;
  }
  const uint64_t before = looks();
  rounds(1000);
  EXPECT_EQ(looks(), before);
  // Two of them have less time, one that is pushed and one that pulls: prefill knows it of the one.
  EXPECT_LE(loads.next_deadline(), clock.now() + minutes(5));
  clock.advance(minutes(5));
  rounds(1000);
  EXPECT_EQ(looks(), before + 3);
  for (const KvRequestId id : {7, 8}) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(loads.status(id))) << loads.status(id);
  }
  EXPECT_TRUE(loads.status(9).ok());
  EXPECT_EQ(loads.loads_failed(), 2U);
  EXPECT_EQ(jobs.jobs_failed(), 1U);
  // Each is renewed, or ended, alone.
  ASSERT_TRUE(loads.renew(10, hours(2)).ok());
  ASSERT_TRUE(loads.renew(11, minutes(1)).ok());  // sooner than before
  clock.advance(minutes(1));
  rounds(1);
  EXPECT_EQ(loads.loads_failed(), 3U);
  clock.advance(hours(1));
  rounds(1);
  EXPECT_TRUE(loads.status(10).ok()) << loads.status(10);
  EXPECT_EQ(loads.loads_failed(), kMany - 1);
  clock.advance(hours(1));
  rounds(1);
  EXPECT_EQ(loads.loads_failed(), kMany);
}

TEST_F(KvMany, WhatHasFailedOrIsEndedIsNotLookedAtInItsTime) {
  ASSERT_TRUE(start(1, false, minutes(5)).ok());
  ASSERT_TRUE(start(2, false, minutes(10)).ok());
  EXPECT_FALSE(loads.end(2)) << "prefill has not said that it sends nothing";
  clock.advance(minutes(5));
  EXPECT_TRUE(absl::IsDeadlineExceeded(loads.status(1))) << "who asks is told";
  EXPECT_EQ(looked_at_after(Time{}), 0U);
  EXPECT_EQ(looked_at_after(hours(1)), 0U);
}

// Its lease has to be renewed in time: from when its prefill was found, though that says nothing.
TEST_F(KvMany, ALoadWhosePrefillWasLookedUpIsLookedAtInItsTime) {
  std::string port;
  const absl::StatusOr<Address> address = Address::decode(prefill.worker->address());
  for (const auto& [provider, where] : address->providers) {
    const auto at = net::literal(where);
    if (provider != "tcp" || !at.ok()) continue;
    const std::string text = at->front().text();
    port = text.substr(text.rfind(':'));
  }
  ASSERT_TRUE(start(1, true, hours(100), Time{}, "localhost" + port).ok());
  until([&] { return decode.worker->stats().transfers_submitted > 0; },
        [&] {
          loads.progress();
          decode.mailbox.flush();
        });
  EXPECT_EQ(looked_at_after(minutes(59)), 0U);
  EXPECT_EQ(looked_at_after(minutes(1)), 1U);
  EXPECT_EQ(looked_at_after(minutes(59)), 0U);
  EXPECT_EQ(looked_at_after(minutes(1)), 1U);
}

// Prefill grants less than it is asked for, and less again.
TEST_F(KvMany, ALoadIsLookedAtByTheLeaseThatItWasGranted) {
  lease = hours(30);
  ASSERT_TRUE(start(1, true, hours(100)).ok());
  until([&] { return jobs.next_job().has_value(); }, [&] { move(); });
  until([&] { return peer_.generation != 0; }, [&] { move(); });
  EXPECT_EQ(looked_at_after(minutes(59)), 0U);
  EXPECT_EQ(looked_at_after(minutes(1)), 1U) << "it is to be renewed";
  loads.on_lease_renewed(peer_, 1, kv_bytes(KvLease{1, minutes(30)}));
  EXPECT_EQ(looked_at_after(minutes(9)), 0U);
  EXPECT_EQ(looked_at_after(minutes(1)), 1U);
}

TEST_F(KvMany, SilenceIsLookedForNowAndThen) {
  for (uint32_t i = 0; i < kMany; ++i) {
    ASSERT_TRUE(start(i, false, hours(1), seconds(16)).ok());
  }
  for (int i = 0; i < 1000; ++i) move();
  const uint64_t before = looks();
  rounds(1000);
  EXPECT_EQ(looks(), before);
  clock.advance(seconds(1));
  rounds(1000);
  EXPECT_EQ(looks(), before + kMany) << "one look at each";
}

}  // namespace
}  // namespace baton::kvtransfer
