// What agents send each other: metadata under a code, messages in frames; and what a member of the
// cluster may make up, one field at a time: metadata under a right code, parts of messages, and
// lists whose numbers overflow. Each is refused by the check that is for it.
#include "absl/strings/escaping.h"
#include "kvtransfer/internal/agent_list.h"
#include "kvtransfer/internal/agent_memory_kind.h"
#include "kvtransfer/internal/agent_messages.h"
#include "kvtransfer/metadata/agent_metadata.h"
#include "tests/fails_with.h"
#include "tests/test.h"
#include "transport/base/wire.h"

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
  const auto after = must(AgentMetadata::decode(before.encode(key_of('k')), key_of('k')));
  EXPECT_EQ(kind_of(after.ranges[0].second), MemoryKind::kDram);
  EXPECT_EQ(kind_of(after.ranges[1].second), MemoryKind::kVram);
  EXPECT_EQ(after.ranges[1].first.device, 1u);
  EXPECT_EQ(kind_of(after.ranges[2].second), MemoryKind::kDram);
}

// Byte for byte what agents sent before they took memory of devices.
TEST(AgentMetadata, ThatOfOlderAgentsLoads) {
  const auto old = must(AgentMetadata::decode_body(absl::HexStringToBytes(
      "00000102030405060708090a0b0c0d0e0f070070726566696c6c08006261746f6e313a78010000000010000000"
      "0000006400000000000000000000000000000000"
      "0102030405060708090a0b0c0d0e0f4d000000000000006400000000000000000000000100000003000000000000"
      "00")));
  ASSERT_EQ(old.ranges.size(), 1u);
  EXPECT_EQ(old.ranges[0].first, (Descriptor{0x1000, 100, 0}));
  EXPECT_EQ(kind_of(old.ranges[0].second), MemoryKind::kDram);
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
      const auto whole = must(parts.add(frames[i], out));
      EXPECT_EQ(whole, i + 1 == frames.size());
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

// --- what a member of the cluster makes up ---

constexpr size_t kForgedHead = 11, kForgedCode = 32;  // magic, version and number of codes; a code

std::string body_of(const AgentMetadata& metadata) {
  const std::string whole = metadata.encode(key_of('f'));
  return whole.substr(kForgedHead, whole.size() - kForgedHead - kForgedCode);
}

std::string code_over(std::string_view bytes) {
  const auto code = key_of('f').hmac(std::string("agent metadata ").append(bytes));
  return std::string(code.begin(), code.end());
}

TEST(ForgedMetadata, IsRefusedFieldByField) {
  const AgentMetadata good = some_metadata();
  const std::string body = body_of(good);
  ASSERT_TRUE(AgentMetadata::decode_body(body).ok());
  const auto refused = [](const std::string& bytes) {
    const absl::Status status = AgentMetadata::decode_body(bytes).status();
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  };
  for (size_t size = 0; size < body.size(); ++size) refused(body.substr(0, size));
  refused(body + '\0');
  std::string bad = body;
  bad[0] = 3;  // neither whole, nor in parts, nor a farewell
  refused(bad);
  using M = AgentMetadata;
  void (*const changes[])(M&) = {[](M& m) { m.name = ""; },
                                 [](M& m) { m.name = std::string(kMaxAgentName + 1, 'n'); },
                                 [](M& m) { m.address = ""; },
                                 [](M& m) { m.address = std::string(4097, 'a'); },
                                 [](M& m) { m.ranges[0].second.generation = 0; },  // no region's
                                 [](M& m) { m.ranges[1].second.owner = WorkerUid::random(); },
                                 [](M& m) { m.ranges[1].second.size = 5; },
                                 [](M& m) { m.ranges[1].first.address = UINT64_MAX - 5; }};
  for (const auto change : changes) {
    AgentMetadata other = good;
    change(other);
    refused(body_of(other));
    EXPECT_THAT(AgentMetadata::decode(other.encode(key_of('f')), key_of('f')).status().message(),
                HasSubstr("contradicts"));
  }
  AgentMetadata part = good;
  part.partial = true;
  part.address = "";
  EXPECT_TRUE(AgentMetadata::decode_body(body_of(part)).ok());
}

TEST(ForgedMetadata, HasNoMoreRangesThanAWorkerHas) {
  AgentMetadata many = some_metadata();
  const auto range = many.ranges[0];
  many.ranges.assign(RegionTable::kCapacity, range);
  EXPECT_TRUE(AgentMetadata::decode_body(body_of(many)).ok());
  many.ranges.push_back(range);
  EXPECT_TRUE(absl::IsDataLoss(AgentMetadata::decode_body(body_of(many)).status()));
}

TEST(ForgedMetadata, HasNoMoreCodesThanAClusterHasKeysAndNoneInItsHead) {
  const std::string whole = some_metadata().encode(key_of('f'));
  const std::string body = body_of(some_metadata());
  const auto refused = [](const std::string& bytes) {
    EXPECT_THAT(AgentMetadata::decode(bytes, key_of('f')).status().message(),
                HasSubstr("damaged or cut short"));
  };
  for (const size_t codes : {ClusterKey::kMost + 1, size_t{255}}) {
    std::string many = whole.substr(0, kForgedHead) + body;
    many[kForgedHead - 1] = static_cast<char>(codes);
    many += code_over(many) + std::string((codes - 1) * kForgedCode, 'x');
    refused(many);
  }
  // Two codes, the first of which begins with their own number.
  std::string overlapping = whole.substr(0, kForgedHead);
  overlapping[kForgedHead - 1] = 2;
  const std::string proved = overlapping.substr(0, kForgedHead - 1);
  overlapping += std::string(kForgedCode - 1, 'x') + code_over(proved);
  refused(overlapping);
  // None.
  std::string none = whole.substr(0, kForgedHead) + body;
  none[kForgedHead - 1] = 0;
  refused(none);
}

std::string part_frame(AgentFrameKind kind, uint64_t number, size_t total, size_t part,
                       size_t bytes) {
  std::string out(1, static_cast<char>(static_cast<uint8_t>(kind) | 0x80));
  base::put_number(out, number);
  base::put_number(out, static_cast<uint32_t>(total));
  base::put_number(out, static_cast<uint32_t>(part));
  return out.append(bytes, 'p');
}

std::string abandoning(uint64_t number, uint32_t parts) {
  std::string out(1, static_cast<char>(AgentFrameKind::kAbandon));
  base::put_number(out, number);
  base::put_number(out, parts);
  return out;
}

constexpr size_t kWhole = kMaxWholeAgentMessage;
constexpr auto kSaid = AgentFrameKind::kMessage;

class ForgedParts : public ::testing::Test {
 protected:
  void refused(const std::string& frame) {
    const absl::Status status = parts_.add(frame, out_).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  }
  void taken(const std::string& frame, bool complete = false) {
    const auto whole = must(parts_.add(frame, out_));
    EXPECT_EQ(whole, complete);
  }
  AgentAssembler parts_;
  AgentFrame out_;
};

TEST_F(ForgedParts, UnexpectedPartOrPartNumber) {
  refused(part_frame(kSaid, 1, 10, 0, 10));
  refused(part_frame(kSaid, 1, kWhole, 0, kWhole));
  refused(part_frame(kSaid, 1, kMaxAgentMessage + 1, 0, kWhole));
  refused(part_frame(kSaid, 1, UINT32_MAX, 0, kWhole));
  refused(part_frame(kSaid, 1, kWhole + 10, 2, kWhole));
  refused(part_frame(kSaid, 1, kWhole + 10, UINT32_MAX, 10));
  refused(part_frame(kSaid, 1, kWhole + 10, 1, 11));
  refused(part_frame(kSaid, 1, kWhole + 10, 1, 9));
  refused(part_frame(kSaid, 1, kWhole + 10, 0, kWhole).substr(0, 15));
  refused(part_frame(AgentFrameKind::kAbandon, 1, kWhole + 10, 0, kWhole).substr(0, 14));
  taken(part_frame(kSaid, 1, kWhole + 10, 1, 10));
  taken(part_frame(kSaid, 1, kWhole + 10, 0, kWhole), true);
}

// Its bytes would land behind the memory that the first part's length had made.
TEST_F(ForgedParts, LengthOrKindDiffersFromTheFirstPart) {
  taken(part_frame(kSaid, 1, 2 * kWhole, 0, kWhole));
  refused(part_frame(kSaid, 1, 3 * kWhole, 2, kWhole));
  refused(part_frame(kSaid, 1, kWhole + 1, 1, 1));
  refused(part_frame(AgentFrameKind::kMetadata, 1, 2 * kWhole, 1, kWhole));
  refused(part_frame(kSaid, 1, 2 * kWhole, 0, kWhole));
  taken(part_frame(kSaid, 1, 2 * kWhole, 1, kWhole), true);
  EXPECT_EQ(out_.payload, std::string(2 * kWhole, 'p'));
}

TEST_F(ForgedParts, ThatAreAbandonedTwiceOrFewerThanCame) {
  constexpr uint32_t kMostPartsOfOne = (kMaxAgentMessage + kWhole - 1) / kWhole;
  refused(abandoning(1, kMostPartsOfOne + 1));
  refused(abandoning(1, UINT32_MAX));
  refused(abandoning(1, 1).substr(0, 12));
  refused(abandoning(1, 1) + "x");
  taken(abandoning(1, kMostPartsOfOne));
  refused(abandoning(1, kMostPartsOfOne));
  for (size_t part : {0, 1, 2}) taken(part_frame(kSaid, 2, 5 * kWhole, part, kWhole));
  refused(abandoning(2, 2));
  taken(abandoning(2, 3));
  // What is abandoned is thrown away, part by part, and then the number is free.
  taken(abandoning(3, 1));
  taken(part_frame(kSaid, 3, 2 * kWhole, 0, kWhole));
  taken(part_frame(kSaid, 3, 2 * kWhole, 0, kWhole));
  taken(part_frame(kSaid, 3, 2 * kWhole, 1, kWhole), true);
}

TEST_F(ForgedParts, ThatNeverComeAreRememberedUpToANumber) {
  constexpr uint64_t kRemembered = 4096;
  for (uint64_t number = 0; number < kRemembered; ++number) taken(abandoning(number, 7));
  refused(abandoning(kRemembered, 7));
  taken(abandoning(0, 0));  // it has come to its end: there is room for one
  taken(abandoning(kRemembered, 7));
  refused(abandoning(kRemembered + 1, 7));
  taken(abandoning(kRemembered + 2, 0));  // of which nothing is known
  refused(abandoning(kRemembered + 1, 7));
}

TEST(ListsThatOverflow, AreRefusedByNumber) {
  AgentRanges<MemoryRegion> ranges;
  constexpr uint64_t kAt = uint64_t{1} << 40;
  ranges = ranges.with({{{kAt, 1 << 20, 0}, MemoryRegion{.size = 1 << 20}}});
  const auto row = [&](const std::vector<StridedDescriptor>& rows) {
    return make_agent_list(ranges, absl::MakeConstSpan(rows), "me").status();
  };
  // Two descriptors 2^64 - 6 bytes apart: a span that overflows is 4 bytes.
  EXPECT_TRUE(absl::IsNotFound(row({{kAt + 64, 10, 0, UINT64_MAX - 5, 2}})));
  EXPECT_TRUE(absl::IsNotFound(row({{kAt + 64, 8, 0, (uint64_t{1} << 63) + 8, 3}})));
  EXPECT_TRUE(absl::IsNotFound(row({{kAt + 64, UINT64_MAX, 0, 0, 1}})));
  EXPECT_TRUE(absl::IsNotFound(row({{kAt, 8, 0, 0, 2}}))) << "one over the other";
  EXPECT_TRUE(absl::IsInvalidArgument(row({{kAt, 8, 0, 8, 0}})));
  EXPECT_TRUE(absl::IsInvalidArgument(row({{kAt, 0, 0, 0, UINT32_MAX}, {kAt, 0, 0, 0, 1}})));
  EXPECT_TRUE(absl::IsInvalidArgument(row({{kAt, 8, 0, 8, 2}, {kAt, 0, 0, 0, UINT32_MAX - 1}})));
  // Counted before they are read.
  const Descriptor first{kAt, 8, 0};
  const absl::Span<const Descriptor> endless(&first, size_t{1} << 32);
  EXPECT_THAT(make_agent_list(ranges, endless, "me").status(),
              fails_with(Code::kInvalidArgument, {"4294967296 descriptors are too many"}));
}

}  // namespace
}  // namespace baton::kvtransfer
