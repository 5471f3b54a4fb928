// KV layouts and plans in C: handles and numbers that are none. What layouts hold and plans move is
// tested in Python, over this interface (tests/python/kv_plan_test.py).
#include "tests/capi/side.h"
#include "tests/test.h"

namespace {

using ::testing::HasSubstr;

constexpr uint32_t kLayers[] = {4, 7};

struct Engine : baton::capi_tests::Side {
  // Two layers, [block][token][head][element] of K and then of V; 2 heads of 4 elements of 2 bytes.
  Engine(const char* name, uint32_t blocks, uint32_t block_tokens) : Side(name) {
    EXPECT_TRUE(good()) << error.text;
    const uint64_t bytes = uint64_t{blocks} * block_tokens * 16;
    for (uint64_t i = 0; i < 4; ++i) tensors.push_back({whole.address + i * bytes, bytes, 0});
    model = {sizeof model, "weights", "bf16", nullptr, nullptr};
    group = {sizeof group, kLayers, 2, blocks, block_tokens, 0, 2, 0, 2};
    paged = {sizeof paged, 4, BATON_KV_BFLOAT16, BATON_KV_NHD, BATON_KV_SPLIT, 0};
  }
  ~Engine() { baton_kv_layout_destroy(layout); }
  void describe() {
    ASSERT_EQ(baton_kv_layout_create(&model, &layout, &error), BATON_OK) << error.text;
    ASSERT_EQ(add(), BATON_OK) << error.text;
  }
  int32_t add() {
    return baton_kv_layout_add_paged(layout, BATON_DRAM, tensors.data(), tensors.size(), &group,
                                     &paged, &error);
  }
  std::vector<baton_descriptor> tensors;
  baton_kv_model model;
  baton_kv_group group;
  baton_kv_paged paged;
  baton_kv_layout* layout = nullptr;
};

struct KvInC : ::testing::Test {
  void SetUp() override {
    here.describe();
    there.describe();
    ASSERT_TRUE(here.meet(there.metadata())) << here.error.text;
    baton_bytes bytes{};
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

TEST_F(KvInC, NonsenseIsAnErrorAndNoCrash) {
  baton_kv_layout* layout = nullptr;
  baton_kv_plan* plan = nullptr;
  baton_transfer out = 0;
  baton_kv_request request = BATON_KV_REQUEST_INIT;
  baton_kv_plan_info info{};
  baton_kv_layout_destroy(nullptr);
  baton_kv_plan_destroy(nullptr);
  EXPECT_EQ(baton_kv_layout_create(&here.model, nullptr, &error), BATON_ERR_INVALID_PARAM);
  baton_kv_model nameless{sizeof nameless, nullptr, "bf16", nullptr, nullptr};
  EXPECT_EQ(baton_kv_layout_create(&nameless, &layout, &error), BATON_ERR_INVALID_PARAM);
  EXPECT_THAT(error.text, HasSubstr("weights"));
  EXPECT_EQ(layout, nullptr);
  EXPECT_EQ(baton_kv_layout_decode(nullptr, 99, &layout, &error), BATON_ERR_MISMATCH);
  EXPECT_EQ(baton_kv_layout_decode("x", 1, nullptr, &error), BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_kv_layout_get_group(nullptr, 0, &here.group, &error), BATON_ERR_INVALID_PARAM);
  here.paged.order = 2;
  EXPECT_EQ(here.add(), BATON_ERR_INVALID_PARAM);

  EXPECT_EQ(create(&plan, 2), BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(create(nullptr), BATON_ERR_INVALID_PARAM);
  baton_kv_share share{sizeof share, 2, 2, 0};
  EXPECT_EQ(create(&plan, BATON_READ, &share), BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_kv_plan_create(here.agent, BATON_READ, nullptr, "there", theirs, nullptr, &plan,
                                 &error),
            BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_kv_plan_create(here.agent, BATON_READ, here.layout, "absent", theirs, nullptr,
                                 &plan, &error),
            BATON_ERR_NOT_FOUND);
  EXPECT_EQ(plan, nullptr);
  EXPECT_EQ(baton_kv_plan_get_info(nullptr, &info, &error), BATON_ERR_INVALID_PARAM);
  ASSERT_EQ(create(&plan), BATON_OK) << error.text;
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
  EXPECT_EQ(baton_kv_plan_make_transfer(there.agent, plan, &request, nullptr, 0, &out, &error),
            BATON_ERR_INVALID_PARAM);
  baton_kv_plan_destroy(plan);
  size_t count = 99;
  uint32_t numbers[4] = {}, heads = 0;
  EXPECT_EQ(baton_kv_shard_heads(8, 2, 1, nullptr, &heads, &error), BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_kv_ranks_heard(8, 2, 1, 0, numbers, 4, nullptr, &error), BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_kv_ranks_heard(8, UINT32_MAX, UINT32_MAX, 0, numbers, 4, &count, &error),
            BATON_ERR_INVALID_PARAM);
}

}  // namespace
