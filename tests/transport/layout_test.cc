// Layouts and cursors against a byte-by-byte reference.
#include "transport/layout.h"
#include "tests/test.h"

namespace baton {
namespace {

// Every byte offset of a box, in order, written the slow way.
std::vector<size_t> bytes_of(size_t offset, const std::vector<Dim>& dims, size_t piece) {
  std::vector<size_t> starts = {offset};
  for (const Dim& dim : dims) {
    std::vector<size_t> next;
    for (size_t start : starts) {
      for (size_t i = 0; i < dim.count; ++i) {
        next.push_back(start + (dim.index != nullptr ? dim.index[i] : i) * dim.stride);
      }
    }
    starts = next;
  }
  std::vector<size_t> out;
  for (size_t start : starts) {
    for (size_t i = 0; i < piece; ++i) out.push_back(start + i);
  }
  return out;
}

TEST(Layout, DescribesWhatItSays) {
  EXPECT_EQ(Layout().bytes(), 0u);
  EXPECT_EQ(Layout::contiguous(7, 100).bytes(), 100u);
  const std::vector<uint32_t> pages = {3, 0, 9};
  const Layout paged = Layout::paged(64, pages, 1024, 512);
  EXPECT_EQ(paged.bytes(), 3 * 512u);
  EXPECT_EQ(paged.repeated(4, 1 << 20).bytes(), 12 * 512u);
  // Rows without a gap are one piece.
  EXPECT_EQ(Layout::strided(0, 8, 256, 256).dims().size(), 0u);
  EXPECT_EQ(Layout::strided(0, 8, 256, 256).piece_bytes(), 2048u);
}

TEST(Layout, ListsOfAMeasuredOneAreNotReadAgain) {
  std::vector<uint32_t> pages = {3, 0, 9};
  const Layout plain = Layout::paged(64, pages, 1024, 512);
  const Layout measured = plain.measured();
  EXPECT_EQ(measured.bytes(), plain.bytes());
  EXPECT_TRUE(measured.check(64 + 9 * 1024 + 512, "local").ok());
  EXPECT_FALSE(measured.check(64 + 9 * 1024 + 511, "local").ok());
  pages[1] = 1000;
  EXPECT_TRUE(measured.check(64 + 9 * 1024 + 512, "local").ok());
  EXPECT_FALSE(plain.check(64 + 9 * 1024 + 512, "local").ok());
  // What is made of it is another layout, and none of its own numbers hold for that one.
  const Layout twice = measured.repeated(2, 1 << 20);
  EXPECT_FALSE(twice.check((1 << 20) + 64 + 9 * 1024 + 512, "local").ok());
  EXPECT_TRUE(twice.check((1 << 20) + 64 + 1000 * 1024 + 512, "local").ok());
  // A largest page of 0, no pages, and one run are measured as well.
  pages = {0, 0};
  EXPECT_TRUE(Layout::paged(64, pages, 1024, 512).measured().check(64 + 512, "local").ok());
  EXPECT_TRUE(Layout::paged(64, {}, 1024, 512).measured().check(0, "local").ok());
  EXPECT_FALSE(Layout::contiguous(8, 8).measured().check(15, "local").ok());
}

TEST(Layout, ChecksBounds) {
  const std::vector<uint32_t> pages = {3, 0, 9};
  const Layout paged = Layout::paged(64, pages, 1024, 512);
  EXPECT_TRUE(paged.check(64 + 9 * 1024 + 512, "local").ok());
  const absl::Status status = paged.check(64 + 9 * 1024 + 511, "remote");
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_NE(status.message().find("remote"), absl::string_view::npos);
  EXPECT_FALSE(Layout::contiguous(SIZE_MAX, 2).check(100, "local").ok());
  EXPECT_FALSE(Layout::strided(0, SIZE_MAX / 2, 16, 8).check(SIZE_MAX, "local").ok());
  EXPECT_TRUE(Layout::contiguous(500, 0).check(0, "local").ok());
}

TEST(Layout, RefusesTooManyDimensions) {
  Layout layout = Layout::contiguous(0, 1);
  for (int i = 0; i < 6; ++i) layout = layout.repeated(2, size_t{10} << (4 * i));
  EXPECT_EQ(layout.check(SIZE_MAX - 1, "local").code(), absl::StatusCode::kInvalidArgument);
}

TEST(TransferCursor, CoalescesNeighbours) {
  const std::vector<uint32_t> local = {0, 1, 2, 7};
  const std::vector<uint32_t> remote = {4, 5, 6, 1};
  const Layout a = Layout::paged(0, local, 100, 100);
  const Layout b = Layout::paged(0, remote, 100, 100);
  TransferCursor cursor(a, b, 0, a.bytes());
  Piece piece;
  ASSERT_TRUE(cursor.next(piece));
  EXPECT_EQ(piece.bytes, 300u);
  EXPECT_EQ(piece.remote_offset, 400u);
  ASSERT_TRUE(cursor.next(piece));
  EXPECT_EQ(piece.bytes, 100u);
  EXPECT_EQ(piece.local_offset, 700u);
  EXPECT_FALSE(cursor.next(piece));
}

// Random boxes on both sides, walked from a random byte in pieces of random size.
TEST(TransferCursor, EqualsTheReference) {
  std::mt19937 random(1);
  const auto below = [&](size_t n) {
    return std::uniform_int_distribution<size_t>(0, n - 1)(random);
  };
  for (int round = 0; round < 2000; ++round) {
    std::vector<std::vector<uint32_t>> lists;
    lists.reserve(8);
    const auto random_box = [&](size_t total, std::vector<Dim>& dims) {
      size_t left = total;
      while (left % 2 == 0 && left > 1 && dims.size() < 4 && below(4) != 0) {
        const size_t count = left % 4 == 0 && below(2) ? 4 : 2;
        left /= count;
        Dim dim{count, below(3) == 0 ? left : left + below(50)};
        if (below(2)) {
          lists.emplace_back(count);
          for (uint32_t& page : lists.back()) page = static_cast<uint32_t>(below(9));
          dim.index = lists.back().data();
        }
        dims.push_back(dim);
      }
      return left;
    };
    const size_t total = (1 + below(20)) << below(6);
    std::vector<Dim> local_dims, remote_dims;
    const size_t local_piece = random_box(total, local_dims);
    const size_t remote_piece = random_box(total, remote_dims);
    const size_t local_offset = below(100), remote_offset = below(100);
    const auto local_bytes = bytes_of(local_offset, local_dims, local_piece);
    const auto remote_bytes = bytes_of(remote_offset, remote_dims, remote_piece);
    ASSERT_EQ(local_bytes.size(), total);

    const Layout local = Layout::box(local_offset, local_dims, local_piece);
    const Layout remote = Layout::box(remote_offset, remote_dims, remote_piece);
    ASSERT_EQ(local.bytes(), total);
    const size_t begin = below(total + 1), end = begin + below(total - begin + 1);
    TransferCursor cursor(local, remote, begin, end);
    size_t at = begin;
    Piece piece;
    while (cursor.next(piece, 1 + below(64))) {
      for (size_t i = 0; i < piece.bytes; ++i, ++at) {
        ASSERT_EQ(piece.local_offset + i, local_bytes[at]) << "round " << round;
        ASSERT_EQ(piece.remote_offset + i, remote_bytes[at]) << "round " << round;
      }
    }
    ASSERT_EQ(at, end);
    // The bounds check agrees with the highest byte used.
    const size_t top = *std::max_element(local_bytes.begin(), local_bytes.end()) + 1;
    EXPECT_TRUE(local.check(top, "local").ok());
    EXPECT_FALSE(local.check(top - 1, "local").ok());
  }
}

}  // namespace
}  // namespace baton
