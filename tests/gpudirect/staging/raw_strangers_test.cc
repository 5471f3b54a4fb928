// Whoever holds the key and speaks tcp by a plain socket says what he likes of a worker's memory of
// a device: words that are cut, that claim what is not there, and those of before once more.
#include "tests/gpudirect/staging/raw_stranger.h"
#include "tests/test.h"

namespace baton {
namespace {

using framed::Frame;
using framed::FrameType;
using internal::StagingMessage;
using tcp::encoded;

// As if it was memory of the host's: no processor touches it.
TEST_F(RawStrangers, PlainFramesReachNoMemoryOfADevice) {
  Frame write{.type = FrameType::kWrite,
              .flags = framed::kLast,
              .transfer = {0, 1},
              .bytes = 4,
              .pieces = 1,
              .region = remote_.index,
              .generation = remote_.generation,
              .key = remote_.key,
              .slice_bytes = 4,
              .total_bytes = 4};
  socket_->send(encoded(write, {{0, 4}}, "late"));
  const auto written = answer(FrameType::kWriteAck);
  ASSERT_TRUE(written.has_value());
  EXPECT_NE(written->code, absl::StatusCode::kOk);
  socket_->send(encoded({.type = FrameType::kRead,
                         .transfer = {1, 1},
                         .bytes = 4,
                         .pieces = 1,
                         .region = remote_.index,
                         .generation = remote_.generation,
                         .key = remote_.key},
                        {{0, 4}}));
  const auto read = answer(FrameType::kReadEnd);
  ASSERT_TRUE(read.has_value());
  EXPECT_NE(read->code, absl::StatusCode::kOk);
  expect_untouched();
  number_ = 2;
  expect_served();
}

TEST_F(RawStrangers, ClaimsOfMemoryThatIsNotThereAreRefused) {
  for (int which = 0; which < 6; ++which) {
    StagingMessage bad = want();
    if (which % 2 == 1) {
      bad.kind = Kind::kFetch;
      bad.runs = {{0, 4096}};
    }
    if (which / 2 == 0) ++bad.region.generation;
    if (which / 2 == 1) ++bad.region.key;
    if (which / 2 == 2) bad.region.index = 1u << 30;
    EXPECT_FALSE(answered(bad).ok()) << which;
  }
  for (const uint64_t offset : {kBytes - 4095, kBytes, UINT64_MAX - 4095}) {
    StagingMessage fetch = want();
    fetch.kind = Kind::kFetch;
    fetch.runs = {{offset, 4096}};
    EXPECT_FALSE(answered(fetch).ok()) << offset;
    EXPECT_FALSE(answered(land(room_with('x'), offset)).ok()) << offset;
  }
  // More than there was room for.
  EXPECT_FALSE(answered(land(room_with('x'), 0, 4097)).ok());
  expect_untouched();
  expect_served();
}

// The room was given back when it had landed once: it may be somebody else's by now.
TEST_F(RawStrangers, WordsOfBeforeDoNothingASecondTime) {
  const StagingMessage room = room_with('1');
  EXPECT_TRUE(answered(land(room)).ok());
  EXPECT_EQ(fake().read(at_, 4096), std::string(4096, '1'));
  fake().write(at_, std::string(4096, 'o'));
  const uint64_t copies = fake().copies();
  say(land(room));
  StagingMessage release = land(room);
  release.kind = Kind::kRelease;
  EXPECT_TRUE(answered(release).ok()) << "of what is over, it is over";
  EXPECT_EQ(fake().copies(), copies);
  // Nor when the room, or the whole peer, is another's.
  const StagingMessage mine = room_with('2');
  say(land(room));
  hang_up();
  call();
  for (const StagingMessage& old : {room, mine}) say(land(old));
  expect_served();
  expect_untouched();
}

// Whatever is cut off it: the worker lets the peer go or ignores it, and serves the next one.
TEST_F(RawStrangers, WordsThatAreCutAreNotBelieved) {
  StagingMessage fetch = want();
  fetch.kind = Kind::kFetch;
  fetch.runs = {{0, 4096}};
  for (const StagingMessage& whole : {want(), fetch}) {
    std::string words;
    whole.encode(words);
    for (size_t left = 0; left < words.size(); ++left) {
      say(std::string_view(words).substr(0, left));
      say(words + std::string(left + 1, 'x'));
      hang_up();
      call();
    }
  }
  for (const uint64_t bytes : {uint64_t{0}, StagingMessage::kMaxBytes + 1, UINT64_MAX}) {
    say(want(bytes));
    hang_up();
    call();
  }
  expect_served();
  expect_untouched();
}

}  // namespace
}  // namespace baton
