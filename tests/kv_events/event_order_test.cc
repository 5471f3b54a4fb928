// A numbered stream put in order: what is applied, what is asked for, and when all is forgotten.
#include "engine/kv_events/event_order.h"
#include "tests/test.h"

namespace baton::engine::kv_events {
namespace {

// What an order was told to do, as words: "+a" applied, "?3" asked from 3 on, "forget".
class Script {
 public:
  explicit Script(bool has_replay = true)
      : order(has_replay,
              {.apply =
                   [this](std::string_view payload) {
                     done.push_back(absl::StrCat("+", std::string(payload)));
                     return payload == "bad" ? absl::InvalidArgumentError("bad") : absl::OkStatus();
                   },
               .doubt = [this](const std::string&) { done.emplace_back("doubt"); },
               .forget =
                   [this](const std::string& why) {
                     done.emplace_back("forget");
                     reason = why;
                   },
               .ask = [this](uint64_t from) { done.push_back(absl::StrCat("?", from)); }}) {}
  // What was done since it was last called.
  std::vector<std::string> take() { return std::exchange(done, {}); }
  // Begun with a replay that has these from 0 on.
  void begin(const std::vector<std::string>& payloads) {
    order.connected();
    for (size_t i = 0; i < payloads.size(); ++i) order.replayed(i, payloads[i]);
    order.replay_ended();
    take();
  }

  std::vector<std::string> done;
  std::string reason;
  EventOrder order;
};

using Words = std::vector<std::string>;

TEST(EventOrder, BeginsWithAllThatTheBufferHas) {
  Script script;
  EXPECT_FALSE(script.order.known());
  script.order.live(7, "early");  // before the connection: it means nothing
  script.order.connected();
  EXPECT_EQ(script.take(), Words{"?0"});
  script.order.live(2, "c");
  script.order.replayed(0, "a");
  script.order.replayed(1, "b");
  script.order.replayed(2, "c");
  EXPECT_FALSE(script.order.known());
  script.order.replay_ended();
  EXPECT_TRUE(script.order.known());
  script.order.live(3, "d");
  EXPECT_EQ(script.take(), (Words{"+a", "+b", "+c", "+d"}));
  EXPECT_EQ(script.order.stats().gaps, 0u);
  EXPECT_EQ(script.order.stats().replayed, 3u);
}

TEST(EventOrder, MayBeginInTheMiddle) {
  Script script;
  script.order.connected();
  script.order.replayed(500, "x");
  script.order.replay_ended();
  script.order.live(501, "y");
  EXPECT_EQ(script.take(), (Words{"?0", "+x", "+y"}));
}

TEST(EventOrder, WhatWasLostIsAskedForFromTheLastBatchOn) {
  Script script;
  script.begin({"a", "b"});
  script.order.live(4, "e");
  script.order.live(5, "f");
  EXPECT_EQ(script.take(), Words{"?1"});
  EXPECT_FALSE(script.order.known());
  for (const auto& [sequence, payload] :
       std::vector<std::pair<uint64_t, std::string>>{{1, "b"}, {2, "c"}, {3, "d"}, {4, "e"}}) {
    script.order.replayed(sequence, payload);
  }
  script.order.replay_ended();
  EXPECT_EQ(script.take(), (Words{"+c", "+d", "+e", "+f"}));
  EXPECT_EQ(script.order.stats().gaps, 1u);
  EXPECT_EQ(script.order.stats().forgotten, 0u);
}

TEST(EventOrder, WhatIsLostAtTheEndIsFoundByAskingWhenItIsQuiet) {
  Script script;
  script.begin({"a"});
  script.order.check();
  script.order.replayed(0, "a");
  script.order.replay_ended();
  EXPECT_EQ(script.take(), Words{"?0"});  // nothing was
  script.order.check();
  script.order.replayed(0, "a");
  script.order.replayed(1, "b");
  script.order.replay_ended();
  EXPECT_EQ(script.take(), (Words{"?0", "+b"}));
}

TEST(EventOrder, ABufferThatDoesNotReachBackSoFarBeginsAnew) {
  Script script;
  script.begin({"a", "b"});
  script.order.live(9, "j");
  for (int i = 0; i < 2; ++i) {  // the first time, its beginning may have been lost
    script.order.replayed(8, "i");
    script.order.replayed(9, "j");
    script.order.replay_ended();
  }
  EXPECT_EQ(script.take(), (Words{"?1", "?1", "forget", "+i", "+j"}));
  EXPECT_NE(script.reason.find("begins with batch 8"), std::string::npos) << script.reason;
  EXPECT_TRUE(script.order.known());
  EXPECT_EQ(script.order.stats().forgotten, 1u);
}

TEST(EventOrder, ANumberThatGoesBackIsAnotherProcess) {
  Script script;
  script.begin({"a", "b"});
  script.order.live(2, "c");
  script.take();
  script.order.live(1, "B");
  EXPECT_EQ(script.take(), (Words{"forget", "?0"}));
  script.order.replayed(0, "A");
  script.order.replayed(1, "B");
  script.order.replay_ended();
  script.order.live(2, "C");
  EXPECT_EQ(script.take(), (Words{"+A", "+B", "+C"}));
  EXPECT_EQ(script.order.stats().restarts, 1u);
}

// Its numbers have come further than the old one's before anybody looked.
TEST(EventOrder, AnotherProcessIsKnownByItsBatches) {
  Script script;
  script.begin({"a", "b"});
  script.order.live(5, "F");
  EXPECT_EQ(script.take(), Words{"?1"});
  script.order.replayed(1, "B");  // not "b"
  script.order.replayed(2, "C");
  script.order.replay_ended();
  EXPECT_EQ(script.take(), (Words{"forget", "?0"}));
  EXPECT_FALSE(script.order.known());
  for (const auto& [sequence, payload] : std::vector<std::pair<uint64_t, std::string>>{
           {0, "A"}, {1, "B"}, {2, "C"}, {3, "D"}, {4, "E"}, {5, "F"}}) {
    script.order.replayed(sequence, payload);
  }
  script.order.replay_ended();
  EXPECT_EQ(script.take(), (Words{"+A", "+B", "+C", "+D", "+E", "+F"}));
  // Or they have not come so far.
  script.order.check();
  script.order.replay_ended();
  EXPECT_EQ(script.take(), (Words{"?5", "forget", "?0"}));
  script.order.replayed(0, "1");
  script.order.replay_ended();
  EXPECT_EQ(script.take(), Words{"+1"});
  EXPECT_EQ(script.order.stats().restarts, 2u);
}

TEST(EventOrder, AConnectionThatEndsLeavesNothingBehind) {
  Script script;
  script.begin({"a"});
  script.order.disconnected();
  EXPECT_EQ(script.take(), Words{"forget"});
  EXPECT_FALSE(script.order.known());
  script.order.live(1, "b");
  script.order.replayed(0, "a");
  script.order.replay_ended();
  script.order.check();
  EXPECT_EQ(script.take(), Words{});
  script.order.connected();
  script.order.replay_ended();  // it has said nothing so far
  script.order.live(0, "A");
  EXPECT_EQ(script.take(), (Words{"?0", "+A"}));
}

TEST(EventOrder, AnAnswerWithAHoleIsAskedForAgain) {
  Script script;
  script.begin({"a"});
  script.order.live(4, "e");
  script.order.replayed(0, "a");
  script.order.replayed(1, "b");
  script.order.replayed(3, "d");
  script.order.replay_ended();
  EXPECT_EQ(script.take(), (Words{"?0", "+b", "?1"}));
  script.order.replayed(1, "b");
  script.order.replayed(2, "c");
  script.order.replayed(3, "d");
  script.order.replay_ended();
  EXPECT_EQ(script.take(), (Words{"+c", "+d", "+e"}));
}

TEST(EventOrder, AskingThatLeadsToNothingEnds) {
  Script script;
  script.begin({"a"});
  script.order.live(3, "d");
  script.order.live(4, "e");
  for (int i = 0; i < 10 && script.order.replaying(); ++i) {
    script.order.replayed(0, "a");
    script.order.replay_ended();  // and never has 1 and 2
  }
  EXPECT_EQ(script.take(), (Words{"?0", "?0", "?0", "forget", "+d", "+e"}));
  EXPECT_TRUE(script.order.known());
}

// Every answer is of another process, or none would be what it was: somebody's joke.
TEST(EventOrder, APublisherThatMakesNoSenseIsNotAskedForEver) {
  Script script;
  script.begin({"a"});
  script.order.live(9, "x");
  int asked = 0;
  for (; asked < 1000 && script.order.replaying(); ++asked) {
    script.order.replayed(0, absl::StrCat("joke ", asked));
    script.order.replayed(5, "hole");
    script.order.replay_ended();
  }
  EXPECT_LT(asked, 200);
  EXPECT_TRUE(script.order.known());
}

TEST(EventOrder, AFailedReplayIsNotTrusted) {
  Script script;
  script.begin({"a"});
  script.order.live(2, "c");
  script.order.live(4, "e");
  script.order.live(5, "f");
  script.order.replay_failed("silence");
  EXPECT_EQ(script.take(), (Words{"?0", "doubt", "?0"}));
  EXPECT_FALSE(script.order.known());
  script.order.replay_failed("silence");
  script.order.replay_failed("silence");
  // From what has no hole up to the end; before it nothing is known.
  EXPECT_EQ(script.take(), (Words{"doubt", "?0", "forget", "+e", "+f"}));
  EXPECT_TRUE(script.order.known());
  script.order.live(6, "g");
  EXPECT_EQ(script.take(), Words{"+g"});
}

TEST(EventOrder, ALookThatIsNotAnsweredChangesNothing) {
  Script script;
  script.begin({"a"});
  script.order.check();
  script.order.live(1, "b");
  script.order.replay_failed("silence");
  EXPECT_EQ(script.take(), (Words{"?0", "+b"}));
  EXPECT_TRUE(script.order.known());
  EXPECT_EQ(script.order.stats().forgotten, 0u);
  // But if the answer has begun, nobody knows how it goes on before it is asked for again.
  script.order.check();
  script.order.replayed(1, "b");
  script.order.replayed(2, "c");
  script.order.replay_failed("silence");
  EXPECT_EQ(script.take(), (Words{"?1", "+c", "doubt", "?2"}));
  script.order.replayed(2, "c");
  script.order.replay_ended();
  EXPECT_EQ(script.take(), Words{});
  EXPECT_TRUE(script.order.known());
}

TEST(EventOrder, WhatBeganInTheMiddleForWantOfAReplayBeginsAnewWithOne) {
  Script script;
  script.order.connected();
  script.order.live(7, "h");
  for (int i = 0; i < 3; ++i) script.order.replay_failed("silence");
  script.order.live(8, "i");
  EXPECT_EQ(script.take(), (Words{"?0", "doubt", "?0", "doubt", "?0", "forget", "+h", "+i"}));
  script.order.check();
  script.order.replay_failed("silence");
  EXPECT_EQ(script.take(), Words{"?0"});  // it is no worse than before
  script.order.check();
  script.order.live(9, "j");
  script.order.replayed(6, "g");
  script.order.replayed(7, "h");
  script.order.replayed(8, "i");
  script.order.replay_ended();
  EXPECT_EQ(script.take(), (Words{"?0", "forget", "+g", "+h", "+i", "+j"}));
  EXPECT_TRUE(script.order.known());
  script.order.check();
  EXPECT_EQ(script.take(), Words{"?9"});
}

TEST(EventOrder, ABatchThatCannotBeReadEndsWhatWasKnown) {
  Script script;
  script.begin({"a"});
  script.order.live(1, "bad");
  script.order.live(2, "c");
  EXPECT_EQ(script.take(), (Words{"+bad", "forget", "+c"}));
  EXPECT_NE(script.reason.find("batch 1 cannot be read"), std::string::npos) << script.reason;
}

TEST(EventOrder, WithoutReplaysAGapEndsWhatWasKnown) {
  Script script(false);
  script.order.connected();
  EXPECT_TRUE(script.order.known());
  script.order.live(5, "a");
  script.order.live(6, "b");
  script.order.live(8, "d");
  script.order.check();
  EXPECT_EQ(script.take(), (Words{"+a", "+b", "forget", "+d"}));
  EXPECT_NE(script.reason.find("batches 7 to 7"), std::string::npos) << script.reason;
  script.order.live(0, "A");
  EXPECT_EQ(script.take(), (Words{"forget", "+A"}));
  EXPECT_EQ(script.order.stats().restarts, 1u);
}

}  // namespace
}  // namespace baton::engine::kv_events
