// When a wait is strange: floors, what is usual, and what is not known yet.
#include "engine/router/expected_wait.h"
#include "tests/test.h"

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

TEST(ExpectedWait, IsASecondWhereNoneIsGivenAndQuestionsComeSooner) {
  ExpectedWait waits(std::nullopt, milliseconds(50));
  EXPECT_TRUE(waits.ever());
  EXPECT_TRUE(waits.asks());
  EXPECT_FALSE(ExpectedWait(milliseconds(5)).asks());
  EXPECT_EQ(waits.ask_limit(), milliseconds(500));
  for (int i = 0; i < 8; ++i) waits.note_gap(milliseconds(2));
  EXPECT_EQ(waits.gap_limit(), patient(seconds(1)));
  EXPECT_EQ(waits.ask_limit(), milliseconds(50));
  for (int i = 0; i < 256; ++i) waits.note_gap(milliseconds(100));
  EXPECT_EQ(waits.gap_limit(), patient(seconds(1)));
  EXPECT_EQ(waits.ask_limit(), milliseconds(300));
}

TEST(ExpectedWait, OneAnswerInThreeMayComeFromAStuckWorker) {
  ExpectedWait waits(std::nullopt, milliseconds(50));
  EXPECT_EQ(waits.answer_limit(), milliseconds(500));
  for (int i = 0; i < 255; ++i) waits.note_answer(i % 3 == 0 ? seconds(2) : milliseconds(1));
  EXPECT_EQ(waits.answer_limit(), milliseconds(50));
  for (int i = 0; i < 256; ++i) waits.note_answer(milliseconds(20));
  EXPECT_EQ(waits.answer_limit(), milliseconds(200));
}

// With limits of 50 ms.
class PulseTest : public testing::Test {
 protected:
  PulseTest() {
    for (int i = 0; i < 8; ++i) {
      waits_.note_gap(milliseconds(1));
      waits_.note_answer(milliseconds(1));
    }
  }
  // "ask", "stuck", both or neither.
  std::string at(int milliseconds_later) {
    const Pulse::Look look = pulse_.look(seconds(100) + milliseconds(milliseconds_later), waits_);
    return std::string(look.stuck ? "stuck" : "") + (look.ask ? "ask" : "");
  }
  void heard_at(int milliseconds_later) {
    pulse_.heard(seconds(100) + milliseconds(milliseconds_later));
  }
  ExpectedWait waits_{std::nullopt, milliseconds(50)};
  Pulse pulse_;
};

TEST_F(PulseTest, AnIdleWorkerIsProbedAndSilenceMeansStuck) {
  heard_at(0);
  EXPECT_EQ(at(49), "");
  EXPECT_EQ(at(50), "ask");
  EXPECT_EQ(at(51), "");  // one question at a time
  EXPECT_EQ(at(99), "");
  EXPECT_EQ(at(100), "stuck");
  // Nobody waits for the question any more: it is asked again, and stuck until it answers.
  pulse_.end_question();
  EXPECT_EQ(at(2000), "stuckask");
  EXPECT_EQ(at(2001), "stuck");
  pulse_.end_question();
  heard_at(2002);
  EXPECT_EQ(at(2051), "");
  EXPECT_EQ(at(2052), "ask");
}

TEST_F(PulseTest, AnAnsweringOrAdvancingWorkerIsNotStuck) {
  heard_at(0);
  EXPECT_EQ(at(50), "ask");
  pulse_.end_question();
  heard_at(60);
  EXPECT_EQ(at(109), "");
  EXPECT_EQ(at(110), "ask");
  // A token while it is being asked: from here on it has as long again.
  heard_at(150);
  EXPECT_EQ(at(199), "");
  EXPECT_EQ(at(200), "stuck");
  heard_at(201);
  EXPECT_EQ(at(202), "");
  // It answers that it gets nowhere.
  pulse_.end_question();
  pulse_.set_stuck();
  EXPECT_EQ(at(203), "stuck");
  EXPECT_EQ(at(251), "stuckask");
}

}  // namespace
}  // namespace baton::engine::router
