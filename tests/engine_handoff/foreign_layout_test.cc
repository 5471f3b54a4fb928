// What engines say of their blocks: read, written, and refused.
#include "engine/handoff/foreign_layout.h"
#include "tests/test.h"

namespace baton::engine::handoff {
namespace {

using nlohmann::json;
using testing::HasSubstr;

// Where the number (head, token, element) lies, counted in numbers.
uint64_t number_place(const kvtransfer::KvPacking::Places& places, size_t head, size_t token,
                      size_t element) {
  return places.start + steps_of(places.heads)[head] + steps_of(places.tokens)[token] +
         steps_of(places.elements)[element];
}

constexpr KvGeometry kGeometry{.layers = 2, .kv_heads = 3, .head_dim = 32};

// Blocks of 64 tokens as matrix units read them: groups of 16 tokens, pairs of elements.
json tiled() {
  const int half = 64 * 32;
  return {{"block_tokens", 64},
          {"heads", 3},
          {"head_size", 32},
          {"dtype", "bfloat16"},
          {"bytes", 3 * 2 * half * 2},
          {"layers", {1, 0}},
          {"key",
           {{"start", 0},
            {"heads", {{3, 2 * half}}},
            {"tokens", {{16, 2}, {4, 512}}},
            {"elements", {{2, 1}, {16, 32}}}}},
          {"value",
           {{"start", half},
            {"heads", {{3, 2 * half}}},
            {"tokens", {{2, 1}, {32, 32}}},
            {"elements", {{16, 2}, {2, 1024}}}}}};
}

TEST(ForeignLayout, IsReadAndSaidTheSame) {
  auto layout = must(ForeignLayout::parse(tiled()));
  EXPECT_EQ(layout.say(), tiled());
  EXPECT_TRUE(layout.place(kGeometry, 3, 1, 0).ok());
  EXPECT_EQ(number_place(layout.key, 1, 17, 5), 1u * 4096 + 512 + 2 + 2 * 32 + 1);
  EXPECT_EQ(number_place(layout.value, 1, 17, 5), 2048u + 4096 + 8 * 32 + 1 + 5 * 2);
}

TEST(ForeignLayout, ThisEnginesLayoutMatchesItsCache) {
  const auto own = ForeignLayout::own(kGeometry);
  const auto parsed = must(ForeignLayout::parse(own.say()));
  EXPECT_EQ(parsed, own);
  std::vector<uint16_t> memory(kGeometry.cache_bytes(1) / 2);
  const KvCache cache(kGeometry, memory.data(), 1);
  for (uint32_t head = 0; head < 3; ++head) {
    for (uint32_t token = 0; token < 16; ++token) {
      for (uint32_t i = 0; i < 32; ++i) {
        const auto h = static_cast<int>(head);
        EXPECT_EQ(cache.key(0, 0, h) + i * 16 + token - memory.data(),
                  number_place(own.key, head, token, i));
        EXPECT_EQ(cache.value(0, 0, h) + token * 32 + i - memory.data(),
                  number_place(own.value, head, token, i));
      }
    }
  }
}

TEST(ForeignLayout, WhatCannotBeIsRefused) {
  const auto refused = [](const std::function<void(json&)>& change, const std::string& why) {
    json said = tiled();
    change(said);
    const auto layout = ForeignLayout::parse(said);
    ASSERT_FALSE(layout.ok()) << said;
    EXPECT_THAT(std::string(layout.status().message()), HasSubstr(why)) << said;
  };
  refused([](json& said) { said = nullptr; }, "it does not describe its cache");
  refused([](json& said) { said = json::array(); }, "it does not describe its cache");
  for (const char* key : {"heads", "head_size"}) {  // more steps than a block has numbers
    refused(
        [key](json& said) {
          const int many = 1 << 30;
          said[key] = many;
          const char* axis = key == std::string("heads") ? "heads" : "elements";
          for (const char* half : {"key", "value"}) said[half][axis] = {{many, 0}};
        },
        "numbers in blocks of");
  }
  refused([](json& said) { said["bytes"] = (1LL << 28) + 2; }, "numbers in blocks of");
  refused([](json& said) { said["whole"] = "x"; }, "where its numbers lie");
  refused([](json& said) { said["dtype"] = "float16"; }, "of float16");
  refused([](json& said) { said["layers"] = json::array(); }, "list its layers");
  refused([](json& said) { said["layers"] = {0, -1}; }, "a layer's number");
  refused([](json& said) { said["key"]["start"] = 2048; }, "would overlap");
  refused([](json& said) { said["value"]["start"] = 4096; }, "does not lie in its");
  refused([](json& said) { said["key"]["elements"] = {{2, 1}, {16, 1}}; }, "would overlap");
}

TEST(ForeignLayout, AnotherModelsLayoutIsRefused) {
  const auto layout = must(ForeignLayout::parse(tiled()));
  const auto why = [&](const KvGeometry& geometry) {
    ForeignLayout copy = layout;
    return std::string(
        copy.place(geometry, static_cast<uint32_t>(geometry.kv_heads), 1, 0).message());
  };
  EXPECT_THAT(why({.layers = 2, .kv_heads = 6, .head_dim = 32}), HasSubstr("3 KV heads of 32"));
  EXPECT_THAT(why({.layers = 2, .kv_heads = 3, .head_dim = 64}), HasSubstr("3 KV heads of 32"));
  EXPECT_THAT(why({.layers = 3, .kv_heads = 3, .head_dim = 32}), HasSubstr("3 layers once"));
  json twice = tiled();
  twice["layers"] = {1, 1};
  EXPECT_THAT(std::string(ForeignLayout::parse(twice)->place(kGeometry, 3, 1, 0).message()),
              HasSubstr("2 layers once"));
}

// Of ranks that say no more than how many heads they have, and of parts of them.
TEST(ForeignLayout, HeadsOfRanksAreFound) {
  json said = tiled();
  auto rank = ForeignLayout::parse(said);
  ASSERT_TRUE(rank.ok() && rank->place(kGeometry, 6, 2, 1).ok());
  EXPECT_EQ(rank->held(), (kvtransfer::KvHeads{3, 6}));
  const auto part = must(rank->part({4, 6}));
  EXPECT_EQ(part.held(), (kvtransfer::KvHeads{4, 6}));
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(part.key.start + steps_of(part.key.heads)[i],
              rank->key.start + steps_of(rank->key.heads)[i + 1]);
  }
  EXPECT_TRUE(absl::IsFailedPrecondition(ForeignLayout::parse(said)->place(kGeometry, 6, 3, 1)));
}

}  // namespace
}  // namespace baton::engine::handoff
