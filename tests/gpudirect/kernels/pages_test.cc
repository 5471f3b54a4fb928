// Attention over pages of prompts, pieces of them and single tokens: the engine's bits.
#include <array>

#include "tests/gpudirect/kernels/pages.h"
#include "tests/sanitized.h"

namespace baton::gpudirect::kernels {
namespace {

void expect_the_engines(Pages&& pages) {
  const std::vector<float> ours = pages.ours(3, 1), wanted = pages.engines();
  for (size_t i = 0; i < ours.size(); ++i) {
    ASSERT_EQ(ours[i], wanted[i]) << "dim " << pages.geometry.head_dim << ", group " << pages.group
                                  << ", window " << pages.window << " at " << i;
  }
}

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
