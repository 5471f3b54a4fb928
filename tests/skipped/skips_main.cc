// Tests that skip, pass and fail on purpose: skipped_test.cmake picks some of them.
#include "tests/test.h"

TEST(Some, Skips) { GTEST_SKIP() << "there is no such device here"; }
TEST(Some, SkipsToo) { GTEST_SKIP() << "nor that one"; }
TEST(Some, Passes) {}
TEST(Some, Fails) { FAIL() << "on purpose"; }
