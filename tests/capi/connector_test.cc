// KV connectors in C: decode here, prefill in a process of its own that stands still
// (connector_peer), and what is refused. What connectors do is tested in tests/kvtransfer/ and,
// over this interface, in tests/python/connector/.
#include "tests/capi/side.h"
#include "tests/peer_process.h"
#include "tests/test.h"
#include "tests/until.h"

namespace {

using baton::until;
using ::testing::HasSubstr;

using baton::capi_tests::kLong;
constexpr uint32_t kLayers = 3, kBlocks = 8, kBlockTokens = 16;

// It stands still before its second layer.
struct Peer : baton::PeerProcess {
  Peer() : PeerProcess(CONNECTOR_PEER) {}
};

struct ConnectorInC : ::testing::Test {
  ConnectorInC() { std::iota(tokens.begin(), tokens.end(), 3); }
  ~ConnectorInC() override { baton_kv_connector_destroy(connector); }
  baton_kv_load load(uint64_t id, const std::string& prefill) const {
    baton_kv_load out = BATON_KV_LOAD_INIT;
    out.id = id;
    out.prefill = prefill.c_str();
    out.tokens = tokens.data();
    out.token_count = tokens.size();
    out.blocks = blocks;
    out.block_count = 3;
    return out;
  }
  // Load 9 is under way, and cannot end.
  void load_from_one_that_stops(Peer& prefill) {
    const std::string address = prefill.line();
    const baton_kv_load wanted = load(9, address);
    ASSERT_EQ(baton_kv_load_start(connector, &wanted, &error), BATON_OK) << error.text;
    EXPECT_EQ(prefill.line(), "stands");
    prefill.stop();
  }
  void end(uint64_t id) {
    until([&] { return baton_kv_load_end(connector, id, &error) != BATON_IN_PROGRESS; },
          [&] { baton_kv_connector_wait(connector, kLong, &error); });
  }
  baton_kv_connector* connector = baton::capi_tests::open_connector("decode-in-C");
  baton::capi_tests::Cache cache{connector, kLayers, kBlocks, kBlockTokens, 2};
  std::vector<int32_t> tokens = std::vector<int32_t>(40);
  const uint32_t blocks[3] = {6, 0, 3};
  baton_error error = BATON_ERROR_INIT;
};

// Prefill is stopped, so the load cannot end: who asks for that again and again, and sleeps in
// between, is not woken by its own questions.
TEST_F(ConnectorInC, EndingALoadCausesNoSpuriousWakeUp) {
  Peer prefill;
  load_from_one_that_stops(prefill);
  int slept = 0;
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(baton_kv_load_end(connector, 9, &error), BATON_IN_PROGRESS);
    slept += baton_kv_connector_wait(connector, 20'000'000, &error) == BATON_ERR_TIMEOUT ? 1 : 0;
  }
  EXPECT_GE(slept, 10);
  // Others hear that it was given up.
  EXPECT_EQ(baton_kv_load_wait(connector, 9, 2, kLong, &error), BATON_ERR_CANCELED) << error.text;
  prefill.kill_it();
  end(9);
}

// Who waits for a layer hears that somebody else ends the load.
TEST_F(ConnectorInC, EndingALoadWakesItsWaiter) {
  Peer prefill;
  load_from_one_that_stops(prefill);
  int32_t result = BATON_OK;
  std::thread waits([&] {
    baton_error why = BATON_ERROR_INIT;
    result = baton_kv_load_wait(connector, 9, 2, kLong, &why);
  });
  EXPECT_EQ(baton_kv_load_end(connector, 9, &error), BATON_IN_PROGRESS);
  waits.join();
  EXPECT_EQ(result, BATON_ERR_CANCELED);
  uint32_t failed[2] = {99, 99};
  size_t count = 0;
  ASSERT_EQ(baton_kv_load_failed_blocks(connector, 9, failed, 1, &count, &error), BATON_OK);
  EXPECT_EQ(count, 3u);
  EXPECT_EQ(failed[1], 99u) << "there was no room for it";
  prefill.kill_it();
  end(9);
}

// A deadline is news, too, where no peer is there to send any.
TEST_F(ConnectorInC, ALeaseExpiryWakesTheWaiter) {
  const baton_kv_binding binding{sizeof binding, "request 1", 40, 1, 50'000'000};
  uint64_t job = 0;
  ASSERT_EQ(baton_kv_job_bind(connector, &binding, &job, &error), BATON_OK) << error.text;
  until([&] { return baton_kv_job_is_wanted(connector, job) != 1; },
        [&] {
          ASSERT_EQ(baton_kv_connector_wait(connector, kLong, &error), BATON_OK) << error.text;
        });
}

// Both sides are this connector, and calls of prefill's in an order of their own.
TEST_F(ConnectorInC, JobsAreBoundRenewedAndGivenUp) {
  baton_kv_binding binding{sizeof binding, "request 1", 40, 1, 0};
  uint64_t job = 0;
  ASSERT_EQ(baton_kv_job_bind(connector, &binding, &job, &error), BATON_OK) << error.text;
  EXPECT_EQ(baton_kv_job_bind(connector, &binding, &job, &error), BATON_ERR_NOT_ALLOWED);
  binding.key = "request 2";
  ASSERT_EQ(baton_kv_job_bind(connector, &binding, &job, &error), BATON_OK) << error.text;
  EXPECT_EQ(baton_kv_job_is_wanted(connector, job), 1);
  EXPECT_EQ(baton_kv_job_save_layer(connector, job, 0, 0, blocks, 3, &error), BATON_OK);
  EXPECT_EQ(baton_kv_job_save_layer(connector, job, 0, 2, blocks, 3, &error),
            BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_kv_job_renew(connector, job, 0, &error), BATON_OK);  // nobody may come any more
  EXPECT_EQ(baton_kv_job_is_wanted(connector, job), 0);
  EXPECT_EQ(baton_kv_job_save_layer(connector, job, 1, 0, blocks, 3, &error), BATON_ERR_CANCELED);
  EXPECT_EQ(baton_kv_job_state(connector, job, &error), BATON_IN_PROGRESS) << "not finished";
  EXPECT_EQ(baton_kv_job_finish(connector, job, BATON_ERR_CANCELED, "nobody came", &error),
            BATON_OK);
  until([&] { return baton_kv_job_state(connector, job, &error) != BATON_IN_PROGRESS; },
        [&] { baton_kv_connector_wait(connector, kLong, &error); });
  EXPECT_EQ(baton_kv_job_renew(connector, job, kLong, &error), BATON_ERR_NOT_FOUND);
  baton_kv_job next{};
  next.size = sizeof next;
  EXPECT_EQ(baton_kv_job_next(connector, &next, &error), BATON_ERR_NOT_FOUND);
}

TEST_F(ConnectorInC, NonsenseIsAnErrorAndNoCrash) {
  baton_kv_connector* none = nullptr;
  baton_kv_connector_options options;
  baton_kv_connector_options_init(&options, sizeof options);
  EXPECT_EQ(baton_kv_connector_create(&options, &none, &error), BATON_ERR_INVALID_PARAM);
  EXPECT_THAT(error.text, HasSubstr("name"));
  EXPECT_EQ(baton_kv_connector_create(&options, nullptr, &error), BATON_ERR_INVALID_PARAM);
  options.name = "x";
  options.providers = "pigeons";
  EXPECT_LT(baton_kv_connector_create(&options, &none, &error), 0);
  EXPECT_EQ(none, nullptr);
  baton_kv_connector_destroy(nullptr);
  baton_kv_connector_options_init(nullptr, 0);
  EXPECT_EQ(baton_kv_connector_event_fd(nullptr), -1);
  EXPECT_GE(baton_kv_connector_event_fd(connector), 0);
  EXPECT_EQ(baton_kv_job_is_wanted(nullptr, 0), 0);
  EXPECT_EQ(baton_kv_connector_register_cache(connector, nullptr, &error), BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_kv_connector_register_cache(nullptr, cache.layout, &error),
            BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_kv_connector_register_cache(connector, cache.layout, &error),
            BATON_ERR_NOT_ALLOWED);
  baton_kv_load wanted = BATON_KV_LOAD_INIT;
  EXPECT_EQ(baton_kv_load_start(connector, &wanted, &error), BATON_ERR_INVALID_PARAM);
  EXPECT_THAT(error.text, HasSubstr("no source for the KV"));
  wanted.prefill = "127.0.0.1:1";
  for (int64_t* time : {&wanted.timeout, &wanted.silence, &wanted.lease}) {
    *time = -2;
    EXPECT_EQ(baton_kv_load_start(connector, &wanted, &error), BATON_ERR_INVALID_PARAM);
    EXPECT_THAT(error.text, HasSubstr("is -2"));
    *time = 0;
  }
  EXPECT_EQ(baton_kv_load_wait(connector, 1, kLayers, 0, &error), BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_kv_load_wait(connector, 1, 0, kLong, &error), BATON_ERR_NOT_FOUND);
  EXPECT_EQ(baton_kv_load_renew(connector, 1, 5, &error), BATON_ERR_NOT_FOUND);
  EXPECT_EQ(baton_kv_load_failed_blocks(connector, 1, nullptr, 4, nullptr, &error),
            BATON_ERR_INVALID_PARAM);
  size_t count = 99;
  EXPECT_EQ(baton_kv_load_failed_blocks(connector, 1, nullptr, 0, &count, &error),
            BATON_ERR_NOT_FOUND);
  EXPECT_EQ(count, 0u);
  baton_kv_binding binding{sizeof binding, "key", 4, 1, 0};
  EXPECT_EQ(baton_kv_job_bind(connector, &binding, nullptr, &error), BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_kv_job_give_payload(connector, 1, "x", 1, &error), BATON_ERR_NOT_FOUND);
  EXPECT_EQ(baton_kv_job_finish(connector, 1, BATON_IN_PROGRESS, nullptr, &error),
            BATON_ERR_INVALID_PARAM);
  baton_kv_connector_wait(connector, 0, &error);  // what happened so far
  EXPECT_EQ(baton_kv_connector_wait(nullptr, 0, &error), BATON_ERR_INVALID_PARAM);
}

}  // namespace
