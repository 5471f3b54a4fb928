// When a wait is strange: floors, what is usual, and what is not known yet.
#include "engine/router/expected_wait.h"

#include <gtest/gtest.h>

namespace baton::engine::router {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(ExpectedWait, IsLongUntilEnoughWasSeen) {
  ExpectedWait waits(seconds(1));
  EXPECT_TRUE(waits.ever());
  for (int i = 0; i < 7; ++i) waits.note_first_token(100, milliseconds(10));
  EXPECT_EQ(waits.first_token_limit(100), seconds(10));
  waits.note_first_token(100, milliseconds(10));
  EXPECT_EQ(waits.first_token_limit(100), seconds(1));  // three times 10 ms are below the floor
  EXPECT_EQ(waits.gap_limit(), seconds(10));            // of which nothing was seen
  EXPECT_FALSE(ExpectedWait(milliseconds(0)).ever());
}

TEST(ExpectedWait, GrowsWithTheWork) {
  ExpectedWait waits(milliseconds(100));
  for (int i = 0; i < 100; ++i) waits.note_first_token(1000, seconds(1));
  EXPECT_EQ(waits.first_token_limit(1000), seconds(3));
  EXPECT_EQ(waits.first_token_limit(10000), seconds(30));
  EXPECT_EQ(waits.first_token_limit(10), milliseconds(100));
  EXPECT_EQ(waits.first_token_limit(0), milliseconds(100));
  // However much that is, it can be waited for.
  waits.note_first_token(0, seconds(1));
  for (int i = 0; i < 300; ++i) waits.note_first_token(1, seconds(3600));
  EXPECT_EQ(waits.first_token_limit(SIZE_MAX), std::chrono::hours(24));
}

TEST(ExpectedWait, FollowsWhatIsUsualAndNotTheWorst) {
  ExpectedWait waits(milliseconds(1));
  for (int i = 0; i < 256; ++i) waits.note_gap(i % 50 == 0 ? seconds(10) : milliseconds(20));
  EXPECT_EQ(waits.gap_limit(), milliseconds(60));
  // Everything has become slower.
  for (int i = 0; i < 256; ++i) waits.note_gap(milliseconds(200));
  EXPECT_EQ(waits.gap_limit(), milliseconds(600));
}

}  // namespace
}  // namespace baton::engine::router
