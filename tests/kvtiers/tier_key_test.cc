// Keys: whatever field differs, the key does; and records that were changed are noticed.
#include "kvtransfer/tiers/tier_record.h"

#include <unordered_set>

#include "kvtransfer/tiers/memory_tier.h"
#include "tests/kvtiers/records.h"
#include "tests/seeds.h"
#include "tests/test.h"

namespace baton::kvtransfer::tiers {
namespace {

std::string text_of(const TierKey& key) {
  return {reinterpret_cast<const char*>(key.bytes.data()), key.bytes.size()};
}

// Each identity and block differs from one before it in one field, by one byte put in, taken out or
// changed, or by a byte that moves from a field to its neighbour.
// Promise(tiers): Keys of two identities or prompts are never equal | SHA-256 over fields with
//   their lengths
TEST(TierKey, FuzzedOneFieldAtATimeNoTwoAreEqual) {
  std::mt19937_64 random(17);
  std::vector<std::string> fields = {"weights", "tokenizer", "bf16", "layout",
                                     "0/1",     "adapter",   "salt", "block"};
  std::unordered_set<std::string> inputs;
  std::unordered_set<std::string> keys;
  const uint64_t wanted = number_of("BATON_SEEDS", 10000);  // a million is what was run once
  while (inputs.size() < wanted) {
    std::string& field = fields[random() % fields.size()];
    switch (random() % 4) {
      case 0:
        field.insert(random() % (field.size() + 1), 1, static_cast<char>(random()));
        break;
      case 1:
        if (!field.empty()) field.erase(random() % field.size(), 1);
        break;
      case 2:
        if (!field.empty()) field[random() % field.size()] ^= static_cast<char>(1 + random() % 255);
        break;
      default: {
        const size_t from = random() % (fields.size() - 1);
        if (fields[from].empty()) continue;
        fields[from + 1].insert(0, 1, fields[from].back());
        fields[from].pop_back();
      }
    }
    std::string input;
    for (const std::string& part : fields) input += std::to_string(part.size()) + ":" + part;
    if (!inputs.insert(input).second) continue;
    const TierKeys identity(
        {fields[0], fields[1], fields[2], fields[3], fields[4], fields[5], fields[6]});
    ASSERT_TRUE(keys.insert(text_of(identity.key(fields[7]))).second) << input;
  }
}

TEST(TierKey, EqualFieldsAreEqualKeys) {
  const TierIdentity identity{.weights = "w", .shard = "0/2"};
  EXPECT_EQ(TierKeys(identity).key("b"), TierKeys(identity).key("b"));
}

TEST(TierRecord, NoBitMayDiffer) {
  const TierShape shape{.parts = 2, .part_bytes = 600};
  const auto record = record_of(4, shape);
  ASSERT_TRUE(record->is_whole());
  std::mt19937_64 random(3);
  const auto flip = [&](size_t at) {
    record->bytes()[at] ^= static_cast<std::byte>(1 << random() % 8);
  };
  for (size_t at = 0; at < sizeof(RecordHeader); ++at) {
    const std::byte before = record->bytes()[at];
    flip(at);
    EXPECT_FALSE(record->is_whole()) << "header byte " << at;
    record->bytes()[at] = before;
  }
  for (size_t at = 0; at < 2 * 600; ++at) {
    std::byte& byte = record->part(at / 600)[at % 600];
    const std::byte before = byte;
    byte ^= static_cast<std::byte>(1 << random() % 8);
    EXPECT_FALSE(record->is_whole()) << "byte " << at;
    byte = before;
  }
  EXPECT_TRUE(record->is_whole());
}

TEST(TierRecord, PartsDoNotPassForEachOther) {
  const TierShape shape{.parts = 2, .part_bytes = 64};
  const auto one = TierRecord::make(shape);  // all parts hold zeros
  one->seal(key_of(1), 1);
  const auto other = TierRecord::make(shape);
  other->seal(key_of(2), 2);
  EXPECT_TRUE(is_part(one->header(), 0, one->part(0)));
  EXPECT_NE(one->header().sums[0], one->header().sums[1]);
  EXPECT_NE(one->header().sums[0], other->header().sums[0]);
}

TEST(MemoryTier, TheOneUsedLongestAgoLeaves) {
  const TierShape shape{.parts = 1, .part_bytes = 4096};
  MemoryTier tier(3 * shape.record_bytes());
  for (uint64_t i = 0; i < 3; ++i) tier.put(record_of(i, shape));
  EXPECT_NE(tier.get(key_of(0)), nullptr);
  const auto read = tier.get(key_of(1));
  tier.put(record_of(3, shape));
  EXPECT_FALSE(tier.contains(key_of(2)));
  EXPECT_TRUE(tier.contains(key_of(0)));
  tier.put(record_of(4, shape));
  tier.put(record_of(5, shape));
  EXPECT_FALSE(tier.contains(key_of(1)));
  EXPECT_TRUE(read->is_whole());  // whoever reads one has it
  EXPECT_EQ(tier.bytes(), 3 * shape.record_bytes());
  EXPECT_EQ(tier.evicted(), 3u);
}

}  // namespace
}  // namespace baton::kvtransfer::tiers
