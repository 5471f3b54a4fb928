// Tests which bytes the two sides of a benchmark take for a message.
#include "bench/report/dialogue.h"

#include "gtest/gtest.h"

namespace baton::bench {
namespace {

TEST(Dialogue, AMessageIsAnObjectOrNothing) {
  EXPECT_TRUE(parse_message("").is_null());
  EXPECT_TRUE(parse_message("{").is_null());
  EXPECT_TRUE(parse_message("[1]").is_null());
  EXPECT_TRUE(parse_message(std::string(60000, '[')).is_null());
  EXPECT_EQ(text_of(parse_message(R"({"do":"bye"})"), "do"), "bye");
  EXPECT_EQ(text_of(parse_message(R"({"do":1})"), "do"), "");
  EXPECT_EQ(text_of(Json(), "do"), "");
}

}  // namespace
}  // namespace baton::bench
