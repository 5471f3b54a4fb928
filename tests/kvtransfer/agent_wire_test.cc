// What agents send each other: metadata under a code, messages in frames.
#include "absl/strings/escaping.h"
#include "kvtransfer/internal/agent_memory_kind.h"
#include "kvtransfer/internal/agent_messages.h"
#include "kvtransfer/metadata/agent_metadata.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

using ::testing::HasSubstr;

ClusterKey key_of(char c) { return *ClusterKey::from_bytes(std::string(32, c)); }

AgentMetadata some_metadata() {
  AgentMetadata out;
  out.name = "prefill";
  out.uid = WorkerUid::random();
  out.address = "baton1:somewhere";
  for (uint32_t i = 0; i < 3; ++i) {
    out.ranges.push_back({{uint64_t{4096} * i, 100 + i, i},
                          {.owner = out.uid,
                           .key = i,
                           .size = 100 + i,
                           .index = i,
                           .generation = 1,
                           .access = Access::kRemoteReadWrite}});
  }
  return out;
}

TEST(AgentMetadata, TheKindOfARangeIsItsRegions) {
  AgentMetadata before = some_metadata();
  before.ranges[1].second.kind = baton::MemoryKind::kDevice;
  before.ranges[1].second.direct = true;
  const auto after = AgentMetadata::decode(before.encode(key_of('k')), key_of('k'));
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(kind_of(after->ranges[0].second), MemoryKind::kDram);
  EXPECT_EQ(kind_of(after->ranges[1].second), MemoryKind::kVram);
  EXPECT_EQ(after->ranges[1].first.device, 1u);
  EXPECT_EQ(kind_of(after->ranges[2].second), MemoryKind::kDram);
}

// Byte for byte what agents sent before they took memory of devices.
TEST(AgentMetadata, ThatOfOlderAgentsLoads) {
  const auto old = AgentMetadata::decode_body(absl::HexStringToBytes(
      "00000102030405060708090a0b0c0d0e0f070070726566696c6c08006261746f6e313a78010000000010000000"
      "0000006400000000000000000000000000000000"
      "0102030405060708090a0b0c0d0e0f4d000000000000006400000000000000000000000100000003000000000000"
      "00"));
  ASSERT_TRUE(old.ok()) << old.status();
  ASSERT_EQ(old->ranges.size(), 1u);
  EXPECT_EQ(old->ranges[0].first, (Descriptor{0x1000, 100, 0}));
  EXPECT_EQ(kind_of(old->ranges[0].second), MemoryKind::kDram);
}

// Promise(agents): Damaged or foreign metadata is refused | its last 32 bytes are an HMAC under the
//   cluster's key
TEST(AgentMetadata, AnotherKeyVersionOrByteIsDataLoss) {
  const std::string good = some_metadata().encode(key_of('k'));
  const auto refused = [](std::string_view bytes, const ClusterKey& key) {
    const absl::Status status = AgentMetadata::decode(bytes, key).status();
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refused(good, key_of('x')), HasSubstr("another cluster key"));
  EXPECT_THAT(refused("", key_of('k')), HasSubstr("not agent metadata"));
  EXPECT_THAT(refused("nixlSerDes|whatever comes after that, long enough for a code behind it",
                      key_of('k')),
              HasSubstr("not agent metadata"));
  EXPECT_THAT(refused(good.substr(0, 42), key_of('k')), HasSubstr("not agent metadata"));
  std::string newer = good;
  newer[8] = 2;
  EXPECT_THAT(refused(newer, key_of('k')), HasSubstr("version 2"));
  for (size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 0x40);
    refused(bad, key_of('k'));
    refused(good.substr(0, i), key_of('k'));
  }
}

TEST(AgentMetadata, AClusterMayChangeItsKey) {
  const ClusterKey changing = key_of('n').with_previous(key_of('o'));
  const AgentMetadata metadata = some_metadata();
  const auto accepted = [&](const ClusterKey& from, const ClusterKey& to) {
    return AgentMetadata::decode(metadata.encode(from), to).ok();
  };
  EXPECT_TRUE(accepted(key_of('o'), changing));
  EXPECT_TRUE(accepted(changing, key_of('o')));
  EXPECT_TRUE(accepted(changing, changing));
  EXPECT_TRUE(accepted(changing, key_of('n')));
  EXPECT_FALSE(accepted(changing, key_of('x')));
  EXPECT_FALSE(accepted(key_of('n'), key_of('o')));
}

TEST(AgentMetadata, WhatContradictsItselfIsRefusedThoughItsCodeIsRight) {
  const auto refused = [](const AgentMetadata& metadata) {
    EXPECT_THAT(AgentMetadata::decode(metadata.encode(key_of('k')), key_of('k')).status().message(),
                HasSubstr("contradicts"));
  };
  AgentMetadata bad = some_metadata();
  bad.name = "";
  refused(bad);
  bad = some_metadata();
  bad.address = "";
  refused(bad);
  bad = some_metadata();
  bad.ranges[1].second.owner = WorkerUid::random();
  refused(bad);
  bad = some_metadata();
  bad.ranges[1].second.size = 5;
  refused(bad);
  bad = some_metadata();
  bad.ranges[1].first.address = UINT64_MAX - 5;
  refused(bad);
}

TEST(AgentMessages, LongOnesComeInPartsInAnyOrder) {
  std::mt19937 random(5);
  for (const size_t bytes : {size_t{0}, size_t{1}, kMaxWholeAgentMessage, kMaxWholeAgentMessage + 1,
                             size_t{1} << 20, kMaxAgentMessage}) {
    std::string message(bytes, 'm');
    for (size_t i = 0; i < bytes; i += 997) message[i] = static_cast<char>(i);
    std::vector<std::string> frames = agent_frames(AgentFrameKind::kMetadata, message);
    std::shuffle(frames.begin(), frames.end(), random);
    AgentAssembler parts;
    AgentFrame out;
    for (size_t i = 0; i < frames.size(); ++i) {
      EXPECT_LE(frames[i].size(), kMaxNotification);
      const absl::StatusOr<bool> whole = parts.add(frames[i], out);
      ASSERT_TRUE(whole.ok()) << whole.status();
      EXPECT_EQ(*whole, i + 1 == frames.size());
    }
    EXPECT_EQ(out.kind, AgentFrameKind::kMetadata);
    EXPECT_EQ(out.payload, message);
  }
}

TEST(AgentMessages, OpenOnesAreBounded) {
  AgentAssembler parts;
  AgentFrame out;
  absl::Status status;
  for (int i = 0; i < 100 && status.ok(); ++i) {
    status =
        parts
            .add(agent_frames(AgentFrameKind::kMessage, std::string(kMaxAgentMessage, 'm'))[0], out)
            .status();
  }
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
}

// What is sent again is another message: parts of the first time are none of its.
TEST(AgentMessages, NumberedAnewTheyAreThoseOfAnotherMessage) {
  std::vector<std::string> frames =
      agent_frames(AgentFrameKind::kMessage, std::string(kMaxWholeAgentMessage + 10, 'm'));
  AgentAssembler parts;
  AgentFrame out;
  ASSERT_TRUE(parts.add(frames[0], out).ok());
  number_anew(frames);
  EXPECT_FALSE(*parts.add(frames[1], out)) << "of two messages one was made";
  EXPECT_TRUE(*parts.add(frames[0], out));
  std::vector<std::string> whole = agent_frames(AgentFrameKind::kMessage, "one frame");
  number_anew(whole);
  EXPECT_EQ(whole, agent_frames(AgentFrameKind::kMessage, "one frame"));
}

}  // namespace
}  // namespace baton::kvtransfer
