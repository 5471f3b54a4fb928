// Attention of single tokens by splits that several blocks share: the engine's bits.
#include <array>

#include "tests/gpudirect/kernels/pages.h"
#include "tests/sanitized.h"

namespace baton::gpudirect::kernels {
namespace {

std::vector<size_t> all_of(const Pages& pages) {
  std::vector<size_t> out(pages.chunks.size());
  std::iota(out.begin(), out.end(), 0u);
  return out;
}

void expect_equal(const std::vector<float>& ours, Pages& pages) {
  const std::vector<float> wanted = pages.engines();
  for (size_t i = 0; i < ours.size(); ++i) {
    ASSERT_EQ(ours[i], wanted[i]) << "dim " << pages.geometry.head_dim << ", group " << pages.group
                                  << ", window " << pages.window << " at " << i;
  }
}

void expect_the_engines_by_splits(Pages&& pages) {
  expect_equal(pages.of_splits(all_of(pages), 5, 1), pages);
}

TEST(SplitAttention, IsTheEnginesToTheBit) {
  constexpr std::array kDims = {16u, 32u, 48u, 64u, 96u, 128u, 192u, 256u};
  constexpr std::array kGroups = {1u, 4u, 7u, 8u};
  for (size_t d = 0; d < kDims.size(); ++d) {
    for (size_t g = 0; g < kGroups.size(); ++g) {
      if (!tried_together(d, g, kGroups.size())) continue;
      expect_the_engines_by_splits(Pages({{0, 1}, {15, 1}, {254, 1}, {255, 1}, {256, 1}, {600, 1}},
                                         kGroups[g], kDims[d], 0));
    }
  }
  expect_the_engines_by_splits(
      Pages({{3, 1}, {300, 1}}, 19, 32, 0));  // heads of a token in three tasks
}

TEST(SplitAttention, SeesAWindow) {
  for (const uint32_t window : {1u, 16u, 23u, 250u, 256u, 257u, 600u}) {
    expect_the_engines_by_splits(
        Pages({{0, 1}, {255, 1}, {256, 1}, {700, 1}, {1030, 1}}, 3, 32, window));
  }
}

// More of them than are joined at once.
TEST(SplitAttention, LongContext) {
  expect_the_engines_by_splits(Pages({{70 * 256 + 3, 1}}, 2, 16, 0));
}

TEST(SplitAttention, ASequenceHasTheSameBitsInEveryBatchAndOrder) {
  const Pages pages({{300, 1}, {513, 1}, {40, 1}, {1023, 1}}, 4, 64, 0);
  const std::vector<float> together = pages.of_splits({0, 1, 2, 3}, 3, 1);
  EXPECT_EQ(pages.of_splits({2, 0, 3, 1}, 64, 2), together);
  const size_t row = together.size() / 4;
  for (size_t i = 0; i < 4; ++i) {
    const std::vector<float> alone = pages.of_splits({i}, 1, 3);
    const auto at = static_cast<ptrdiff_t>(i * row), end = static_cast<ptrdiff_t>((i + 1) * row);
    EXPECT_TRUE(std::equal(alone.begin() + at, alone.begin() + end, together.begin() + at)) << i;
  }
}

// Attention over pages of prompts, pieces of them and single tokens: the engine's bits.
void expect_the_engines(Pages&& pages) { expect_equal(pages.ours(3, 1), pages); }

TEST(Pages, IsTheEnginesAttention) {
  constexpr std::array kDims = {16u, 48u, 64u, 128u, 256u};
  constexpr std::array kGroups = {1u, 3u, 8u};
  for (size_t d = 0; d < kDims.size(); ++d) {
    for (size_t g = 0; g < kGroups.size(); ++g) {
      if (!tried_together(d, g, kGroups.size())) continue;
      expect_the_engines(
          Pages({{0, 20}, {37, 1}, {5, 30}, {0, 1}, {143, 2}}, kGroups[g], kDims[d], 0));
    }
  }
  expect_the_engines(Pages({{0, 3}, {300, 1}}, 16, 32, 0));  // heads of a token in two tasks
}

TEST(Pages, AddsTheSplitsOfALongContextInOrder) {
  expect_the_engines(Pages({{0, 300}, {700, 1}, {250, 20}}, 2, 16, 0));
  expect_the_engines(Pages({{509, 9}, {1024, 1}}, 3, 32, 0));
  for (const uint32_t window : {5u, 256u, 300u}) {
    expect_the_engines(Pages({{250, 20}, {800, 1}}, 2, 16, window));
  }
}

TEST(Pages, SeesAWindow) {
  for (const uint32_t window : {1u, 16u, 23u, 100u}) {
    expect_the_engines(Pages({{0, 40}, {150, 1}, {60, 9}}, 2, 32, window));
  }
}

TEST(Pages, AnyNumberOfBlocksMakesTheSame) {
  const Pages pages({{0, 40}, {70, 1}, {33, 5}}, 4, 32, 0);
  const std::vector<float> one = pages.ours(1, 1);
  EXPECT_EQ(pages.ours(64, 2), one);
  EXPECT_EQ(pages.ours(7, 3), one);
}

// ---- a prompt in pieces has the bits of one at once: each token sees what is before it ----
TEST(Pages, ATokenHasTheSameBitsInEveryChunk) {
  Pages whole({{0, 48}}, 2, 32, 0);
  const std::vector<float> at_once = whole.ours(4, 1);
  const size_t width = size_t{kHeads} * 2 * 32;
  for (const uint32_t cut : {1u, 7u, 16u, 31u, 47u}) {
    Pages rest = {{{cut, 48 - cut}}, 2, 32, 0};
    rest.tables = whole.tables;
    std::copy_n(whole.cache.data(), whole.cache.size(), rest.cache.data());
    rest.q.assign(whole.q.begin() + static_cast<ptrdiff_t>(cut * width), whole.q.end());
    const std::vector<float> behind = rest.ours(2, 3);
    EXPECT_TRUE(std::equal(behind.begin(), behind.end(),
                           at_once.begin() + static_cast<ptrdiff_t>(cut * width)))
        << cut;
  }
}

}  // namespace
}  // namespace baton::gpudirect::kernels
