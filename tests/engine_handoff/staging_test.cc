// Pieces of several sizes in one range: apart, in their rows, and all given back.
#include "engine/handoff/staging.h"
#include "tests/test.h"

namespace baton::engine::handoff {
namespace {

TEST(Staging, PiecesNeverOverlapAndComeBack) {
  constexpr size_t kBytes = 1 << 16;
  const auto staging = *Staging::make(kBytes);
  struct Piece {
    size_t size;
    uint32_t number;
  };
  std::map<size_t, Piece> pieces;  // by where they begin
  std::mt19937_64 random(3);
  for (int round = 0; round < 20000; ++round) {
    if (random() % 5 < 3) {
      const size_t sizes[] = {192, 1024, 3000, 4096};
      const size_t size = sizes[random() % 4];
      const auto number = staging->allocate(size);
      if (!number.has_value()) continue;
      ASSERT_LT(*number, staging->pieces(size));
      const size_t begin = size * *number;
      EXPECT_EQ(staging->piece(size, *number), staging->base() + begin);
      const auto next = pieces.lower_bound(begin);
      ASSERT_TRUE(next == pieces.end() || next->first >= begin + size);
      ASSERT_TRUE(next == pieces.begin() ||
                  std::prev(next)->first + std::prev(next)->second.size <= begin);
      pieces[begin] = {size, *number};
    } else if (!pieces.empty()) {
      const auto one = std::next(pieces.begin(), static_cast<ptrdiff_t>(random() % pieces.size()));
      staging->release(one->second.size, one->second.number);
      pieces.erase(one);
    }
  }
  for (const auto& [begin, piece] : pieces) staging->release(piece.size, piece.number);
  EXPECT_EQ(staging->used(), 0u);
  EXPECT_TRUE(staging->allocate(kBytes).has_value());
  EXPECT_FALSE(staging->allocate(1).has_value());
}

TEST(Staging, APieceMayBeTooLarge) {
  const auto staging = *Staging::make(4096);
  EXPECT_EQ(staging->pieces(5000), 0u);
  EXPECT_FALSE(staging->allocate(5000).has_value());
}

}  // namespace
}  // namespace baton::engine::handoff
