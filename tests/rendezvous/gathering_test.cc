// The gathering in virtual time: generations, patience, duplicates, and what each rank is told.
#include "collectives/launch/gathering.h"
#include "tests/fails_with.h"

namespace baton::launch {

using collectives::kCollectivesVersion;
using collectives::RankInfo;
namespace {

using testing::HasSubstr;
using namespace std::chrono_literals;

class GatheringTest : public testing::Test {
 protected:
  RankInfo info(uint32_t rank, uint64_t generation = 0) const {
    RankInfo info{.rank = rank, .ranks = 3, .generation = generation};
    info.version = kCollectivesVersion;
    info.pid = 100 + rank;
    info.host = "node";
    return info;
  }
  void join(uint64_t connection, const RankInfo& info, Time patience = kNever, Time now = 0s) {
    gathering_.join(connection, {patience, info}, now, answers_);
  }
  // What the rank was told since the last call.
  absl::Status told(uint64_t connection) {
    for (auto at = answers_.begin(); at != answers_.end(); ++at) {
      if (at->connection != connection) continue;
      const auto messages = at->messages;
      answers_.erase(at);
      const auto first = must(decode_message(messages->front()));
      if (first.type == MessageType::kRefusal) return decode_refusal(first.body);
      EXPECT_EQ(3, messages->size());
      return absl::OkStatus();
    }
    return absl::NotFoundError("nothing");
  }

  Gathering gathering_{3};
  std::vector<Gathering::Answer> answers_;
};

TEST_F(GatheringTest, EverybodyGetsTheSameCardsWhenTheLastHasCome) {
  join(10, info(2));
  join(11, info(0));
  EXPECT_TRUE(answers_.empty());
  EXPECT_EQ(0, gathering_.next_generation());
  join(12, info(1));
  ASSERT_EQ(3, answers_.size());
  EXPECT_EQ(answers_[0].messages, answers_[2].messages);
  for (uint64_t connection : {10, 11, 12}) EXPECT_TRUE(told(connection).ok());
  EXPECT_EQ(1, gathering_.next_generation());
}

TEST_F(GatheringTest, APastGenerationAdmitsNoRank) {
  for (uint32_t rank : {0, 1, 2}) join(rank, info(rank));
  answers_.clear();
  join(5, info(1));
  EXPECT_THAT(told(5), fails_with(Code::kFailedPrecondition,
                                  {"generation 0 of this group is over", "rank 1"}));
}

TEST_F(GatheringTest, AHigherGenerationSendsTheWaitingAway) {
  join(1, info(0));
  join(2, info(1, 4));
  EXPECT_THAT(told(1), fails_with(Code::kFailedPrecondition, {"has begun generation 4"}));
  EXPECT_TRUE(answers_.empty());  // the other one waits
  EXPECT_EQ(4, gathering_.next_generation());
  join(3, info(0, 4));
  join(4, info(2, 4));
  for (uint64_t connection : {2, 3, 4}) EXPECT_TRUE(told(connection).ok());
}

TEST_F(GatheringTest, PatienceEndsForAllAtOnceAndNamesTheMissing) {
  join(1, info(1), 5s, 100s);
  join(2, info(0), 60s, 101s);
  EXPECT_EQ(Time(105s), gathering_.deadline());
  gathering_.expire(104s, answers_);
  EXPECT_TRUE(answers_.empty());
  gathering_.expire(105s, answers_);
  for (uint64_t connection : {1, 2}) {
    EXPECT_THAT(told(connection),
                fails_with(Code::kDeadlineExceeded,
                           {"rank 2 of 3 did not come to the rendezvous while rank 1 (pid 101"}));
  }
  EXPECT_EQ(kNever, gathering_.deadline());
}

TEST_F(GatheringTest, ALateRankHearsWhyTheFirstAttemptFailed) {
  RankInfo twin = info(0);
  twin.pid = 77;
  twin.host = "elsewhere";
  join(1, info(0));
  join(2, twin);
  for (uint64_t connection : {1, 2}) {
    EXPECT_THAT(told(connection),
                fails_with(Code::kInvalidArgument,
                           {"rank 0 came twice", "100 on node", "77 on elsewhere"}));
  }
  join(3, info(2), 1s, 0s);
  gathering_.expire(1s, answers_);
  EXPECT_THAT(told(3),
              fails_with(Code::kDeadlineExceeded, {"ranks 0-1 of 3", "rank 0 came twice"}));
}

TEST_F(GatheringTest, ADepartedRankIsForgotten) {
  join(1, info(0));
  gathering_.leave(1);
  join(2, info(0));
  EXPECT_TRUE(answers_.empty());
  EXPECT_EQ(2, *gathering_.waiting_as(info(0)));
  EXPECT_EQ(nullptr, gathering_.waiting_as(info(1)));
  EXPECT_EQ(nullptr, gathering_.waiting_as(info(0, 1)));
}

TEST_F(GatheringTest, DisagreementEndsTheAttemptForAll) {
  RankInfo version = info(1);
  version.version = kCollectivesVersion + 1;
  RankInfo ranks = info(1);
  ranks.ranks = 4;
  const RankInfo range = info(3);
  const std::string versions =
      absl::StrCat("speaks version ", kCollectivesVersion + 1,
                   " of the collectives, the rendezvous ", kCollectivesVersion);
  const struct {
    RankInfo bad;
    absl::StatusCode code;
    std::string says;
  } cases[] = {
      {version, absl::StatusCode::kFailedPrecondition, versions},
      {ranks, absl::StatusCode::kInvalidArgument, "expects 4 ranks"},
      {range, absl::StatusCode::kInvalidArgument, "rank 3 (pid 103 on node) is out of range"},
  };
  for (const auto& one : cases) {
    join(1, info(0));
    join(2, one.bad);
    for (uint64_t connection : {1, 2})
      EXPECT_THAT(told(connection), fails_with(one.code, {one.says}));
  }
}

TEST_F(GatheringTest, WithoutANumberTheFirstToComeDecides) {
  Gathering any(0);
  RankInfo two = info(0);
  two.ranks = 2;
  any.join(1, {kNever, two}, 0s, answers_);
  any.join(2, {kNever, info(1)}, 0s, answers_);
  for (uint64_t connection : {1, 2}) {
    EXPECT_THAT(told(connection), fails_with(Code::kInvalidArgument, {"expects 3 ranks"}));
  }
  for (uint32_t rank : {0, 1, 2}) any.join(rank, {kNever, info(rank)}, 0s, answers_);
  for (uint64_t connection : {0, 1, 2}) EXPECT_TRUE(told(connection).ok());
}

TEST(ListRanks, JoinsNeighboursAndEnds) {
  EXPECT_EQ("1", list_ranks({1}));
  EXPECT_EQ("1, 3-5, 9", list_ranks({1, 3, 4, 5, 9}));
  std::vector<uint32_t> odd;
  for (uint32_t rank = 1; rank < 100; rank += 2) odd.push_back(rank);
  EXPECT_THAT(list_ranks(odd), HasSubstr("31, and 34 more"));
}

TEST(RankInfo, SurvivesEncoding) {
  RankInfo info{.rank = 3, .ranks = 5, .generation = 1ull << 40, .version = 9, .pid = 77};
  info.host = "node";
  info.worker_address = "baton1:abc";
  info.payload = std::string("\0\1\2", 3);
  const std::string bytes = info.encode();
  const auto again = must(RankInfo::decode(bytes));
  EXPECT_EQ(bytes, again.encode());
  EXPECT_EQ(info.payload, again.payload);
  for (size_t cut = 0; cut < bytes.size(); ++cut) {
    EXPECT_FALSE(RankInfo::decode(bytes.substr(0, cut)).ok()) << cut;
  }
  EXPECT_FALSE(RankInfo::decode(bytes + "x").ok());
  info.host = "no\x1b[de";
  EXPECT_EQ("no?[de", RankInfo::decode(info.encode())->host);
}

}  // namespace
}  // namespace baton::launch
