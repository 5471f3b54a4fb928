// Names that DNS is slow about: whoever asks an agent for one waits for it alone, and of a
// connector's calls none does.
#include <baton/baton.h>

#include "tests/slow_dns.h"
#include "tests/test.h"

namespace {

TEST(NamesInC, NoCallOfAConnectorWaitsForDns) {
  baton_error error = BATON_ERROR_INIT;
  baton_kv_connector_options options;
  baton_kv_connector_options_init(&options, sizeof options);
  options.name = "names";
  baton_kv_connector* connector = nullptr;
  ASSERT_EQ(baton_kv_connector_create(&options, &connector, &error), BATON_OK) << error.text;
  alignas(8) char memory[2 * 4 * 4 * 8] = {};
  const baton_descriptor whole{reinterpret_cast<uint64_t>(memory), sizeof memory, 0};
  const baton_kv_model model{sizeof model, "weights", nullptr, nullptr, nullptr};
  const baton_kv_group group{sizeof group, nullptr, 1, 4, 4, 0, 1, 0, 1};
  const baton_kv_paged paged{sizeof paged, 8, BATON_KV_BYTE, BATON_KV_NHD, BATON_KV_STACKED, 0};
  baton_kv_layout* layout = nullptr;
  ASSERT_EQ(baton_kv_layout_create(&model, &layout, &error), BATON_OK);
  ASSERT_EQ(baton_kv_layout_add_paged(layout, BATON_DRAM, &whole, 1, &group, &paged, &error),
            BATON_OK)
      << error.text;
  ASSERT_EQ(baton_kv_connector_register_cache(connector, layout, &error), BATON_OK) << error.text;
  const int32_t token = 1;
  const uint32_t block = 1;
  baton_kv_load load = BATON_KV_LOAD_INIT;
  load.id = 5;
  load.prefill = "slow.example:1";
  load.tokens = &token;
  load.token_count = 1;
  load.blocks = &block;
  load.block_count = 1;
  // Each would wait for ever if it waited for the name.
  ASSERT_EQ(baton_kv_load_start(connector, &load, &error), BATON_OK) << error.text;
  baton::dns_asked.acquire();
  uint32_t layers = 7;
  EXPECT_EQ(baton_kv_load_state(connector, 5, &layers, &error), BATON_IN_PROGRESS) << error.text;
  EXPECT_EQ(layers, 0U);
  EXPECT_EQ(baton_kv_load_wait(connector, 5, 0, 1'000'000, &error), BATON_ERR_TIMEOUT);
  EXPECT_EQ(baton_kv_load_renew(connector, 5, 60'000'000'000, &error), BATON_OK) << error.text;
  EXPECT_EQ(baton_kv_load_end(connector, 5, &error), BATON_OK) << "nobody was asked anything";
  ASSERT_EQ(baton_kv_load_start(connector, &load, &error), BATON_OK) << error.text;
  // Whoever waits hears at once what came of it: nobody is at that port.
  std::thread answer([] { baton::dns_answered.release(); });
  EXPECT_EQ(baton_kv_load_wait(connector, 5, 0, BATON_FOREVER, &error), BATON_ERR_REMOTE_DISCONNECT)
      << error.text;
  answer.join();
  EXPECT_EQ(baton_kv_load_end(connector, 5, &error), BATON_OK);
  baton_kv_connector_destroy(connector);
  baton_kv_layout_destroy(layout);
}

TEST(NamesInC, AskingForMetadataWaitsForNoDns) {
  while (baton::dns_asked.try_acquire() || baton::dns_answered.try_acquire()) continue;
  baton_error error = BATON_ERROR_INIT;
  baton_agent* agent = nullptr;
  ASSERT_EQ(baton_agent_open("names", &agent, &error), BATON_OK) << error.text;
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(baton_agent_ask_metadata(agent, "other", "slow.example:1", &error), BATON_OK);
  }
  baton::dns_asked.acquire();
  EXPECT_FALSE(baton::dns_asked.try_acquire()) << "it is looked up once";
  baton::dns_answered.release();
  baton_agent_destroy(agent);
  EXPECT_LT(baton_agent_ask_metadata(nullptr, "other", "slow.example:1", &error), 0);
}

}  // namespace
