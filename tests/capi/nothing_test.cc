// What a call that fails leaves behind: nothing. Handles, numbers, bytes and counts that were to
// come out are NULL and 0, whatever lay there before, so that a caller may give back what he has on
// every path. And numbers that nobody means: counts of all memory, times before the beginning and
// after the end.
#include "tests/capi/side.h"
#include "tests/test.h"
#include "tests/until.h"

namespace {

using baton::until;

struct Nothing : ::testing::Test {
  Nothing() {
    EXPECT_EQ(baton_agent_open("nothing", &agent, &error), BATON_OK) << error.text;
    EXPECT_EQ(baton_kv_layout_create(&model, &layout, &error), BATON_OK) << error.text;
    EXPECT_EQ(baton_kv_layout_add_paged(layout, BATON_DRAM, &whole, 1, &group, &paged, &error),
              BATON_OK)
        << error.text;
  }
  ~Nothing() override {
    baton_kv_connector_destroy(connector);
    baton_kv_layout_destroy(layout);
    baton_agent_destroy(agent);
  }
  // The call fails, and what was to come out is nothing, whatever the caller's variable held
  // before.
  template <typename Out, typename Call>
  void fails(const char* what, const Call& call) {
    struct Held {
      Out out;
    };
    Held held;
    std::memset(&held, 7, sizeof held);
    const Held nothing{};
    EXPECT_LT(call(&held.out), 0) << what;
    EXPECT_EQ(std::memcmp(&held, &nothing, sizeof held), 0) << what;
  }
  alignas(8) char memory[2 * 4 * 4 * 8] = {};
  baton_descriptor whole{reinterpret_cast<uint64_t>(memory), sizeof memory, 0};
  baton_kv_model model{sizeof model, "weights", nullptr, nullptr, nullptr};
  baton_kv_group group{sizeof group, nullptr, 1, 4, 4, 0, 1, 0, 1};
  baton_kv_paged paged{sizeof paged, 8, BATON_KV_BYTE, BATON_KV_NHD, BATON_KV_STACKED, 0};
  baton_agent* agent = nullptr;
  baton_kv_connector* connector = baton::capi_tests::open_connector("nothing");
  baton_kv_layout* layout = nullptr;
  baton_error error = BATON_ERROR_INIT;
};

TEST_F(Nothing, ComesOutOfAnAgentsCallThatFailed) {
  using Bytes = baton_bytes;
  using Number = uint64_t;  // of a list or a transfer
  const baton_strided row{whole.address, 8, 0, 8, 4};
  const int64_t index = 0;
  baton_kv_request request = BATON_KV_REQUEST_INIT;
  for (baton_agent* const a : {static_cast<baton_agent*>(nullptr), agent}) {
    SCOPED_TRACE(a == nullptr ? "no agent" : "an agent");
    if (a == nullptr) {
      fails<Bytes>("metadata", [&](Bytes* out) { return baton_agent_metadata(a, out, &error); });
      fails<Bytes>("explain",
                   [&](Bytes* out) { return baton_agent_explain(a, "absent", out, &error); });
    }
    fails<Bytes>("partial metadata", [&](Bytes* out) {
      return baton_agent_partial_metadata(a, 99, &whole, 1, 1, out, &error);
    });
    fails<Bytes>("add", [&](Bytes* out) { return baton_agent_add_remote(a, "x", 1, out, &error); });
    using Texts = std::array<Bytes, 3>;
    fails<Texts>("next", [&](Texts* out) {
      (*out)[2] = {};
      return baton_next_message(a, &(*out)[0], &(*out)[1], &error);
    });
    fails<Texts>("wait", [&](Texts* out) {
      (*out)[2] = {};
      return baton_wait_message(a, 0, &(*out)[0], &(*out)[1], &error);
    });
    fails<Texts>("lost", [&](Texts* out) {
      return baton_next_lost_message(a, &(*out)[0], &(*out)[1], &(*out)[2], &error);
    });
    fails<Number>("list", [&](Number* out) {
      return baton_list_prepare(a, "absent", BATON_DRAM, &whole, 1, out, &error);
    });
    fails<Number>("rows", [&](Number* out) {
      return baton_list_prepare_strided(a, "absent", BATON_DRAM, &row, 1, out, &error);
    });
    fails<Number>("registered",
                  [&](Number* out) { return baton_list_register(a, 99, &row, 1, out, &error); });
    fails<Number>("transfer", [&](Number* out) {
      return baton_transfer_make(a, BATON_READ, 1, &index, 1, 2, &index, 1, nullptr, 0, out,
                                 &error);
    });
    fails<Number>("direct", [&](Number* out) {
      return baton_transfer_make_direct(a, BATON_READ, BATON_DRAM, &whole, 1, &whole, 1, "absent",
                                        nullptr, 0, out, &error);
    });
    fails<Number>("between", [&](Number* out) {
      return baton_transfer_make_between(a, BATON_READ, BATON_DRAM, &whole, 1, BATON_DRAM, &whole,
                                         1, nullptr, nullptr, 0, out, &error);
    });
    fails<baton_kv_plan*>("plan", [&](baton_kv_plan** out) {
      return baton_kv_plan_create(a, BATON_READ, layout, "absent", layout, nullptr, out, &error);
    });
    fails<Number>("of a plan", [&](Number* out) {
      return baton_kv_plan_make_transfer(a, nullptr, &request, nullptr, 0, out, &error);
    });
  }
}

TEST_F(Nothing, ComesOutOfOtherCallsThatFailed) {
  using Agent = baton_agent*;
  using Layout = baton_kv_layout*;
  using Bytes = baton_bytes;
  const int64_t numbers[] = {1, 1};
  fails<Agent>("open", [&](Agent* out) { return baton_agent_open("", out, &error); });
  fails<Agent>("create", [&](Agent* out) { return baton_agent_create(nullptr, out, &error); });
  fails<Layout>("layout",
                [&](Layout* out) { return baton_kv_layout_create(nullptr, out, &error); });
  fails<Layout>("decode", [&](Layout* out) { return baton_kv_layout_decode("x", 1, out, &error); });
  fails<Bytes>("encode", [&](Bytes* out) { return baton_kv_layout_encode(nullptr, out, &error); });
  for (const int64_t* const written : {numbers, static_cast<const int64_t*>(nullptr)}) {
    fails<Bytes>("packing", [&](Bytes* out) {
      return baton_kv_find_packing(written, 2, 1, 1, 1, out, &error);
    });
  }
  fails<size_t>("heard", [&](size_t* out) {
    return baton_kv_ranks_heard(8, 0, 0, 0, nullptr, 0, out, &error);
  });
  fails<std::array<uint32_t, 2>>("shard", [&](std::array<uint32_t, 2>* out) {
    return baton_kv_shard_heads(8, 0, 0, &(*out)[0], &(*out)[1], &error);
  });
}

TEST_F(Nothing, ComesOutOfAConnectorsCallThatFailed) {
  using Bytes = baton_bytes;
  const baton_kv_binding nameless{sizeof nameless, nullptr, 1, 1, 0};
  fails<baton_kv_connector*>("create", [&](baton_kv_connector** out) {
    return baton_kv_connector_create(nullptr, out, &error);
  });
  for (baton_kv_connector* const c : {static_cast<baton_kv_connector*>(nullptr), connector}) {
    SCOPED_TRACE(c == nullptr ? "no connector" : "a connector");
    if (c == nullptr) {
      fails<Bytes>("address",
                   [&](Bytes* out) { return baton_kv_connector_address(c, out, &error); });
    }
    fails<Bytes>("stats",
                 [&](Bytes* out) { return baton_kv_connector_get_stats(c, nullptr, out, &error); });
    fails<Bytes>("payload", [&](Bytes* out) { return baton_kv_load_payload(c, 5, out, &error); });
    fails<uint32_t>("state", [&](uint32_t* out) { return baton_kv_load_state(c, 5, out, &error); });
    fails<size_t>("failed", [&](size_t* out) {
      return baton_kv_load_failed_blocks(c, 5, nullptr, 0, out, &error);
    });
    for (const baton_kv_binding* const binding : {&nameless, decltype(&nameless){}}) {
      fails<uint64_t>("bind",
                      [&](uint64_t* out) { return baton_kv_job_bind(c, binding, out, &error); });
    }
    baton_kv_load load = BATON_KV_LOAD_INIT;
    EXPECT_LT(baton_kv_load_start(c, &load, &error), 0);
  }
}

// Counts of all memory, with a pointer to one element, so that only the count can be wrong; and
// counts of what is said to be there and is not, which no call takes for an empty list or message.
TEST_F(Nothing, IsDoneWithAListThatCannotBeThere) {
  const baton_strided row{whole.address, 8, 0, 8, 4};
  const int64_t index = 0;
  ASSERT_EQ(baton_agent_register(agent, BATON_DRAM, &whole, 1, &error), BATON_OK) << error.text;
  baton_list list = 0;
  ASSERT_EQ(baton_list_prepare(agent, nullptr, BATON_DRAM, &whole, 1, &list, &error), BATON_OK);
  ASSERT_EQ(baton_kv_connector_register_cache(connector, layout, &error), BATON_OK) << error.text;
  const baton_descriptor one = whole;
  EXPECT_EQ(baton_agent_has_remote(agent, "nothing", BATON_DRAM, nullptr, 0), 1);
  for (const size_t count :
       {SIZE_MAX, SIZE_MAX - 7, SIZE_MAX / 2 + 1, size_t{1} << 58, size_t{5}}) {
    SCOPED_TRACE(count);
    const auto given = [&](const auto* there) { return count == 5 ? nullptr : there; };
    const baton_descriptor* const ranges = given(&one);
    const char* const text = given("x");
    uint64_t out = 0;
    baton_bytes bytes{};
    EXPECT_LT(baton_agent_register(agent, BATON_DRAM, ranges, count, &error), 0);
    EXPECT_LT(baton_agent_deregister(agent, BATON_DRAM, ranges, count, &error), 0);
    EXPECT_LT(baton_agent_partial_metadata(agent, BATON_DRAM, ranges, count, 1, &bytes, &error), 0);
    EXPECT_EQ(baton_agent_has_remote(agent, "nothing", BATON_DRAM, ranges, count), 0);
    EXPECT_LT(baton_agent_wait_remote(agent, "nothing", BATON_DRAM, ranges, count, 0, &error), 0);
    EXPECT_LT(baton_agent_add_remote(agent, text, count, nullptr, &error), 0);
    if (text != nullptr) {  // NULL: its own
      EXPECT_LT(baton_agent_send_metadata(agent, "127.0.0.1:1", text, count, &error), 0);
    }
    EXPECT_LT(baton_list_prepare(agent, nullptr, BATON_DRAM, ranges, count, &out, &error), 0);
    EXPECT_LT(
        baton_list_prepare_strided(agent, nullptr, BATON_DRAM, given(&row), count, &out, &error),
        0);
    EXPECT_LT(baton_list_register(agent, BATON_DRAM, given(&row), count, &out, &error), 0);
    EXPECT_LT(baton_transfer_make(agent, BATON_READ, list, given(&index), count, list,
                                  given(&index), count, nullptr, 0, &out, &error),
              0);
    EXPECT_LT(baton_transfer_make_direct(agent, BATON_READ, BATON_DRAM, ranges, count, ranges,
                                         count, "nothing", nullptr, 0, &out, &error),
              0);
    EXPECT_LT(baton_transfer_make_direct(agent, BATON_READ, BATON_DRAM, &whole, 1, &whole, 1,
                                         "nothing", text, count, &out, &error),
              0);
    EXPECT_LT(baton_notify(agent, "nothing", text, count, &error), 0);
    baton_kv_layout* made = nullptr;
    EXPECT_LT(baton_kv_layout_decode(text, count, &made, &error), 0);
    EXPECT_EQ(baton_kv_layout_create(&model, &made, &error), BATON_OK);
    EXPECT_LT(baton_kv_layout_add_paged(made, BATON_DRAM, ranges, count, &group, &paged, &error),
              0);
    EXPECT_LT(baton_kv_layout_add_latent(made, BATON_DRAM, ranges, count, &group, 8, BATON_KV_BYTE,
                                         &error),
              0);
    const uint64_t at = whole.address;
    const baton_kv_field field{BATON_KV_OPAQUE, BATON_KV_BYTE, 8, 1, 8, 8, 8, 1, &at};
    EXPECT_LT(baton_kv_layout_add_fields(made, BATON_DRAM, &whole, 1, &group, given(&field), count,
                                         &error),
              0);
    EXPECT_LT(
        baton_kv_layout_add_fields(made, BATON_DRAM, ranges, count, &group, &field, 1, &error), 0);
    EXPECT_LT(baton_kv_layout_add_packed(made, BATON_DRAM, ranges, count, &group, "{}", 0, &error),
              0);
    const uint32_t layer = 0;
    baton_kv_group many = group;
    many.layers = given(&layer);
    many.layer_count = count;
    EXPECT_LT(baton_kv_layout_add_paged(made, BATON_DRAM, &whole, 1, &many, &paged, &error), 0);
    baton_kv_layout_destroy(made);
    EXPECT_LT(baton_kv_find_packing(given(&index), count, 1, 1, 1, &bytes, &error), 0);
    baton_kv_load load = BATON_KV_LOAD_INIT;
    const int32_t token = 1;
    load.prefill = "127.0.0.1:1";
    load.tokens = given(&token);
    load.token_count = count;
    load.blocks = &layer;
    load.block_count = 1;
    EXPECT_LT(baton_kv_load_start(connector, &load, &error), 0);
    load.tokens = &token;
    load.token_count = 1;
    load.blocks = given(&layer);
    load.block_count = count;
    EXPECT_LT(baton_kv_load_start(connector, &load, &error), 0);
    load.blocks = &layer;
    load.block_count = 1;
    load.shards = given(&load.prefill);
    load.shard_count = count;
    EXPECT_LT(baton_kv_load_start(connector, &load, &error), 0);
    EXPECT_LT(baton_kv_job_save_layer(connector, 1, 0, 0, given(&layer), count, &error), 0);
    EXPECT_LT(baton_kv_job_give_payload(connector, 1, text, count, &error), 0);
  }
}

TEST_F(Nothing, IsAllocatedForAnOptionOfAllMemory) {
  baton_agent_options options;
  baton_agent_options_init(&options, sizeof options);
  options.name = "greedy";
  options.max_transfers = UINT32_MAX;
  baton_agent* greedy = nullptr;
  EXPECT_LT(baton_agent_create(&options, &greedy, &error), 0);
  EXPECT_EQ(greedy, nullptr);
  EXPECT_STRNE(error.text, "");
  baton_kv_connector_options kv;
  baton_kv_connector_options_init(&kv, sizeof kv);
  kv.name = "greedy";
  kv.max_transfers = UINT32_MAX;
  baton_kv_connector* no_connector = nullptr;
  EXPECT_LT(baton_kv_connector_create(&kv, &no_connector, &error), 0);
  EXPECT_EQ(no_connector, nullptr);
}

// Before its beginning all time is over; behind its end it is for ever.
TEST_F(Nothing, OverflowsWithAnyTimeout) {
  ASSERT_EQ(baton_agent_register(agent, BATON_DRAM, &whole, 1, &error), BATON_OK) << error.text;
  const baton_descriptor from{whole.address, 8, 0}, to{whole.address + 8, 8, 0};
  for (const int64_t timeout :
       {INT64_MAX, INT64_MAX - 1, int64_t{-1}, INT64_MIN, int64_t{-2}, int64_t{0}, int64_t{1}}) {
    SCOPED_TRACE(timeout);
    baton_transfer transfer = 0;
    ASSERT_EQ(baton_transfer_make_direct(agent, BATON_WRITE, BATON_DRAM, &from, 1, &to, 1,
                                         "nothing", nullptr, 0, &transfer, &error),
              BATON_OK)
        << error.text;
    ASSERT_GE(baton_transfer_post(agent, transfer, nullptr, 0, &error), 0) << error.text;
    const int32_t waited = baton_transfer_wait(agent, transfer, timeout, &error);
    EXPECT_TRUE(waited == BATON_OK || (waited == BATON_ERR_TIMEOUT && timeout >= 0 && timeout < 2))
        << baton_result_name(waited) << ": " << error.text;
    EXPECT_EQ(baton_transfer_wait(agent, transfer, BATON_FOREVER, &error), BATON_OK);
    EXPECT_EQ(baton_transfer_release(agent, transfer, timeout, &error), BATON_OK) << error.text;
    ASSERT_EQ(baton_transfer_make_direct(agent, BATON_WRITE, BATON_DRAM, &from, 1, &to, 1,
                                         "nothing", nullptr, 0, &transfer, &error),
              BATON_OK);
    const int32_t ran = baton_transfer_run(agent, transfer, timeout, &error);
    EXPECT_TRUE(ran == BATON_OK || (ran == BATON_ERR_TIMEOUT && timeout >= 0 && timeout < 2))
        << baton_result_name(ran);
    EXPECT_EQ(baton_transfer_state(agent, transfer, &error), BATON_ERR_NOT_FOUND);
    ASSERT_EQ(baton_notify(agent, "nothing", "x", 1, &error), BATON_OK) << error.text;
    baton_bytes text{};
    int32_t came = baton_wait_message(agent, timeout, nullptr, &text, &error);
    EXPECT_TRUE(came == BATON_OK || (came == BATON_ERR_TIMEOUT && timeout >= 0 && timeout < 2))
        << baton_result_name(came);
    if (came != BATON_OK) {
      came = baton_wait_message(agent, BATON_FOREVER, nullptr, &text, &error);
      EXPECT_EQ(came, BATON_OK);
    }
    baton_bytes_free(&text);
  }
  // Of connectors: a job that is bound, renewed for any time.
  ASSERT_EQ(baton_kv_connector_register_cache(connector, layout, &error), BATON_OK) << error.text;
  int number = 0;
  for (const int64_t lease : {INT64_MAX, int64_t{-1}, int64_t{1}, INT64_MIN}) {
    SCOPED_TRACE(lease);
    const std::string key = std::to_string(++number);
    const baton_kv_binding binding{sizeof binding, key.c_str(), 4, 1, lease};
    uint64_t job = 0;
    const int32_t bound = baton_kv_job_bind(connector, &binding, &job, &error);
    EXPECT_TRUE(bound == BATON_OK || bound == BATON_ERR_INVALID_PARAM)
        << baton_result_name(bound) << ": " << error.text;
    if (bound != BATON_OK) continue;
    EXPECT_GE(baton_kv_job_renew(connector, job, lease, &error), BATON_ERR_INVALID_PARAM);
    if (lease == INT64_MAX || lease == -1) {
      EXPECT_EQ(baton_kv_job_is_wanted(connector, job), 1);
    }
  }
  const int32_t tokens[] = {1, 2};
  const uint32_t block = 1;
  for (const int64_t timeout : {INT64_MAX, int64_t{-1}}) {
    baton_kv_load load = BATON_KV_LOAD_INIT;
    load.id = static_cast<uint64_t>(timeout);
    load.prefill = "127.0.0.1:1";
    load.tokens = tokens;
    load.token_count = 2;
    load.blocks = &block;
    load.block_count = 1;
    load.timeout = load.silence = load.lease = timeout;
    ASSERT_EQ(baton_kv_load_start(connector, &load, &error), BATON_OK) << error.text;
    for (const int64_t other : {INT64_MAX, int64_t{-1}, INT64_MIN}) {
      const int32_t renewed = baton_kv_load_renew(connector, load.id, other, &error);
      EXPECT_NE(renewed, BATON_ERR_NOT_FOUND);
      EXPECT_NE(renewed, BATON_ERR_CANCELED) << other;
    }
    until([&] { return baton_kv_load_end(connector, load.id, &error) != BATON_IN_PROGRESS; },
          [&] { baton_kv_connector_wait(connector, 1'000'000'000, &error); });
  }
  EXPECT_EQ(baton_kv_connector_wait(connector, INT64_MIN, nullptr), BATON_OK);
}

}  // namespace
