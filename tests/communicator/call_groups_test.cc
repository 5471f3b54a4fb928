// Several calls that are waited for as one: Communicator::group_begin(), group_end().
#include "tests/communicator/group.h"
#include "tests/fails_with.h"
#include "tests/test.h"
#include "tests/until.h"

namespace baton {
namespace {

using testing::HasSubstr;

constexpr int kRanks = 3;

class CallGroups : public testing::TestWithParam<const char*> {
 public:
  static void SetUpTestSuite() { setenv("BATON_FLIGHT_RECORDER", "none", 1); }
};
INSTANTIATE_TEST_SUITE_P(Over, CallGroups, testing::Values("shm", "tcp"),
                         [](const auto& test) { return std::string(test.param); });

absl::StatusOr<Work> sum(Communicator& comm, std::vector<int32_t>& data, Work group = {}) {
  return comm.all_reduce_async(data.data(), data.data(), data.size(), DataType::kI32,
                               ReduceOp::kSum, {.group = group});
}

// Promise(collectives): Calls of a group are waited for by one Work, which ends when all of them
//   have | calls of several kinds and from two threads, at ranks that group them otherwise
TEST_P(CallGroups, OneWorkEndsWithAllOfThem) {
  run_group(kRanks, test_options(GetParam()), [](Communicator& comm) {
    const int rank = comm.rank(), right = (rank + 1) % kRanks, left = (rank + kRanks - 1) % kRanks;
    for (int turn = 0; turn < 50; ++turn) {
      std::vector<int32_t> mine(1000, rank), theirs(1000, -1), sums(70'000, 1), none(3, rank);
      const auto group = must(comm.group_begin());
      const CallOptions in_it{.group = group};
      // Rank 0 has the sum in no group.
      const auto summed = must(sum(comm, sums, rank == 0 ? Work{} : group));
      const auto from_any =
          must(comm.receive_async(theirs.data(), 1000, DataType::kI32, kAnyRank, in_it));
      std::thread([&] {
        const auto sent = comm.send_async(mine.data(), 1000, DataType::kI32, right, in_it);
        EXPECT_TRUE(sent.ok()) << sent.status();
      }).join();
      EXPECT_TRUE(absl::IsFailedPrecondition(comm.wait(group))) << "it may yet get calls";
      EXPECT_TRUE(comm.group_end(group).ok());
      EXPECT_EQ(comm.wait(group), absl::OkStatus());
      EXPECT_EQ(theirs, std::vector<int32_t>(1000, left));
      EXPECT_EQ(comm.source_of(from_any), left);
      if (rank == 0) {
        EXPECT_TRUE(comm.wait(summed).ok());
      }
      EXPECT_EQ(sums, std::vector<int32_t>(70'000, kRanks));
      EXPECT_TRUE(absl::IsNotFound(comm.wait(group))) << "its end was told";
      EXPECT_TRUE(comm.barrier().ok());
    }
  });
}

TEST_P(CallGroups, WithoutCallsItEndsAtOnce) {
  run_group(1, test_options(GetParam()), [](Communicator& comm) {
    const auto group = must(comm.group_begin());
    ASSERT_TRUE(comm.group_end(group).ok());
    const auto over = comm.test(group);
    ASSERT_TRUE(over.has_value());
    EXPECT_TRUE(over->ok()) << *over;
  });
}

TEST_P(CallGroups, WhatIsRefusedIsInNoGroupAndBreaksNothing) {
  run_group(2, test_options(GetParam()), [](Communicator& comm) {
    std::vector<int32_t> data(10, 1);
    const auto group = must(comm.group_begin());
    const auto bad =
        comm.send_async(nullptr, 10, DataType::kI32, 1 - comm.rank(), {.group = group});
    EXPECT_TRUE(absl::IsInvalidArgument(bad.status())) << bad.status();
    ASSERT_TRUE(comm.group_end(group).ok());
    EXPECT_TRUE(absl::IsInvalidArgument(comm.group_end(group))) << "twice";
    EXPECT_TRUE(absl::IsInvalidArgument(comm.group_end(Work{}))) << "none";
    for (const Work closed : {group, Work{group.sequence + 1000}}) {
      const auto late = sum(comm, data, closed);
      EXPECT_THAT(late.status(), fails_with(Code::kInvalidArgument, {"no open group"}));
      const auto send =
          comm.send_async(data.data(), 10, DataType::kI32, 1 - comm.rank(), {.group = closed});
      EXPECT_TRUE(absl::IsInvalidArgument(send.status())) << send.status();
    }
    EXPECT_TRUE(comm.wait(group).ok());
    const auto after = must(sum(comm, data));
    EXPECT_TRUE(comm.wait(after).ok());
    EXPECT_EQ(data, std::vector<int32_t>(10, 2));
  });
}

// Promise(collectives): A group ends when the callbacks of its calls have returned | one that runs
//   in the background for longer
TEST_P(CallGroups, EndBehindTheCallbacksOfTheirCalls) {
  CommunicatorOptions options = test_options(GetParam());
  options.background = true;
  run_group(2, options, [](Communicator& comm) {
    struct Slow {
      std::atomic<bool> called{false}, let_go{false}, over{false};
      static void on_end(void* context, Work /*work*/, const absl::Status& /*status*/) {
        auto& self = *static_cast<Slow*>(context);
        self.called = true;
        until([&] { return self.let_go.load(); });
        self.over = true;
      }
    } slow;
    std::vector<int32_t> data(10, 1);
    const auto group = must(comm.group_begin());
    must(comm.all_reduce_async(data.data(), data.data(), data.size(), DataType::kI32,
                               ReduceOp::kSum,
                               {.on_end = Slow::on_end, .context = &slow, .group = group}));
    ASSERT_TRUE(comm.group_end(group).ok());
    until([&] { return slow.called.load(); });
    for (int i = 0; i < 100; ++i) EXPECT_FALSE(comm.test(group).has_value());
    slow.let_go = true;
    EXPECT_TRUE(comm.wait(group).ok());
    EXPECT_TRUE(slow.over);
    EXPECT_TRUE(comm.barrier().ok());
  });
}

TEST_P(CallGroups, BlockingCallsAreInNone) {
  run_group(2, test_options(GetParam()), [](Communicator& comm) {
    int32_t one = 1;
    const auto group = must(comm.group_begin());
    const CallOptions in_it{.group = group};
    EXPECT_TRUE(absl::IsInvalidArgument(
        comm.all_reduce(&one, &one, 1, DataType::kI32, ReduceOp::kSum, in_it)));
    EXPECT_TRUE(
        absl::IsInvalidArgument(comm.send(&one, 1, DataType::kI32, 1 - comm.rank(), in_it)));
    EXPECT_TRUE(comm.group_end(group).ok());
    EXPECT_TRUE(comm.wait(group).ok());
    EXPECT_TRUE(comm.barrier().ok());
  });
}

// A group that is left open is no call in flight.
TEST_P(CallGroups, LeftOpenTheyGoWithTheirCommunicator) {
  for (int turn = 0; turn < 20; ++turn) {
    run_group(3, test_options(GetParam()), [](Communicator& comm) {
      std::vector<int32_t> data(100'000, 1);
      ASSERT_TRUE(comm.group_begin().ok());
      EXPECT_EQ(comm.broadcast(data.data(), data.data(), data.size(), DataType::kI32, 0),
                absl::OkStatus());
    });
  }
}

TEST_P(CallGroups, EndWithTheErrorOfTheirCalls) {
  run_group(2, test_options(GetParam()), [](Communicator& comm) {
    std::vector<int32_t> data(10, 1);
    const auto open = comm.group_begin(), ended = comm.group_begin();
    ASSERT_TRUE(open.ok() && ended.ok());
    for (const Work group : {*open, *ended}) {
      // Which the other rank never sends.
      must(comm.receive_async(data.data(), 10, DataType::kI32, 1 - comm.rank(),
                              {.tag = 7, .group = group}));
    }
    ASSERT_TRUE(comm.group_end(*ended).ok());
    EXPECT_FALSE(comm.test(*ended).has_value());
    comm.barrier().IgnoreError();  // the abort may come into it
    if (comm.rank() == 0) comm.abort(absl::CancelledError("enough of this"));
    const absl::Status why = comm.wait(*ended);
    EXPECT_THAT(text(why), HasSubstr("enough of this"));
    EXPECT_TRUE(comm.group_end(*open).ok());
    EXPECT_THAT(text(comm.wait(*open)), HasSubstr("enough of this"));
    EXPECT_FALSE(comm.group_begin().ok());
  });
}

}  // namespace
}  // namespace baton
