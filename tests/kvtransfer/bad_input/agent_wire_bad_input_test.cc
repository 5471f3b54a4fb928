// What a member of the cluster may make up, one field at a time: metadata under a right code, parts
// of messages, and lists whose numbers overflow. Each is refused by the check that is for it.
#include "kvtransfer/internal/agent_list.h"
#include "kvtransfer/internal/agent_messages.h"
#include "kvtransfer/metadata/agent_metadata.h"
#include "tests/test.h"
#include "transport/base/wire.h"

namespace baton::kvtransfer {
namespace {

using ::testing::HasSubstr;

const ClusterKey& forgers_key() {
  static const ClusterKey key = *ClusterKey::from_bytes(std::string(32, 'f'));
  return key;
}

constexpr size_t kForgedHead = 11, kForgedCode = 32;  // magic, version and number of codes; a code

AgentMetadata one_range() {
  AgentMetadata out;
  out.name = "prefill";
  out.uid = WorkerUid::random();
  out.address = "baton1:somewhere";
  out.ranges.push_back({{4096, 100, 0},
                        {.owner = out.uid,
                         .key = 1,
                         .size = 100,
                         .index = 0,
                         .generation = 1,
                         .access = Access::kRemoteReadWrite}});
  return out;
}

std::string body_of(const AgentMetadata& metadata) {
  const std::string whole = metadata.encode(forgers_key());
  return whole.substr(kForgedHead, whole.size() - kForgedHead - kForgedCode);
}

std::string code_over(std::string_view bytes) {
  const auto code = forgers_key().hmac(std::string("agent metadata ").append(bytes));
  return std::string(code.begin(), code.end());
}

TEST(ForgedMetadata, IsRefusedFieldByField) {
  const AgentMetadata good = one_range();
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
  AgentMetadata other = good;
  other.name = std::string(kMaxAgentName + 1, 'n');
  refused(body_of(other));
  other = good;
  other.address = std::string(4097, 'a');
  refused(body_of(other));
  other = good;
  other.ranges[0].second.generation = 0;  // no region's
  refused(body_of(other));
  other = good;
  other.partial = true;
  other.address = "";
  EXPECT_TRUE(AgentMetadata::decode_body(body_of(other)).ok());
}

TEST(ForgedMetadata, HasNoMoreRangesThanAWorkerHas) {
  AgentMetadata many = one_range();
  const auto range = many.ranges[0];
  many.ranges.assign(RegionTable::kCapacity, range);
  EXPECT_TRUE(AgentMetadata::decode_body(body_of(many)).ok());
  many.ranges.push_back(range);
  EXPECT_TRUE(absl::IsDataLoss(AgentMetadata::decode_body(body_of(many)).status()));
}

TEST(ForgedMetadata, HasNoMoreCodesThanAClusterHasKeysAndNoneInItsHead) {
  const std::string whole = one_range().encode(forgers_key());
  const std::string body = body_of(one_range());
  const auto refused = [](const std::string& bytes) {
    EXPECT_THAT(AgentMetadata::decode(bytes, forgers_key()).status().message(),
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
    const absl::StatusOr<bool> whole = parts_.add(frame, out_);
    ASSERT_TRUE(whole.ok()) << whole.status();
    EXPECT_EQ(*whole, complete);
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
  // Of two descriptors, 2^64 - 6 bytes apart: their span is 4 bytes to who does not look.
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
  const absl::Status status = make_agent_list(ranges, endless, "me").status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("4294967296 descriptors are too many"));
}

}  // namespace
}  // namespace baton::kvtransfer
