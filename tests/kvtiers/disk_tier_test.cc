// The file of slots: what comes back is what was written, or nothing.
#include "kvtransfer/tiers/disk_tier.h"

#include "tests/kvtiers/records.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton::kvtransfer::tiers {
namespace {

constexpr TierShape kShape{.parts = 3, .part_bytes = 5000};

DiskTierOptions options(const TemporaryFolder& folder, size_t records) {
  return {folder.path("kv"), records * kShape.record_bytes(), kShape};
}

// What a record's parts are: all right, or missing. Anything else fails the test.
bool reads_whole(DiskTier& tier, uint64_t number) {
  auto pin = tier.pin(key_of(number));
  if (!pin.has_value()) return false;
  size_t whole = 0;
  for (uint32_t part = 0; part < kShape.parts; ++part) {
    DiskTier::Pin* pins[] = {&*pin};
    tier.read(pins, part, [&](size_t, std::span<const std::byte> bytes) {
      if (bytes.empty()) return;
      ASSERT_EQ(bytes.size(), kShape.part_bytes);
      for (size_t i = 0; i < bytes.size(); ++i) {
        ASSERT_EQ(bytes[i], content(number, part * kShape.part_bytes + i)) << number;
      }
      ++whole;
    });
  }
  tier.unpin(*pin);
  return whole == kShape.parts;
}

TEST(DiskTier, ManyAtATime) {
  const TemporaryFolder folder;
  auto tier = *DiskTier::open(options(folder, 200));
  std::vector<DiskTier::Pin> pins;
  std::vector<DiskTier::Pin*> all;
  for (uint64_t i = 0; i < 200; ++i) ASSERT_TRUE(tier->put(*record_of(i, kShape)).ok());
  for (uint64_t i = 0; i < 200; ++i) pins.push_back(*tier->pin(key_of(i)));
  for (DiskTier::Pin& pin : pins) all.push_back(&pin);
  for (uint32_t part = 0; part < kShape.parts; ++part) {
    std::atomic<size_t> right{0};
    tier->read(all, part, [&](size_t number, std::span<const std::byte> bytes) {
      right += !bytes.empty() && bytes[7] == content(number, part * kShape.part_bytes + 7);
    });
    EXPECT_EQ(right, 200u);
  }
}

TEST(DiskTier, OpensWithWhatWasThere) {
  const TemporaryFolder folder;
  {
    auto tier = *DiskTier::open(options(folder, 10));
    for (uint64_t i = 0; i < 10; ++i) ASSERT_TRUE(tier->put(*record_of(i, kShape)).ok());
  }
  auto tier = *DiskTier::open(options(folder, 10));
  EXPECT_EQ(tier->records(), 10u);
  EXPECT_EQ(tier->last_sequence(), 10u);
  for (uint64_t i = 0; i < 10; ++i) EXPECT_TRUE(reads_whole(*tier, i));
  EXPECT_FALSE(reads_whole(*tier, 1000));
  EXPECT_EQ(tier->corrupt(), 0u);
  // The oldest is written over first.
  ASSERT_TRUE(tier->put(*record_of(20, kShape)).ok());
  EXPECT_TRUE(tier->contains(key_of(1)) || tier->contains(key_of(0)));
  EXPECT_EQ(tier->evicted(), 1u);
  tier.reset();
  tier = *DiskTier::open(options(folder, 4));  // a smaller one keeps what fits
  EXPECT_EQ(tier->records(), 4u);
  EXPECT_EQ(std::filesystem::file_size(folder.path("kv") + "/kv-3x5000.tier"),
            4 * kShape.record_bytes());
}

TEST(DiskTier, OneProcessAtATime) {
  const TemporaryFolder folder;
  auto tier = *DiskTier::open(options(folder, 4));
  EXPECT_EQ(DiskTier::open(options(folder, 4)).status().code(), absl::StatusCode::kUnavailable);
}

TEST(DiskTier, ADirectoryThatCannotBeMadeIsSaidWhy) {
  const TemporaryFolder folder;
  DiskTierOptions below = options(folder, 4);
  below.directory += "/below";
  ASSERT_EQ(chmod(folder.path().c_str(), 0555), 0);
  if (getuid() == 0) {  // who may make everything
    ASSERT_EQ(seteuid(65534), 0);
  }
  const absl::Status status = DiskTier::open(below).status();
  ASSERT_EQ(seteuid(getuid()), 0);
  ASSERT_EQ(chmod(folder.path().c_str(), 0755), 0);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("Permission denied"));
}

TEST(DiskTier, ARecordThatIsReadIsNotWrittenOver) {
  const TemporaryFolder folder;
  auto tier = *DiskTier::open(options(folder, 2));
  ASSERT_TRUE(tier->put(*record_of(0, kShape)).ok());
  ASSERT_TRUE(tier->put(*record_of(1, kShape)).ok());
  const auto pin = tier->pin(key_of(0));
  for (uint64_t i = 2; i < 10; ++i) ASSERT_TRUE(tier->put(*record_of(i, kShape)).ok());
  EXPECT_TRUE(reads_whole(*tier, 0));
  tier->unpin(*pin);
}

TEST(DiskTier, TooLittleSpaceIsSaid) {
  const TemporaryFolder folder;
  auto small = options(folder, 1);
  small.bytes = 100;
  EXPECT_EQ(DiskTier::open(small).status().code(), absl::StatusCode::kResourceExhausted);
  auto vast = options(folder, 1);
  vast.bytes = size_t{1} << 56;
  EXPECT_FALSE(DiskTier::open(vast).ok());
}

// Bits are flipped, pages go back to what they were before, slots get each other's pages, the file
// is cut: after each, every record is right or missing.
// Promise(tiers): A torn, flipped or cut file gives misses, never a wrong byte | sums seeded with
//   key and number
TEST(DiskTier, WhateverHappensToTheFileNoByteIsWrong) {
  const TemporaryFolder folder;
  const std::string path = folder.path("kv") + "/kv-3x5000.tier";
  constexpr uint64_t kRecords = 40;
  std::mt19937_64 random(11);
  for (int round = 0; round < 30; ++round) {
    auto tier = *DiskTier::open(options(folder, kRecords));
    for (uint64_t i = 0; i < kRecords; ++i) ASSERT_TRUE(tier->put(*record_of(i, kShape)).ok());
    const int file = open(path.c_str(), O_RDWR);
    ASSERT_GE(file, 0);
    const size_t pages = kRecords * kShape.record_bytes() / kPage;
    for (int damage = 0; damage < 10; ++damage) {
      char page[kPage];
      const auto at = static_cast<off_t>(random() % pages * kPage);
      const auto from = static_cast<off_t>(random() % pages * kPage);
      ASSERT_EQ(pread(file, page, kPage, random() % 2 == 0 ? from : at), ssize_t{kPage});
      page[random() % 600] ^= static_cast<char>(1 << random() % 8);
      if (random() % 3 == 0) std::memset(page + random() % kPage / 2, 0, kPage / 2);
      ASSERT_EQ(pwrite(file, page, kPage, at), ssize_t{kPage});
    }
    if (round % 5 == 0) {
      ASSERT_EQ(ftruncate(file, static_cast<off_t>(random() % pages * kPage)), 0);
    }
    close(file);
    if (round % 2 == 0) {
      tier.reset();
      tier = *DiskTier::open(options(folder, kRecords));
    }
    size_t whole = 0;
    for (uint64_t i = 0; i < kRecords; ++i) whole += reads_whole(*tier, i);
    EXPECT_LT(whole, kRecords);
  }
}

}  // namespace
}  // namespace baton::kvtransfer::tiers
