// Commands as bytes: what is encoded is decoded, and nothing else is.
#include "engine/shard/commands.h"

#include <gtest/gtest.h>

namespace baton::engine::shard {
namespace {

std::string bytes_of(const Command& command) {
  std::string bytes = "what was here before";
  command.encode(bytes);
  return bytes;
}

Command a_step() {
  return {.kind = CommandKind::kStep,
          .chunks = {{{1, 2, 3}, 16, {7, 8}, true, false}, {{9}, 0, {0}, false, true}}};
}

TEST(Commands, RoundTrip) {
  for (const Command& command :
       {Command{.kind = CommandKind::kStop}, Command{.kind = CommandKind::kStep}, a_step()}) {
    const auto decoded = Command::decode(bytes_of(command));
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(*decoded, command);
  }
}

TEST(Commands, CutOrLongerOnesAreRefused) {
  const std::string whole = bytes_of(a_step());
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(Command::decode(std::string_view(whole).substr(0, size)).ok()) << size;
  }
  EXPECT_FALSE(Command::decode(whole + '\0').ok());
}

TEST(Commands, UnknownOnesAreRefused) {
  for (const char kind : {'\0', '\x63', '\xff'}) {
    const auto decoded = Command::decode(std::string_view(&kind, 1));
    EXPECT_TRUE(absl::IsInvalidArgument(decoded.status())) << int(kind);
  }
}

// A count that the bytes cannot hold costs no memory.
TEST(Commands, LengthsAreNotBelieved) {
  std::string bytes = bytes_of({.kind = CommandKind::kStep});
  bytes.replace(1, 4, "\xff\xff\xff\xff");
  EXPECT_FALSE(Command::decode(bytes).ok());
  bytes = bytes_of(a_step());
  bytes.replace(5, 4, "\xff\xff\xff\x7f");
  EXPECT_FALSE(Command::decode(bytes).ok());
}

}  // namespace
}  // namespace baton::engine::shard
