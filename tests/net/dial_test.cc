// The addresses of a peer in turns, and which answers count.
#include "transport/net/dial.h"
#include "tests/test.h"

namespace baton::net {
namespace {

using std::chrono::seconds;
constexpr Time kPatience = seconds(8);
constexpr absl::StatusCode kNothing = absl::StatusCode::kUnavailable;

Dial dial_of(std::string_view addresses, Resume resume) {
  Dial dial;
  dial.resume = resume;
  dial.endpoints = *literal(addresses);
  return dial;
}
std::string tried(const Dial& dial) { return dial.endpoints[dial.next - 1].text(); }
Endpoint at(std::string_view address) { return literal(address)->front(); }

// Calls one after the other until there is none left; `answer` may be OK: silence.
std::string run(Dial& dial, const std::function<absl::Status(const std::string&)>& answer) {
  std::string all;
  Time now = seconds(100);
  while (dial.advance(now, kPatience)) {
    const std::string whom = tried(dial);
    all += whom + " ";
    const absl::Status status = answer(whom);
    if (status.ok()) {
      now = std::min(dial.patience_ends(now, kPatience), now + kPatience);
      if (dial.endpoints.size() > 1) dial.silent();
      dial.note(absl::UnavailableError("silent"));
    } else {
      dial.note(status);
    }
  }
  return all;
}

// Promise(network): A peer with several addresses is reached in time although some are silent or
//   lead elsewhere | a silent address is left after a quarter of the patience
TEST(Dials, ASilentAddressLeavesTimeForTheOthersAndIsCalledAgain) {
  Dial dial = dial_of("10.0.0.1:7,10.0.0.2:7", Resume::kNew);
  EXPECT_EQ(run(dial, [](auto&) { return absl::OkStatus(); }),
            "10.0.0.1:7 10.0.0.2:7 10.0.0.1:7 10.0.0.2:7 ");
  EXPECT_EQ(dial.verdict(), kNothing);
}

TEST(Dials, ARefusalIsNotRetried) {
  Dial dial = dial_of("10.0.0.1:7,10.0.0.2:7", Resume::kNew);
  EXPECT_EQ(run(dial,
                [](const std::string& whom) {
                  return whom == "10.0.0.1:7" ? absl::NotFoundError("nobody") : absl::OkStatus();
                }),
            "10.0.0.1:7 10.0.0.2:7 10.0.0.2:7 10.0.0.2:7 10.0.0.2:7 ");
}

TEST(Dials, WhereAPeerAnsweredAQuestionIsOneOfItsAddresses) {
  Dial dial = dial_of("10.0.0.1:7,10.0.0.2:7", Resume::kNew);
  dial.answered_at(at("192.0.2.1:9000"));
  ASSERT_TRUE(dial.advance(seconds(1), kPatience));
  EXPECT_EQ(dial.patience_ends(seconds(1), kPatience), seconds(1) + kPatience / 16)
      << "another one is known to answer";
  EXPECT_EQ(run(dial, [](auto& whom) { return absl::NotFoundError(whom); }),
            "10.0.0.2:7 192.0.2.1:9000 ");
  EXPECT_EQ(dial.verdict(), absl::StatusCode::kNotFound);

  // Met there, further connections go there alone.
  dial = dial_of("10.0.0.1:7", Resume::kNew);
  dial.answered_at(at("192.0.2.1:9000"));
  ASSERT_TRUE(dial.advance(seconds(1), kPatience));
  dial.note(absl::NotFoundError("nobody"));
  ASSERT_TRUE(dial.advance(seconds(1), kPatience));
  EXPECT_EQ(dial.patience_ends(seconds(1), kPatience), seconds(1) + kPatience / 4);
  dial.met();
  ASSERT_EQ(dial.endpoints.size(), 1u);
  EXPECT_EQ(tried(dial), "192.0.2.1:9000");

  // One that the peer names too changes nothing.
  dial = dial_of("10.0.0.1:7,10.0.0.2:7", Resume::kNew);
  dial.answered_at(at("10.0.0.2:7"));
  ASSERT_TRUE(dial.advance(seconds(1), kPatience));
  EXPECT_EQ(dial.patience_ends(seconds(1), kPatience), seconds(1) + kPatience / 4);
  dial.met();
  EXPECT_EQ(dial.endpoints.size(), 2u);
}

TEST(Dials, ThePlaceWhereAPeerWasMetIsCalledFirst) {
  Dial dial = dial_of("10.0.0.1:7,10.0.0.2:7", Resume::kOurs);
  dial.met_at(at("10.0.0.2:40000"));
  ASSERT_TRUE(dial.advance(seconds(1), kPatience));
  EXPECT_EQ(tried(dial), "10.0.0.2:7");
  EXPECT_EQ(dial.endpoints.size(), 2u);
}

TEST(Dials, APeerThatHasMovedIsCalledWhereItCalledFrom) {
  Dial dial = dial_of("10.0.0.1:7", Resume::kOurs);
  dial.met_at(at("10.0.0.9:40000"));
  EXPECT_EQ(run(dial, [](auto&) { return absl::NotFoundError("nobody"); }),
            "10.0.0.9:7 10.0.0.1:7 ");
  // Behind a translation of addresses, 10.0.0.9 is another host; and 10.0.0.1 may be, by now.
  EXPECT_EQ(dial.verdict(), kNothing);
}

TEST(Dials, OnlyANoFromWhereThePeerWasCounts) {
  for (const absl::Status& no : {absl::NotFoundError("nobody"), absl::PermissionDeniedError("key"),
                                 absl::FailedPreconditionError("another worker")}) {
    for (const std::string who : {"10.0.0.1:7", "172.17.0.1:7"}) {
      Dial dial = dial_of("10.0.0.1:7,172.17.0.1:7", Resume::kOurs);
      dial.met_at(at("10.0.0.1:7"));
      run(dial, [&](const std::string& whom) { return whom == who ? no : absl::OkStatus(); });
      EXPECT_EQ(dial.verdict(), who == "10.0.0.1:7" ? no.code() : kNothing) << who << no;
    }
  }
}

TEST(Dials, WhereItWasMetIsNotKnownANoFromEverywhereCounts) {
  for (const bool everywhere : {true, false}) {
    Dial dial = dial_of("10.0.0.1:7,172.17.0.1:7", Resume::kTheirs);
    run(dial, [&](const std::string& whom) {
      return everywhere || whom == "172.17.0.1:7" ? absl::NotFoundError("nobody")
                                                  : absl::OkStatus();
    });
    EXPECT_EQ(dial.verdict(), everywhere ? absl::StatusCode::kNotFound : kNothing);
  }
}

// Calls in the order in which they are made; `answer` says from which size of segments on an
// address answers in full, -1: never anything.
std::string run_narrow(Dial& dial, const std::function<int(const std::string&)>& largest) {
  std::string all;
  Time now = seconds(100);
  while (dial.advance(now, kPatience)) {
    const int segment = dial.segment() == 0 ? 1460 : dial.segment();
    absl::StrAppend(&all, tried(dial), "/", dial.segment(), " ");
    const int most = largest(tried(dial));
    if (segment <= most) return all + "met";
    if (most >= 0) {
      dial.narrow();
    } else {
      dial.silent();
    }
    now += kPatience / 8;
    dial.note(absl::UnavailableError("nothing"));
  }
  return all + "failed";
}

TEST(Dials, APeerDeafToLargePacketsIsCalledWithSmallerOnes) {
  for (const auto& [most, calls] : std::vector<std::pair<int, std::string>>{
           {1460, "10.0.0.1:7/0 met"},
           {1300, "10.0.0.1:7/0 10.0.0.1:7/1220 met"},
           {600, "10.0.0.1:7/0 10.0.0.1:7/1220 10.0.0.1:7/536 met"},
           {100, "10.0.0.1:7/0 10.0.0.1:7/1220 10.0.0.1:7/536 failed"}}) {
    Dial dial = dial_of("10.0.0.1:7", Resume::kNew);
    EXPECT_EQ(run_narrow(dial, [most = most](auto&) { return most; }), calls);
  }
}

TEST(Dials, AnAddressThatAnswersInFullIsTakenBeforeOneThatDoesNot) {
  Dial dial = dial_of("10.0.0.1:7,10.0.0.2:7", Resume::kNew);
  EXPECT_EQ(run_narrow(dial, [](auto& whom) { return whom == "10.0.0.1:7" ? 600 : 1460; }),
            "10.0.0.1:7/0 10.0.0.2:7/0 met");
}

TEST(Dials, OnlyThoseThatAnsweredAreCalledWithSmallerPackets) {
  Dial dial = dial_of("10.0.0.1:7,10.0.0.2:7", Resume::kNew);
  EXPECT_EQ(run_narrow(dial, [](auto& whom) { return whom == "10.0.0.1:7" ? -1 : 1300; }),
            "10.0.0.1:7/0 10.0.0.2:7/0 10.0.0.2:7/1220 met");
}

TEST(Dials, ASilentPeerIsRetriedWithFullPacketsAfterSmallOnes) {
  Dial dial = dial_of("10.0.0.1:7,10.0.0.2:7", Resume::kNew);
  int calls = 0;
  EXPECT_EQ(run_narrow(dial,
                       [&](auto& whom) {
                         if (whom == "10.0.0.2:7") return 100;
                         return ++calls == 1 ? -1 : 1460;
                       }),
            "10.0.0.1:7/0 10.0.0.2:7/0 10.0.0.2:7/1220 10.0.0.2:7/536 10.0.0.1:7/0 met");
}

TEST(Dials, FullPacketsOnlyDisablesSmallerOnes) {
  Dial dial = dial_of("10.0.0.1:7", Resume::kOurs);
  dial.full_only = true;
  EXPECT_EQ(run_narrow(dial, [](auto&) { return 600; }), "10.0.0.1:7/0 failed");
}

}  // namespace
}  // namespace baton::net
