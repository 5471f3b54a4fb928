// Sessions in C, misused: caches and orders that no engine has, an agent that ends first, and one
// session after another.
#include <baton/baton.h>

#include "tests/test.h"
#include "tests/until.h"

namespace {

using ::testing::HasSubstr;

constexpr uint64_t kBlock = 256, kSessionBlocks = 8;

struct SessionInC : ::testing::Test {
  SessionInC() : memory(kBlock * kSessionBlocks) {
    baton_agent_options options;
    baton_agent_options_init(&options, sizeof options);
    options.name = "prefill/0";
    options.serve_metadata = 1;
    EXPECT_EQ(baton_agent_create(&options, &agent, &error), BATON_OK) << error.text;
    const baton_descriptor whole{reinterpret_cast<uint64_t>(memory.data()), memory.size(), 0};
    EXPECT_EQ(baton_agent_register(agent, BATON_DRAM, &whole, 1, &error), BATON_OK) << error.text;
  }
  ~SessionInC() override {
    baton_kv_session_destroy(session);
    baton_agent_destroy(agent);
  }
  // `more`: fields in front of the others.
  std::string cache(const std::string& more = "") const {
    return "{" + more + "\"identity\": \"m\", \"rows\": [[" +
           std::to_string(reinterpret_cast<uint64_t>(memory.data())) +
           ", 256, 0, 256, 8]], \"layers\": [0], "
           "\"kinds\": [{\"block_tokens\": 16, \"bytes\": 256, \"whole\": \"t\"}]}";
  }
  int32_t create(const std::string& text) {
    return baton_kv_session_create(agent, text.c_str(), nullptr, nullptr, &session, &error);
  }
  // How a load of these tokens, of block `block` and on, ends.
  int32_t load(uint64_t first_block, uint32_t block, uint64_t first, uint64_t end) {
    baton_kv_run run{};
    run.first_block = first_block;
    run.blocks = &block;
    run.count = 1;
    run.first_token = first;
    run.end_token = end;
    baton_kv_session_order order = BATON_KV_SESSION_ORDER_INIT;
    order.id = ++loads;
    order.transfer = "t";
    order.agent = "absent";
    order.address = "127.0.0.1:1";
    order.runs = &run;
    order.run_count = 1;
    EXPECT_EQ(baton_kv_session_load(session, &order, &error), BATON_OK) << error.text;
    baton_kv_loaded loaded{};
    loaded.size = sizeof loaded;
    return baton_kv_session_next_loaded(session, 60'000'000'000, &loaded, &error);
  }
  std::vector<unsigned char> memory;
  baton_agent* agent = nullptr;
  baton_kv_session* session = nullptr;
  baton_error error = BATON_ERROR_INIT;
  uint64_t loads = 0;
};

TEST_F(SessionInC, ACacheThatNoEngineHasIsRefused) {
  for (const char* more :
       {"\"rank\": 1e300, ", "\"rank\": -1, ", "\"rank\": 0.5, ", "\"rank\": 2, \"ranks\": 2, ",
        "\"heads\": 0, ", "\"lease\": \"x\", ", "\"groups\": [-1], "}) {
    EXPECT_EQ(create(cache(more)), BATON_ERR_INVALID_PARAM) << more;
    EXPECT_EQ(session, nullptr);
  }
  for (const char* text :
       {"", "{", "[]", "null", "{}", "{\"rows\": []}", "{\"identity\": \"a\", \"rows\": []}"}) {
    EXPECT_EQ(create(text), BATON_ERR_INVALID_PARAM) << text;
  }
  EXPECT_EQ(create(std::string(1'000'000, '[')), BATON_ERR_INVALID_PARAM);
}

TEST_F(SessionInC, AnOrderThatItsBlocksDoNotHoldFailsAtOnce) {
  ASSERT_EQ(create(cache()), BATON_OK) << error.text;
  EXPECT_EQ(load(0, 3, 16, 3), BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(load(0, 3, 0, 17), BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(load(0, 3, 0, UINT64_MAX), BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(load(UINT64_MAX, 3, 0, 16), BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(load(0, 8, 0, 16), BATON_ERR_INVALID_PARAM);
  EXPECT_THAT(error.text, HasSubstr("the cache has no block 8"));
}

TEST_F(SessionInC, AnAgentHasOneAfterAnother) {
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(create(cache()), BATON_OK) << error.text;
    baton_kv_session* second = nullptr;
    EXPECT_EQ(baton_kv_session_create(agent, cache().c_str(), nullptr, nullptr, &second, &error),
              BATON_ERR_NOT_ALLOWED);
    baton_kv_session_destroy(std::exchange(session, nullptr));
  }
}

TEST_F(SessionInC, OutlivesItsAgent) {
  ASSERT_EQ(create(cache()), BATON_OK) << error.text;
  const uint32_t block = 1;
  uint64_t send = 0;
  ASSERT_EQ(baton_kv_session_open(session, "s", &send, &error), BATON_OK);
  EXPECT_EQ(baton_kv_session_save(session, send, 0, 0, &block, 1, &error), BATON_OK) << error.text;
  EXPECT_EQ(baton_kv_session_hold(session, send, &error), BATON_OK);
  EXPECT_EQ(baton_kv_session_next_released(session, &send, &error), BATON_ERR_NOT_FOUND);
  baton_agent_destroy(std::exchange(agent, nullptr));
  EXPECT_EQ(baton_kv_session_next_released(session, &send, &error), BATON_OK) << error.text;
  EXPECT_EQ(baton_kv_session_open(session, "t", &send, &error), BATON_OK);
  EXPECT_EQ(send, 0U);
  EXPECT_EQ(baton_kv_session_save(session, send, 0, 0, &block, 1, &error), BATON_OK);
  EXPECT_EQ(baton_kv_session_hold(session, send, &error), BATON_OK);
  baton_kv_session_order order = BATON_KV_SESSION_ORDER_INIT;
  EXPECT_EQ(baton_kv_session_load(session, &order, &error), BATON_ERR_INVALID_PARAM);  // id 0
  order.id = 1;
  EXPECT_EQ(baton_kv_session_load(session, &order, &error), BATON_ERR_REMOTE_DISCONNECT);
  EXPECT_EQ(baton_kv_session_turn(session), 0);
}

TEST_F(SessionInC, ItsAgentMayGoWhileOtherThreadsTakeTurns) {
  ASSERT_EQ(create(cache()), BATON_OK) << error.text;
  std::atomic<int> turns{0};
  std::atomic<bool> over{false};
  std::vector<std::thread> others(4);
  for (std::thread& other : others) {
    other = std::thread([&] {
      for (; !over; ++turns) baton_kv_session_turn(session);
    });
  }
  baton::until([&] { return turns > 1000; });
  baton_agent_destroy(std::exchange(agent, nullptr));
  const int before = turns;
  baton::until([&] { return turns > before + 100; });
  over = true;
  for (std::thread& other : others) other.join();
}

}  // namespace
