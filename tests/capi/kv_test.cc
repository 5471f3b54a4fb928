// KV layouts and plans in C: structs of every size, handles that are none, and one plan from its
// layouts to the bytes. What plans move is tested in Python (tests/python/kv_plan_test.py).
#include <baton/baton.h>

#include "tests/test.h"

namespace {

using ::testing::HasSubstr;

constexpr uint32_t kLayers[] = {4, 7};

struct Engine {
  // Two layers, [block][token][head][element] of K and then of V; 2 heads of 4 elements of 2 bytes.
  Engine(const char* name, uint32_t blocks, uint32_t block_tokens)
      : memory(4 * blocks * block_tokens * 16) {
    baton_agent_options options;
    baton_agent_options_init(&options, sizeof options);
    options.name = name;
    EXPECT_EQ(baton_agent_create(&options, &agent, &error), BATON_OK) << error.text;
    const baton_descriptor whole{address(0), memory.size(), 0};
    EXPECT_EQ(baton_agent_register(agent, BATON_DRAM, &whole, 1, &error), BATON_OK) << error.text;
    for (uint64_t i = 0; i < 4; ++i) {
      tensors.push_back({address(i * memory.size() / 4), memory.size() / 4, 0});
    }
    model = {sizeof model, "weights", "bf16", nullptr, nullptr};
    group = {sizeof group, kLayers, 2, blocks, block_tokens, 0, 2, 0, 2};
    paged = {sizeof paged, 4, BATON_KV_BFLOAT16, BATON_KV_NHD, BATON_KV_SPLIT, 0};
  }
  ~Engine() {
    baton_kv_layout_destroy(layout);
    baton_agent_destroy(agent);
  }
  void describe() {
    ASSERT_EQ(baton_kv_layout_create(&model, &layout, &error), BATON_OK) << error.text;
    ASSERT_EQ(add(), BATON_OK) << error.text;
  }
  int32_t add() {
    return baton_kv_layout_add_paged(layout, BATON_DRAM, tensors.data(), tensors.size(), &group,
                                     &paged, &error);
  }
  uint64_t address(uint64_t offset) const {
    return reinterpret_cast<uint64_t>(memory.data()) + offset;
  }
  std::vector<char> memory;
  std::vector<baton_descriptor> tensors;
  baton_agent* agent = nullptr;
  baton_kv_model model;
  baton_kv_group group;
  baton_kv_paged paged;
  baton_kv_layout* layout = nullptr;
  baton_error error = BATON_ERROR_INIT;
};

struct KvInC : ::testing::Test {
  void SetUp() override {
    here.describe();
    there.describe();
    baton_bytes bytes{};
    ASSERT_EQ(baton_agent_metadata(there.agent, &bytes, &error), BATON_OK);
    ASSERT_EQ(baton_agent_add_remote(here.agent, bytes.data, bytes.size, nullptr, &error),
              BATON_OK);
    baton_bytes_free(&bytes);
    ASSERT_EQ(baton_kv_layout_encode(there.layout, &bytes, &error), BATON_OK) << error.text;
    ASSERT_EQ(baton_kv_layout_decode(bytes.data, bytes.size, &theirs, &error), BATON_OK);
    baton_bytes_free(&bytes);
  }
  void TearDown() override { baton_kv_layout_destroy(theirs); }
  int32_t create(baton_kv_plan** plan, int32_t op = BATON_READ,
                 const baton_kv_share* share = nullptr) {
    return baton_kv_plan_create(here.agent, op, here.layout, "there", theirs, share, plan, &error);
  }
  Engine here{"here", 4, 32}, there{"there", 8, 16};
  baton_kv_layout* theirs = nullptr;
  baton_error error = BATON_ERROR_INIT;
};

TEST_F(KvInC, APlanFromItsLayoutsToTheBytes) {
  for (size_t i = 0; i < there.memory.size(); ++i)
    there.memory[i] = static_cast<char>(i * 7 + i / 256);
  baton_kv_plan* plan = nullptr;
  ASSERT_EQ(create(&plan), BATON_OK) << error.text;
  baton_kv_plan_info info{};
  info.size = sizeof info;
  ASSERT_EQ(baton_kv_plan_get_info(plan, &info, &error), BATON_OK);
  EXPECT_EQ(info.bytes_per_token, 64u);
  EXPECT_EQ(info.layers, 2u);
  EXPECT_EQ(info.complete, 1u);
  const int64_t to[] = {2, 0}, from[] = {7, 1, 4};
  const baton_kv_blocks local{to, 2, 0}, remote{from, 3, 0};
  baton_kv_request request = BATON_KV_REQUEST_INIT;
  request.local = &local, request.remote = &remote;
  request.local_groups = request.remote_groups = 1;
  baton_transfer pull = 0;
  ASSERT_EQ(baton_kv_plan_make_transfer(here.agent, plan, &request, "got it", 6, &pull, &error),
            BATON_OK)
      << error.text;
  baton_kv_plan_destroy(plan);  // the transfer needs it no more
  ASSERT_EQ(baton_transfer_post(here.agent, pull, nullptr, 0, &error), BATON_OK) << error.text;
  ASSERT_EQ(baton_transfer_wait(here.agent, pull, 60'000'000'000, &error), BATON_OK) << error.text;
  const size_t token = 16;
  for (size_t tensor = 0; tensor < 4; ++tensor) {
    const char* source = &there.memory[tensor * there.memory.size() / 4];
    const char* target = &here.memory[tensor * here.memory.size() / 4];
    for (size_t t = 0; t < 64; ++t) {
      const char* got = target + (static_cast<size_t>(to[t / 32]) * 32 + t % 32) * token;
      if (t < 48) {
        EXPECT_EQ(
            memcmp(got, source + (static_cast<size_t>(from[t / 16]) * 16 + t % 16) * token, token),
            0)
            << tensor << " " << t;
      } else {
        EXPECT_EQ(std::string(got, token), std::string(token, '\0')) << t;
      }
    }
  }
  EXPECT_EQ(baton_transfer_release(here.agent, pull, BATON_FOREVER, &error), BATON_OK);
}

TEST_F(KvInC, GroupsAreAsTheyWereAdded) {
  baton_kv_group group{};
  group.size = sizeof group;
  ASSERT_EQ(baton_kv_layout_get_group(theirs, 0, &group, &error), BATON_OK);
  EXPECT_EQ(group.layer_count, 2u);
  EXPECT_EQ(group.layers[1], 7u);
  EXPECT_EQ(group.blocks, 8u);
  EXPECT_EQ(group.block_tokens, 16u);
  EXPECT_EQ(group.heads, 2u);
  EXPECT_EQ(baton_kv_layout_get_group(theirs, 1, &group, &error), BATON_ERR_NOT_FOUND);
  EXPECT_EQ(here.add(), BATON_ERR_INVALID_PARAM) << "the same layers again";
  EXPECT_THAT(here.error.text, HasSubstr("two groups"));
  const uint32_t others[] = {5};
  here.group.layers = others;
  here.group.layer_count = 1;
  ASSERT_EQ(baton_kv_layout_add_latent(here.layout, BATON_DRAM, here.tensors.data(), 1, &here.group,
                                       8, BATON_KV_BFLOAT16, &error),
            BATON_OK)
      << error.text;
  const uint32_t last[] = {9};
  here.group.layers = last;
  const uint64_t at = here.tensors[1].address;
  baton_kv_field field{BATON_KV_KEY, BATON_KV_BFLOAT16, 4, 0, 512, 16, 8, 2, &at};
  ASSERT_EQ(baton_kv_layout_add_fields(here.layout, BATON_DRAM, &here.tensors[1], 1, &here.group,
                                       &field, 1, &error),
            BATON_OK)
      << error.text;
  for (const auto& [index, layer] : {std::pair{1, 5u}, std::pair{2, 9u}}) {
    ASSERT_EQ(baton_kv_layout_get_group(here.layout, static_cast<size_t>(index), &group, &error),
              BATON_OK);
    EXPECT_EQ(group.layers[0], layer);
  }
  field.dtype = 99;
  EXPECT_EQ(baton_kv_layout_add_fields(here.layout, BATON_DRAM, &here.tensors[1], 1, &here.group,
                                       &field, 1, &error),
            BATON_ERR_INVALID_PARAM);
  field.addresses = nullptr;
  EXPECT_EQ(baton_kv_layout_add_fields(here.layout, BATON_DRAM, &here.tensors[1], 1, &here.group,
                                       &field, 1, &error),
            BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_kv_layout_add_fields(here.layout, BATON_DRAM, nullptr, 7, &here.group, nullptr, 7,
                                       &error),
            BATON_ERR_INVALID_PARAM);
}

TEST_F(KvInC, NonsenseIsAnErrorAndNoCrash) {
  baton_kv_layout* layout = nullptr;
  baton_kv_plan* plan = nullptr;
  baton_transfer out = 0;
  baton_kv_request request = BATON_KV_REQUEST_INIT;
  baton_kv_plan_info info{};
  baton_bytes bytes{};
  baton_kv_layout_destroy(nullptr);
  baton_kv_plan_destroy(nullptr);
  EXPECT_EQ(baton_kv_layout_create(nullptr, &layout, &error), BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_kv_layout_create(&here.model, nullptr, &error), BATON_ERR_INVALID_PARAM);
  baton_kv_model nameless{sizeof nameless, nullptr, "bf16", nullptr, nullptr};
  EXPECT_EQ(baton_kv_layout_create(&nameless, &layout, &error), BATON_ERR_INVALID_PARAM);
  EXPECT_THAT(error.text, HasSubstr("weights"));
  EXPECT_EQ(layout, nullptr);
  EXPECT_EQ(baton_kv_layout_encode(nullptr, &bytes, &error), BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_kv_layout_decode(nullptr, 99, &layout, &error), BATON_ERR_MISMATCH);
  EXPECT_EQ(baton_kv_layout_decode("x", 1, nullptr, &error), BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_kv_layout_get_group(nullptr, 0, &here.group, &error), BATON_ERR_INVALID_PARAM);
  here.group.size = 3;
  EXPECT_EQ(here.add(), BATON_ERR_INVALID_PARAM);
  here.group.size = sizeof here.group;
  here.paged.size = 0;
  EXPECT_EQ(here.add(), BATON_ERR_INVALID_PARAM);
  here.paged.size = sizeof here.paged;
  here.paged.order = 2;
  EXPECT_EQ(here.add(), BATON_ERR_INVALID_PARAM);
  here.group.layers = nullptr;
  here.group.layer_count = SIZE_MAX;
  here.paged.order = BATON_KV_NHD;
  EXPECT_EQ(here.add(), BATON_ERR_INVALID_PARAM);

  EXPECT_EQ(create(&plan, 2), BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(create(nullptr), BATON_ERR_INVALID_PARAM);
  baton_kv_share share{sizeof share, 2, 2, 0};
  EXPECT_EQ(create(&plan, BATON_READ, &share), BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_kv_plan_create(nullptr, BATON_READ, here.layout, "there", theirs, nullptr, &plan,
                                 &error),
            BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_kv_plan_create(here.agent, BATON_READ, nullptr, "there", theirs, nullptr, &plan,
                                 &error),
            BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_kv_plan_create(here.agent, BATON_READ, here.layout, "absent", theirs, nullptr,
                                 &plan, &error),
            BATON_ERR_NOT_FOUND);
  EXPECT_EQ(plan, nullptr);
  EXPECT_EQ(baton_kv_plan_get_info(nullptr, &info, &error), BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_kv_plan_make_transfer(here.agent, nullptr, &request, nullptr, 0, &out, &error),
            BATON_ERR_INVALID_PARAM);
  ASSERT_EQ(create(&plan), BATON_OK) << error.text;
  EXPECT_EQ(baton_kv_plan_get_info(plan, &info, &error), BATON_ERR_INVALID_PARAM)
      << "its size is 0";
  EXPECT_EQ(baton_kv_plan_make_transfer(here.agent, plan, &request, nullptr, 0, &out, &error),
            BATON_ERR_INVALID_PARAM);
  EXPECT_THAT(error.text, HasSubstr("0 lists of local blocks"));
  const baton_kv_blocks none{nullptr, 77, 0};
  request.local = request.remote = &none;
  request.local_groups = request.remote_groups = 1;
  EXPECT_EQ(baton_kv_plan_make_transfer(here.agent, plan, &request, nullptr, 0, nullptr, &error),
            BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_kv_plan_make_transfer(here.agent, plan, &request, nullptr, 0, &out, &error),
            BATON_OK)
      << "no blocks, no bytes: " << error.text;
  request.size = 0;
  EXPECT_EQ(baton_kv_plan_make_transfer(here.agent, plan, &request, nullptr, 0, &out, &error),
            BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_kv_plan_make_transfer(there.agent, plan, &request, nullptr, 0, &out, &error),
            BATON_ERR_INVALID_PARAM);
  baton_kv_plan_destroy(plan);
}

TEST_F(KvInC, NonsenseAboutPackingsAndRanksIsRefused) {
  baton_kv_layout* layout = nullptr;
  ASSERT_EQ(baton_kv_layout_create(&here.model, &layout, &error), BATON_OK) << error.text;
  const auto add = [&](const char* packing) {
    return baton_kv_layout_add_packed(layout, BATON_DRAM, here.tensors.data(), 2, &here.group,
                                      packing, 0, &error);
  };
  for (const char* packing : {"", "null", "[]", "{", R"({"block_tokens": 1e9, "bytes": 4})"}) {
    EXPECT_EQ(add(packing), BATON_ERR_INVALID_PARAM) << packing;
  }
  EXPECT_EQ(add(nullptr), BATON_ERR_INVALID_PARAM);
  baton_kv_layout_destroy(layout);

  baton_bytes found{};
  const int64_t straight[] = {1, 2, -1, -2};
  EXPECT_EQ(baton_kv_find_packing(nullptr, 4, 2, 1, 1, &found, &error), BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_kv_find_packing(straight, 4, 0, 1, 1, &found, &error), BATON_ERR_INVALID_PARAM);
  ASSERT_EQ(baton_kv_find_packing(straight, 4, 2, 1, 1, &found, &error), BATON_OK) << error.text;
  EXPECT_THAT(std::string(static_cast<const char*>(found.data), found.size),
              HasSubstr(R"("tokens":[[2,1]])"));
  baton_bytes_free(&found);
  const int64_t extreme[] = {INT64_MIN, INT64_MAX, 1, 2};
  EXPECT_EQ(baton_kv_find_packing(extreme, 4, 2, 1, 1, &found, &error), BATON_ERR_INVALID_PARAM);

  size_t count = 99;
  uint32_t numbers[4] = {}, first = 0, heads = 0;
  EXPECT_EQ(baton_kv_shard_heads(8, 2, 2, &first, &heads, &error), BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_kv_shard_heads(8, 2, 1, nullptr, &heads, &error), BATON_ERR_INVALID_PARAM);
  ASSERT_EQ(baton_kv_shard_heads(8, 2, 1, &first, &heads, &error), BATON_OK) << error.text;
  EXPECT_EQ(first * 10 + heads, 44u);
  EXPECT_EQ(baton_kv_ranks_heard(8, UINT32_MAX, UINT32_MAX, 0, numbers, 4, &count, &error),
            BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_kv_ranks_heard(8, 2, 1, 0, numbers, 4, nullptr, &error), BATON_ERR_INVALID_PARAM);
}

}  // namespace
