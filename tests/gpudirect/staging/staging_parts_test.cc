// The parts of staging that need neither workers nor a driver: room in a ring, parts of layouts,
// messages.
#include "tests/test.h"
#include "transport/internal/messages/control_message.h"
#include "transport/internal/staging/cut.h"
#include "transport/internal/staging/ring_marks.h"

namespace baton::internal {
namespace {

constexpr size_t kMiB = 1 << 20;

TEST(RingSpace, SpaceIsExclusiveUntilReturned) {
  RingSpace space(kMiB, 2 * kMiB);
  std::mt19937_64 random(3);
  std::vector<std::pair<size_t, size_t>> taken;
  for (int i = 0; i < 2000; ++i) {
    const size_t bytes = 1 + random() % (kMiB / 2);
    if (const auto at = space.take(bytes, random() % 2 == 0, random() % 3)) {
      ASSERT_GE(*at, kMiB);
      ASSERT_LE(*at + bytes, 3 * kMiB);
      for (const auto& [other, size] : taken) {
        ASSERT_TRUE(*at + bytes <= other || other + size <= *at);
      }
      taken.emplace_back(*at, bytes);
    } else {
      ASSERT_FALSE(taken.empty());
      const size_t which = random() % taken.size();
      space.give_back(taken[which].first, taken[which].second);
      taken.erase(taken.begin() + static_cast<ptrdiff_t>(which));
    }
  }
  for (const auto& [at, bytes] : taken) space.give_back(at, bytes);
  EXPECT_EQ(space.used(), 0u);
}

TEST(RingSpace, BulkLeavesRoomForWhatIsUrgent) {
  RingSpace space(0, 2 * kMiB);
  while (space.take(RingSpace::kPage, false, 0)) {
  }
  EXPECT_TRUE(space.take(1, true, 0));
}

TEST(RingSpace, APeerWithRoomLeavesSomeForOthers) {
  RingSpace space(0, 32 * kMiB);
  size_t chunks = 0;
  while (space.take(4 * kMiB, false, 7)) ++chunks;
  EXPECT_EQ(chunks, 6u) << "of 28 MiB";
  const auto other = space.take(4 * kMiB, false, 8);
  ASSERT_TRUE(other);
  EXPECT_FALSE(space.take(RingSpace::kPage, false, 9));
  EXPECT_TRUE(space.take(kMiB, true, 7)) << "what is urgent does not wait";
  space.give_back(*other, 4 * kMiB);
  EXPECT_FALSE(space.has_any(8));
  EXPECT_TRUE(space.has_any(7));
}

// Each byte of a layout and where it lies.
std::vector<size_t> places(const Layout& layout) {
  std::vector<size_t> out;
  LayoutWalker walker(layout, 0);
  for (size_t left = layout.bytes(); left > 0; --left) {
    out.push_back(walker.offset());
    if (left > 1) walker.advance(1);
  }
  return out;
}

TEST(Cut, PartsOfALayoutAreItsBytesInOrder) {
  std::mt19937_64 random(9);
  for (int round = 0; round < 300; ++round) {
    std::vector<uint32_t> pages(1 + random() % 40);
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), random);
    const size_t piece = 1 + random() % 200;
    const Layout whole = Layout::paged(random() % 100, pages, piece + random() % 64, piece)
                             .repeated(1 + random() % 3, 20'000);
    const std::vector<size_t> expected = places(whole);
    const size_t most = 1 + random() % 2000;
    std::vector<size_t> cuts;
    std::vector<size_t> runs;
    for (size_t at = 0; at < whole.bytes();) {
      Layout part;
      std::vector<uint32_t> index;
      const size_t end = cut(whole, at, std::min(most, whole.bytes() - at), part, index);
      ASSERT_GT(end, at);
      ASSERT_LE(end - at, most);
      ASSERT_EQ(part.bytes(), end - at);
      for (const size_t place : places(part)) cuts.push_back(place);
      at = end;
    }
    for (size_t at = 0; at < whole.bytes();) {
      std::vector<internal::Run> out;
      const size_t end = runs_of(whole, at, std::min(most, whole.bytes() - at), out);
      ASSERT_GT(end, at);
      ASSERT_LE(out.size(), StagingMessage::kMaxRuns);
      for (const internal::Run& run : out) {
        for (size_t i = 0; i < run.bytes; ++i) runs.push_back(run.offset + i);
      }
      at = end;
    }
    ASSERT_EQ(cuts, expected) << round;
    ASSERT_EQ(runs, expected) << round;
  }
}

TEST(Cut, ChunksGrowWithTheTransferUpToFourMebibytes) {
  size_t last = 0;
  for (size_t bytes = 1; bytes < (size_t{1} << 36); bytes *= 2) {
    const size_t chunk = chunk_bytes(bytes);
    EXPECT_GE(chunk, last);
    EXPECT_GE(chunk, size_t{256} << 10);
    EXPECT_LE(chunk, 4 * kMiB);
    last = chunk;
  }
  EXPECT_EQ(last, 4 * kMiB);
}

StagingMessage example(StagingMessage::Kind kind) {
  StagingMessage message{.kind = kind, .chunk = {3, 4}, .room = {5, 6}};
  message.region.generation = 7;
  message.region.kind = MemoryKind::kDevice;
  message.offset = 8;
  message.bytes = 300;
  if (kind == StagingMessage::Kind::kFetch || kind == StagingMessage::Kind::kLand ||
      kind == StagingMessage::Kind::kOffer) {
    message.runs = {{0, 100}, {1000, 200}};
  }
  if (kind == StagingMessage::Kind::kEnded) message.status = absl::NotFoundError("it is stale");
  return message;
}

TEST(StagingMessage, SaysWhatWasSaid) {
  for (uint8_t kind = 1; kind <= 9; ++kind) {
    const StagingMessage said = example(static_cast<StagingMessage::Kind>(kind));
    std::string words;
    said.encode(words);
    const auto heard = StagingMessage::decode(words);
    ASSERT_TRUE(heard.ok()) << int{kind};
    EXPECT_EQ(heard->kind, said.kind);
    EXPECT_EQ(heard->chunk, said.chunk);
    EXPECT_EQ(heard->room, said.room);
    EXPECT_EQ(heard->status, said.status);
    EXPECT_EQ(heard->runs.size(), said.runs.size());
    if (said.kind == StagingMessage::Kind::kRing) {
      EXPECT_EQ(heard->region.generation, 7u);
    }
    if (said.kind == StagingMessage::Kind::kRoom || said.kind == StagingMessage::Kind::kOffer) {
      EXPECT_EQ(heard->region.kind, MemoryKind::kDevice);
      EXPECT_EQ(heard->offset, 8u);
    }
  }
}

}  // namespace
}  // namespace baton::internal
