// Packed blocks: what is said of them is read or refused, and why; and how they are packed is found
// by looking. That bytes move right between any two is for tests/python/vllm_reshard_test.py.
#include "kvtransfer/kv_packing.h"
#include "tests/fails_with.h"
#include "tests/test.h"

#include <nlohmann/json.hpp>

namespace baton::kvtransfer {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

constexpr uint64_t kAt = uint64_t{1} << 32;  // where the cache would lie
constexpr uint64_t kRoom = 1 << 20;

// [head]{K, V}[token][element]: 2 heads, 4 tokens, 4 elements of 2 bytes.
json good() {
  return json::parse(R"({
    "block_tokens": 4, "bytes": 128, "heads": 2, "head_size": 4, "dtype": "bfloat16",
    "key": {"start": 0, "tokens": [[4, 4]], "heads": [[2, 32]], "elements": [[4, 1]]},
    "value": {"start": 16, "tokens": [[4, 4]], "heads": [[2, 32]], "elements": [[4, 1]]}})");
}

// In tiles: K of pairs of elements, V of pairs of tokens.
json tiles() {
  json out = good();
  out["key"]["tokens"] = {{2, 2}, {2, 8}};
  out["key"]["elements"] = {{2, 1}, {2, 4}};
  out["value"]["tokens"] = {{2, 1}, {2, 8}};
  out["value"]["elements"] = {{4, 2}};
  return out;
}

struct Said {
  std::string at;  // a JSON pointer
  json is;         // instead; discarded: it is missing
};
json with(json packing, const std::vector<Said>& said) {
  for (const auto& [at, is] : said) {
    const json::json_pointer where(at);
    if (is.is_discarded()) {
      packing.at(where.parent_pointer()).erase(where.back());
    } else {
      packing[where] = is;
    }
  }
  return packing;
}
const json kMissing = json::parse("", nullptr, false);

absl::StatusOr<KvPlacement> placed(const std::string& packing, uint64_t stride = 0) {
  KvGroup group;
  group.layers = {3, 5};
  group.blocks = 10;
  return place_packed(packing, group, {{kAt, kRoom, 0}, {kAt + kRoom, kRoom, 0}}, stride);
}
KvGroup group_of(const json& packing, uint64_t stride = 0) {
  const auto made = placed(packing.dump(), stride);
  EXPECT_TRUE(made.ok()) << made.status();
  return made.ok() ? made->layout.groups[0] : KvGroup();
}
std::string why(const std::string& packing) {
  const absl::Status status = placed(packing).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status << " of " << packing;
  return std::string(status.message());
}

TEST(KvPacking, IsReadAsItIsSaid) {
  const KvGroup group = group_of(good());
  EXPECT_EQ(group.layers, (std::vector<uint32_t>{3, 5}));
  EXPECT_EQ(group.blocks, 10u);
  EXPECT_EQ(group.block_tokens, 4u);
  EXPECT_EQ(group.heads, 2u);
  EXPECT_EQ(group.total_heads, 2u);
  EXPECT_EQ(group.first_head, 0u);
  ASSERT_EQ(group.fields.size(), 2u);
  const KvField& value = group.fields[1];
  EXPECT_EQ(value.role, KvRole::kValue);
  EXPECT_EQ(value.dtype, KvDtype::kBfloat16);
  EXPECT_EQ(value.width, 4u);
  EXPECT_FALSE(value.is_packed());
  EXPECT_EQ(value.block_stride, 128u);
  EXPECT_EQ(value.token_stride, 8u);
  EXPECT_EQ(value.head_stride, 64u);
  EXPECT_EQ(value.element_stride, 2u);
  EXPECT_EQ(value.places, (std::vector<KvPlace>{{0, 32}, {1, 32}}));
  EXPECT_EQ(group_of(good(), 160).fields[1].block_stride, 160u);

  // Levels of one step are nothing, and of a worker there are the heads that it has.
  const KvGroup same = group_of(with(good(), {{"/key/tokens", {{1, 99}, {4, 4}, {1, 0}}},
                                              {"/key/heads", {{1, 7}, {2, 32}}},
                                              {"/colour", "blue"}}));
  EXPECT_EQ(same, group);
  const KvGroup shard = group_of(with(good(), {{"/total_heads", 6}, {"/first_head", 4}}));
  EXPECT_EQ(shard.total_heads, 6u);
  EXPECT_EQ(shard.first_head, 4u);

  for (const auto& [name, dtype] : {std::pair("uint8", KvDtype::kByte),
                                    {"int8", KvDtype::kInt8},
                                    {"float8_e4m3fn", KvDtype::kFloat8E4M3},
                                    {"float8_e5m2", KvDtype::kFloat8E5M2},
                                    {"float16", KvDtype::kFloat16}}) {
    EXPECT_EQ(group_of(with(good(), {{"/dtype", name}})).fields[0].dtype, dtype);
  }
}

TEST(KvPacking, IsWrittenAsItWasRead) {
  const json whole = {{"block_tokens", 4}, {"bytes", 128}, {"whole", "a test's"}};
  for (const json& said :
       {good(), tiles(), with(good(), {{"/total_heads", 6}, {"/first_head", 4}}),
        with(good(), {{"/dtype", "float8_e5m2"}, {"/key/tokens", {{2, 4}, {2, 8}}}}), whole}) {
    const auto packing = must(read_packing(said.dump()));
    EXPECT_EQ(json::parse(write_packing(packing)), said);
  }
}

TEST(KvPacking, EachStepOfAnAxisHasAPlace) {
  EXPECT_EQ(steps_of({}), std::vector<uint64_t>{0});
  EXPECT_EQ(steps_of({{2, 1}, {3, 8}}), (std::vector<uint64_t>{0, 1, 8, 9, 16, 17}));
}

TEST(KvPacking, OneTokenHeadOrElementNeedsNoStride) {
  json one = with(good(), {{"/block_tokens", 1}, {"/heads", 1}, {"/head_size", 1}, {"/bytes", 4}});
  for (const char* half : {"/key", "/value"}) {
    for (const char* axis : {"/tokens", "/heads", "/elements"}) {
      one = with(one, {{std::string(half) + axis, json::array()}});
    }
  }
  one["value"]["start"] = 1;
  const KvGroup group = group_of(one);
  EXPECT_EQ(group.fields[0].width, 1u);
  EXPECT_EQ(group.fields[0].element_stride, 2u);
  EXPECT_EQ(group.fields[0].head_stride, 0u);
  EXPECT_EQ(group.fields[1].places[0].offset, 2u);
  // Nor in tiles.
  const KvGroup tile = group_of(with(one, {{"/block_tokens", 4},
                                           {"/bytes", 16},
                                           {"/key/tokens", {{2, 1}, {2, 2}}},
                                           {"/value",
                                            {{"start", 4},
                                             {"tokens", {{2, 1}, {2, 2}}},
                                             {"heads", json::array()},
                                             {"elements", json::array()}}}}));
  EXPECT_EQ(tile.fields[0].row_tokens, 2u);
  EXPECT_EQ(tile.fields[0].width, 2u);
  EXPECT_EQ(tile.fields[0].runs, 1u);
  EXPECT_EQ(tile.fields[0].order, "tokens 2x1, elements ");
}

TEST(KvPacking, TilesAreRowsOfOneLevelOfRuns) {
  EXPECT_THAT(why(with(tiles(), {{"/bytes", 256},
                                 {"/value/start", 64},
                                 {"/key/tokens", {{2, 16}, {2, 4}}},
                                 {"/key/elements", {{2, 1}, {2, 8}}}})
                      .dump()),
              HasSubstr("more than one level of runs"));
}

TEST(KvPacking, AWholeIsBytes) {
  const json whole = {{"block_tokens", 4}, {"bytes", 100}, {"whole", "of rank 1"}};
  const KvGroup group = group_of(whole);
  ASSERT_EQ(group.fields.size(), 1u);
  EXPECT_EQ(group.fields[0].role, KvRole::kOpaque);
  EXPECT_EQ(group.fields[0].width, 100u);
  EXPECT_EQ(group.fields[0].order, "of rank 1");
  EXPECT_THAT(why(with(whole, {{"/whole", 7}}).dump()), HasSubstr("\"whole\" must be a string"));
}

TEST(KvPacking, WhatMakesNoSenseIsRefused) {
  for (const char* none : {"", "{", "null", "[]", "7", "\"text\""}) {
    EXPECT_THAT(why(none), HasSubstr("not a JSON object")) << none;
  }
  const auto refused = [](const std::vector<Said>& said, const char* because) {
    const std::string packing = with(good(), said).dump();
    EXPECT_THAT(why(packing), HasSubstr(because)) << packing;
  };
  const json too_many = (uint64_t{1} << 32) + 4;
  for (const char* key : {"/block_tokens", "/bytes"}) {
    for (const json& bad : {kMissing, json(0), json(-4), json(4.5), json("4"), json(UINT64_MAX)}) {
      refused({{key, bad}}, "it must have \"block_tokens\" and \"bytes\"");
    }
    refused({{key, too_many}}, "it must have \"block_tokens\" and \"bytes\"");
  }
  for (const char* key : {"/heads", "/head_size"}) {
    for (const json& bad : {kMissing, json(-1), json("2"), too_many}) {
      refused({{key, bad}}, "it must have \"heads\", \"head_size\"");
    }
  }
  for (const json& bad : {kMissing, json(16), json("bfloat"), json(nullptr)}) {
    refused({{"/dtype", bad}}, "it must have \"heads\", \"head_size\"");
  }
  for (const char* key : {"/total_heads", "/first_head"}) {
    for (const json& bad : {json(-1), json("2"), too_many}) {
      refused({{key, bad}}, "must be numbers");
    }
  }
  for (const json& bad : {kMissing, json(1), json::array()}) {
    refused({{"/key", bad}}, "\"key\" is missing");
    refused({{"/value", bad}}, "\"value\" is missing");
  }
  for (const json& bad : {kMissing, json(-1), json("0")}) {
    refused({{"/key/start", bad}}, "\"key\" has a \"start\"");
  }
  const json levels_of_one = std::vector<std::vector<int>>(8, {1, 1});
  json nine = levels_of_one;
  nine.push_back({4, 4});
  auto bad_axes = json::parse(R"([4, {}, [4, 4], [[4]], [[4, 4, 1]], [["4", 4]], [[4, "4"]],
                                  [[4, -4]], [[-4, 4]], [[3, 4]], [[5, 4]], [[0, 4], [4, 4]], [],
                                  {"a": [4, 4]}, [{"a": 4, "b": 4}]])")
                      .get<std::vector<json>>();
  bad_axes.push_back(kMissing);
  bad_axes.push_back(nine);
  for (const json& bad : bad_axes) {
    refused({{"/value/tokens", bad}}, "\"value\" has a \"start\"");
    refused({{"/value/heads", bad}}, "\"value\" has a \"start\"");
    refused({{"/key/elements", bad}}, "\"key\" has a \"start\"");
  }
  // Heads have one level; none of them takes no steps.
  refused({{"/heads", 4},
           {"/bytes", 256},
           {"/key/heads", {{2, 32}, {2, 64}}},
           {"/value/heads", {{2, 32}, {2, 64}}}},
          "\"key\" has \"heads\" of more than one level");
  refused({{"/heads", 0}, {"/key/heads", {{0, 1}}}, {"/value/heads", {{0, 1}}}},
          "\"key\" has a \"start\"");
  // Nothing lies behind the block's end, also where blocks have gaps.
  refused({{"/value/start", 17}}, "\"value\" does not lie in its 128 bytes");
  refused({{"/key/start", 1 << 20}}, "\"key\" does not lie in its 128 bytes");
  refused({{"/bytes", 127}}, "\"value\" does not lie in its 127 bytes");
}

TEST(KvPacking, ThereIsABufferForEachLayer) {
  KvGroup group;
  group.layers = {0, 1};
  group.blocks = 1;
  const std::vector<Descriptor> some(3, {kAt, kRoom, 0});
  for (const size_t count : {0, 1, 3}) {
    EXPECT_THAT(place_packed(good().dump(), group, absl::MakeConstSpan(some).first(count)).status(),
                fails_with(Code::kInvalidArgument, {"buffers for 2 layers"}));
  }
}

// A block as that packing has it: 4 tokens, 2 heads, 4 elements.
std::vector<int64_t> block_of(const json& packing) {
  const auto along = [](const json& levels, uint64_t step) {
    uint64_t at = 0;
    for (const json& level : levels) {
      at += step % level[0].get<uint64_t>() * level[1].get<uint64_t>();
      step /= level[0].get<uint64_t>();
    }
    return at;
  };
  std::vector<int64_t> out(packing["bytes"].get<size_t>() / 2, 0);
  for (const auto& [half, sign] : {std::pair("key", 1), std::pair("value", -1)}) {
    const json& said = packing[half];
    for (uint64_t n = 0; n < 32; ++n) {
      out[said["start"].get<uint64_t>() + along(said["tokens"], n / 8) +
          along(said["heads"], n / 4 % 2) + along(said["elements"], n % 4)] =
          sign * static_cast<int64_t>(n + 1);
    }
  }
  return out;
}

TEST(KvPacking, IsFoundByLooking) {
  json apart = good();  // places with nothing in them
  apart["bytes"] = 256;
  apart["value"]["start"] = 64;
  for (const json& packing : {good(), tiles(), apart}) {
    const auto found = must(find_packing(block_of(packing), 4, 2, 4));
    const json said = json::parse(found);
    EXPECT_EQ(said, (json{{"key", packing["key"]}, {"value", packing["value"]}}));
  }
}

TEST(KvPacking, WhatIsNoSumIsNotFound) {
  const std::vector<int64_t> block = block_of(good());
  const auto refused = [](absl::Span<const int64_t> look, const char* because, uint32_t tokens = 4,
                          uint32_t heads = 2, uint32_t elements = 4) {
    EXPECT_THAT(find_packing(look, tokens, heads, elements).status(),
                fails_with(Code::kInvalidArgument, {because}));
  };
  refused(block, "places for K and V", 0);
  refused(block, "places for K and V", 4, 0);
  refused(block, "places for K and V", 4, 2, 0);
  refused(block, "places for K and V", 9, 2, 4);
  refused({block.data(), size_t{1} << 32}, "places for K and V");  // none is read
  // One too many, twice the same, one that is missing.
  const auto at = [&](size_t place, int64_t number) {
    std::vector<int64_t> other = block;
    other[place] = number;
    return other;
  };
  refused(at(0, 33), "number 33 at place 0");
  refused(at(0, -33), "number -33 at place 0");
  refused(at(0, INT64_MIN), "at place 0");
  refused(at(1, 1), "number 1 at place 1");
  refused(at(16, -2), "number -2 at place 17");
  refused(at(0, 0), "not all numbers of K");
  refused(at(16, 0), "not all numbers of V");
  // Two that were exchanged.
  std::vector<int64_t> other = block;
  std::swap(other[5], other[6]);
  refused(other, "is not a sum");
  other = block;
  std::swap(other[21], other[22]);
  refused(other, "is not a sum");

  // An axis by itself: one head, one element, so many tokens at these places.
  const auto axis = [&](const std::vector<size_t>& places) {
    std::vector<int64_t> look(64, 0);
    for (size_t n = 0; n < places.size(); ++n) {
      look[places[n]] = static_cast<int64_t>(n + 1);
      look[32 + places[n]] = -static_cast<int64_t>(n + 1);
    }
    const auto found = find_packing(look, static_cast<uint32_t>(places.size()), 1, 1);
    if (found.ok()) return json::parse(*found)["key"]["tokens"].dump();
    EXPECT_THAT(std::string(found.status().message()), HasSubstr("is not a sum"));
    return std::string("none");
  };
  EXPECT_EQ(axis({5}), "[]");
  EXPECT_EQ(axis({5, 8, 11}), "[[3,3]]");
  EXPECT_EQ(axis({0, 2, 1, 3}), "[[2,2],[2,1]]");
  EXPECT_EQ(axis({0, 1, 2, 10, 11, 12}), "[[3,1],[2,10]]");
  // Three at one stride, which do not divide four; and six of which four do.
  EXPECT_EQ(axis({0, 1, 2, 4}), "none");
  EXPECT_EQ(axis({0, 1, 2, 3, 10, 11}), "none");
  EXPECT_EQ(axis({0, 1, 5}), "none");
  EXPECT_EQ(axis({3, 2, 1, 0}), "none");
  EXPECT_EQ(axis({0, 1, 4, 9}), "none");
  EXPECT_EQ(axis({0, 1, 9, 8}), "none");
}

}  // namespace
}  // namespace baton::kvtransfer
