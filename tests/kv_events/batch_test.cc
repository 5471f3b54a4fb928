// Batches of KV events: vLLM's own bytes are read, ours are vLLM's, and what is neither is refused.
#include "engine/kv_events/batch.h"

#include <nlohmann/json.hpp>

#include "absl/strings/escaping.h"
#include "tests/test.h"

namespace baton::engine::kv_events {
namespace {

using nlohmann::json;
using testing::HasSubstr;

// Written by msgspec with the classes of vLLM 0.32: a BlockStored with two blocks, one of an
// adapter, a BlockRemoved, an AllBlocksCleared.
constexpr char kByVllm[] =
    "93cb41da492040100000948aa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392c4203031"
    "323334353637383961626364656630313233343536373839616263646566c4206768696a6b6c6d6e6f707172737475"
    "766768696a6b6c6d6e6f70717273747576b1706172656e745f626c6f636b5f68617368c420706172656e7470617265"
    "6e74706172656e74706172656e74706172656e747061a9746f6b656e5f696473940102cd012cce00011170aa626c6f"
    "636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0a967726f75705f69"
    "647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e89a474797065ab426c6f"
    "636b53746f726564ac626c6f636b5f6861736865739107b1706172656e745f626c6f636b5f68617368c0a9746f6b65"
    "6e5f696473920102aa626c6f636b5f73697a6502a76c6f72615f696403a66d656469756da3435055a96c6f72615f6e"
    "616d65a761646170746572aa65787472615f6b6579739191a76164617074657284a474797065ac426c6f636b52656d"
    "6f766564ac626c6f636b5f68617368657391c420303132333435363738396162636465663031323334353637383961"
    "6"
    "263646566a66d656469756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c65617"
    "2"
    "656400";
// The same by the classes that it had before, whose events are arrays.
constexpr char kByOlderVllm[] =
    "93cb40000000000000009397ab426c6f636b53746f72656491cf80000000000000050992040502c0a347505593ac42"
    "6c6f636b52656d6f7665649109a347505591b0416c6c426c6f636b73436c6561726564c0";

BlockStored two_blocks() {
  return {.hashes = {"0123456789abcdef0123456789abcdef", "ghijklmnopqrstuvghijklmnopqrstuv"},
          .parent = "parentparentparentparentparentpa",
          .tokens = {1, 2, 300, 70000},
          .block_size = 2,
          .medium = "GPU",
          .group = 0,
          .group_kind = "full_attention"};
}

TEST(KvEventBatch, VllmsBytesAreRead) {
  const auto batch = parse_batch(absl::HexStringToBytes(kByVllm));
  ASSERT_TRUE(batch.ok()) << batch.status();
  EXPECT_EQ(batch->time, 1764000000.25);
  EXPECT_EQ(batch->rank, 0);
  const std::string seven = std::string(7, '\0') + "\7";
  const std::vector<KvEvent> want = {
      two_blocks(),
      BlockStored{
          .hashes = {seven}, .tokens = {1, 2}, .block_size = 2, .medium = "CPU", .plain = {false}},
      BlockRemoved{.hashes = {"0123456789abcdef0123456789abcdef"}, .medium = "GPU", .group = 0},
      AllBlocksCleared()};
  EXPECT_EQ(batch->events, want);
}

TEST(KvEventBatch, SoAreTheBytesOfOlderOnes) {
  const auto batch = parse_batch(absl::HexStringToBytes(kByOlderVllm));
  ASSERT_TRUE(batch.ok()) << batch.status();
  EXPECT_FALSE(batch->rank.has_value());
  const std::string nine = std::string(7, '\0') + "\11";
  const std::string large = std::string("\x80\0\0\0\0\0\0\5", 8);
  const std::vector<KvEvent> want = {
      BlockStored{
          .hashes = {large}, .parent = nine, .tokens = {4, 5}, .block_size = 2, .medium = "GPU"},
      BlockRemoved{.hashes = {nine}, .medium = "GPU"}, AllBlocksCleared()};
  EXPECT_EQ(batch->events, want);
}

TEST(KvEventBatch, ComesBackAndHasTheFieldsThatVllmsClassesWant) {
  const EventBatch batch{
      .time = 1.5,
      .events = {two_blocks(), BlockRemoved{.hashes = {"x"}}, AllBlocksCleared()},
      .rank = 0};
  const std::string payload = encode_batch(batch);
  const auto back = parse_batch(payload);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(*back, batch);
  const json decoded = json::from_msgpack(payload);
  // Those without a default in vLLM's class, nil or not.
  for (const char* field : {"type", "block_hashes", "parent_block_hash", "token_ids", "block_size",
                            "lora_id", "medium", "lora_name"}) {
    EXPECT_TRUE(decoded[1][0].contains(field)) << field;
  }
  EXPECT_TRUE(decoded[1][0]["block_hashes"][0].is_binary());
  EXPECT_TRUE(decoded[1][1].contains("medium"));
}

TEST(KvEventBatch, BlocksInARowBecomeOneEvent) {
  const auto hash = [](uint64_t n) { return serve::BlockHash{n, n}; };
  const std::vector<int32_t> tokens(16, 5);
  const std::vector<serve::CacheEvent> events = {
      {.stored = true, .hash = hash(1), .parent = std::nullopt, .tokens = tokens},
      {.stored = true, .hash = hash(2), .parent = hash(1), .tokens = tokens},
      {.stored = true, .hash = hash(9), .parent = hash(1), .tokens = tokens},
      {.stored = false, .hash = hash(4)},
      {.stored = false, .hash = hash(5)},
      {.stored = true, .hash = hash(4), .parent = std::nullopt, .tokens = tokens},
      {.stored = true, .hash = hash(6), .parent = std::nullopt, .tokens = tokens}};
  const EventBatch batch = batch_of(events);
  std::vector<size_t> sizes;
  for (const KvEvent& event : batch.events) {
    const auto* stored = std::get_if<BlockStored>(&event);
    if (stored != nullptr) {
      EXPECT_EQ(stored->tokens.size(), 16 * stored->hashes.size());
    }
    sizes.push_back(stored != nullptr ? stored->hashes.size()
                                      : 100 + std::get<BlockRemoved>(event).hashes.size());
  }
  EXPECT_EQ(sizes, (std::vector<size_t>{2, 1, 102, 1, 1}));
  EXPECT_FALSE(std::get<BlockStored>(batch.events[0]).parent.has_value());
  EXPECT_EQ(std::get<BlockStored>(batch.events[1]).parent,
            std::get<BlockStored>(batch.events[0]).hashes[0]);
}

std::string msgpack(const json& value) {
  const std::vector<uint8_t> bytes = json::to_msgpack(value);
  return {bytes.begin(), bytes.end()};
}

std::string why(const std::string& payload) {
  const absl::Status status = parse_batch(payload).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

TEST(KvEventBatch, AMalformedBatchIsRefusedWithTheReason) {
  const json good = json::from_msgpack(absl::HexStringToBytes(kByVllm));
  const auto with = [&](const char* field, const json& value) {
    json changed = good;
    changed[1][0][field] = value;
    return why(msgpack(changed));
  };
  EXPECT_THAT(why(""), HasSubstr("not the msgpack"));
  EXPECT_THAT(why("{\"ts\": 1}"), HasSubstr("not the msgpack"));
  EXPECT_THAT(why(msgpack({{"ts", 1}})), HasSubstr("[time, [event"));
  EXPECT_THAT(why(msgpack(json::array({1.0}))), HasSubstr("[time, [event"));
  EXPECT_THAT(why(msgpack(json::array({1.0, {5}}))), HasSubstr("must be a map"));
  EXPECT_THAT(why(msgpack(json::array({1.0, {json::object()}}))), HasSubstr("no \"type\""));
  EXPECT_THAT(with("type", "BlockMoved"), HasSubstr("\"BlockMoved\" is not a known event"));
  EXPECT_THAT(with("block_hashes", 5), HasSubstr("\"block_hashes\" must be an array"));
  EXPECT_THAT(with("block_hashes", {"text"}), HasSubstr("bytes or whole numbers"));
  EXPECT_THAT(with("parent_block_hash", "text"), HasSubstr("parent_block_hash"));
  EXPECT_THAT(with("token_ids", {-1}), HasSubstr("token_ids"));
  EXPECT_THAT(with("token_ids", {UINT64_MAX}), HasSubstr("token_ids"));
  EXPECT_THAT(with("token_ids", {1.5}), HasSubstr("token_ids"));
  EXPECT_THAT(with("block_size", -1), HasSubstr("block_size"));
  EXPECT_THAT(with("block_size", UINT64_MAX), HasSubstr("block_size"));
  EXPECT_THAT(with("extra_keys", json::array({nullptr})), HasSubstr("extra_keys"));
  EXPECT_THAT(with("group_idx", "0"), HasSubstr("group_idx"));
  // Deeper than any batch: the parser would call itself so often.
  EXPECT_THAT(why(std::string(1 << 20, '\x91')), HasSubstr("not the msgpack"));
  // Every part of a good one.
  const std::string whole = absl::HexStringToBytes(kByVllm);
  for (size_t size = 0; size < whole.size(); ++size) why(whole.substr(0, size));
  why(whole + "x");
}

TEST(KvEventBatch, UnknownFieldsAreIgnored) {
  json changed = json::from_msgpack(absl::HexStringToBytes(kByVllm));
  changed[1][0]["session_id"] = "s";
  changed[1][0]["something_new"] = {1, 2, 3};
  const auto batch = parse_batch(msgpack(changed));
  ASSERT_TRUE(batch.ok()) << batch.status();
  EXPECT_EQ(batch->events[0], KvEvent(two_blocks()));
}

TEST(KvEventBatch, NumbersAreEightBytesBigEndian) {
  EXPECT_EQ(sequence_frame(258), std::string("\0\0\0\0\0\0\1\2", 8));
  EXPECT_EQ(parse_sequence(sequence_frame(258)), 258u);
  EXPECT_EQ(parse_sequence(std::string(8, '\xff')), kEndOfReplay);
  EXPECT_FALSE(parse_sequence("1234567").has_value());
  EXPECT_FALSE(parse_sequence("123456789").has_value());
}

}  // namespace
}  // namespace baton::engine::kv_events
