// Sends and receives: tags, any source, several in flight, and what becomes of them when a rank
// goes.
#include <random>

#include "tests/communicator/group.h"
#include "tests/communicator/message_plan.h"
#include "tests/sanitized.h"
#include "tests/test.h"

namespace baton {
namespace {

constexpr auto kBytes = DataType::kU8;

class PointToPoint : public testing::TestWithParam<std::string> {
 public:
  static void SetUpTestSuite() { setenv("BATON_FLIGHT_RECORDER", "none", 1); }

 protected:
  static CommunicatorOptions options() { return test_options(GetParam()); }
};

void run_plan(Communicator& comm, const MessagePlan& plan, uint64_t seed) {
  const std::vector<PlannedCall>& calls = plan.calls(comm.rank());
  std::vector<std::unique_ptr<CallMemory>> memory;
  std::vector<Work> works;
  std::vector<int> sources(calls.size(), -1);
  for (const PlannedCall& call : calls) {
    memory.push_back(std::make_unique<CallMemory>(comm, call.message.bytes, call.registered));
    works.push_back(must(begin(comm, call, memory.back()->data())));
  }
  std::vector<size_t> order(calls.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
  for (size_t i : order) {
    ASSERT_EQ(comm.wait(works[i]), absl::OkStatus()) << i;
    sources[i] = comm.source_of(works[i]);
    EXPECT_EQ(sources[i] == -1, calls[i].sends);
  }
  MessagePlan::Checker checker;
  for (size_t i = 0; i < calls.size(); ++i) {
    if (!calls[i].sends) checker.check(calls[i], sources[i], memory[i]->data());
    if (testing::Test::HasFatalFailure()) return;
  }
}

// Promise(collectives): Messages of equal source and tag come in order, whole and once, whatever is
//   in flight beside them | random graphs with tags and any source against a model
TEST_P(PointToPoint, RandomGraphsGiveWhatAModelSays) {
  const auto rounds = static_cast<uint64_t>(rounds_of(9, 3));
  for (uint64_t seed = 1; seed <= rounds; ++seed) {
    SCOPED_TRACE(seed);
    const int ranks = 2 + static_cast<int>(seed % 3);
    const MessagePlan plan(seed, ranks, 60, 1 << 20);
    run_group(ranks, options(), [&](Communicator& comm) {
      run_plan(comm, plan, seed);
      if (testing::Test::HasFatalFailure()) return;
      EXPECT_EQ(comm.barrier(), absl::OkStatus());
    });
  }
}

// Promise(collectives): A receive takes messages of its tag only, and `kAnyRank` whichever comes
//   first | all of one kind wait while others pass
TEST_P(PointToPoint, AReceiveLeavesOtherTagsAlone) {
  run_group(3, options(), [](Communicator& comm) {
    CallOptions tag[2];
    tag[1].tag = 1;
    if (comm.rank() != 0) {
      const int32_t value = comm.rank();
      auto first = comm.send_async(&value, 1, DataType::kI32, 0, tag[0]);
      auto second = comm.send_async(&value, 1, DataType::kI32, 0, tag[1]);
      ASSERT_TRUE(first.ok() && second.ok());
      EXPECT_EQ(comm.wait(*second), absl::OkStatus());
      EXPECT_EQ(comm.wait(*first), absl::OkStatus());
      return;
    }
    for (int which : {1, 0}) {
      int32_t got[2] = {};
      int from[2] = {};
      for (int i = 0; i < 2; ++i) {
        auto work = must(comm.receive_async(&got[i], 1, DataType::kI32, kAnyRank, tag[which]));
        ASSERT_EQ(comm.wait(work), absl::OkStatus());
        from[i] = comm.source_of(work);
        EXPECT_EQ(from[i], got[i]);
      }
      EXPECT_EQ(from[0] + from[1], 3);
    }
  });
}

TEST_P(PointToPoint, AMessageOfAnAllToAllVIsNoReceivesMessage) {
  run_group(2, options(), [](Communicator& comm) {
    std::vector<float> data(20), out(20), token(10);
    const size_t counts[2] = {10, 10}, at[2] = {0, 10};
    const int other = 1 - comm.rank();
    // The receive is there before the messages of the all_to_all_v, and takes what comes later.
    auto receive = must(comm.receive_async(token.data(), 10, DataType::kF32, other));
    auto all = must(
        comm.all_to_all_v_async(data.data(), counts, at, out.data(), counts, at, DataType::kF32));
    ASSERT_EQ(comm.wait(all), absl::OkStatus());
    const std::vector<float> sent(10, 7);
    ASSERT_EQ(comm.send(sent.data(), 10, DataType::kF32, other), absl::OkStatus());
    ASSERT_EQ(comm.wait(receive), absl::OkStatus());
    EXPECT_EQ(token, sent);
  });
}

// Promise(collectives): Any number of sends waits for receives that come later, and for as long as
//   calls may take | a receive is what takes a send; no more is kept than the peer's packets
TEST_P(PointToPoint, TwoHundredSendsWaitForTheirReceives) {
  constexpr int kSends = 200;
  constexpr size_t kSize = 100 << 10;
  run_group(2, options(), [&](Communicator& comm) {
    CallMemory memory(comm, kSends * kSize, true);
    std::vector<Work> works;
    const auto begin = [&](int i) {
      std::byte* data = memory.data() + static_cast<size_t>(i) * kSize;
      works.push_back(must(comm.rank() == 0 ? comm.send_async(data, kSize, kBytes, 1)
                                            : comm.receive_async(data, kSize, kBytes, 0)));
    };
    for (int i = 0; comm.rank() == 0 && i < kSends; ++i) {
      std::memset(memory.data() + static_cast<size_t>(i) * kSize, i, kSize);
      begin(i);
    }
    ASSERT_EQ(comm.barrier(), absl::OkStatus());  // collectives go on meanwhile
    for (int i = 0; comm.rank() == 1 && i < kSends; ++i) begin(i);
    for (Work work : works) ASSERT_EQ(comm.wait(work), absl::OkStatus());
    for (size_t i = 0; i < kSends * kSize; ++i) {
      ASSERT_EQ(memory.data()[i], static_cast<std::byte>(i / kSize)) << i;
    }
  });
}

// Promise(collectives): No byte of a receive moves once its call has reported an error | grants are
//   revoked before it returns
TEST_P(PointToPoint, NothingIsWrittenAfterAnAbortInTheMiddle) {
  constexpr size_t kSize = 4 << 20;
  std::atomic<int> ended{0};
  const auto rounds = static_cast<int>(rounds_of(6, 2));
  for (int round = 0; round < rounds; ++round) {
    ended = 0;
    run_group(2, options(), [&](Communicator& comm) {
      CallMemory memory(comm, 4 * kSize, true);
      std::memset(memory.data(), comm.rank() == 0 ? 1 : 0, 4 * kSize);
      comm.barrier().IgnoreError();  // both are there; the other may have aborted already
      std::vector<Work> works;
      for (size_t i = 0; i < 4; ++i) {
        std::byte* data = memory.data() + i * kSize;
        auto work = comm.rank() == 0 ? comm.send_async(data, kSize, kBytes, 1)
                                     : comm.receive_async(data, kSize, kBytes, 0);
        if (!work.ok()) break;  // the other has aborted
        works.push_back(*work);
      }
      for (int turn = 0; turn < 3 + 8 * round; ++turn) comm.progress();
      if (comm.rank() == round % 2) comm.abort(absl::CancelledError("enough"));
      for (Work work : works) comm.wait(work).IgnoreError();
      // Both are here before either looks: whoever still moved bytes would be seen.
      std::memset(memory.data(), 7, 4 * kSize);
      ++ended;
      until([&] { return ended >= 2; }, [&] { comm.progress(); });
      for (int turn = 0; turn < 200; ++turn) comm.worker().progress();
      const std::vector<std::byte> wanted(4 * kSize, std::byte{7});
      EXPECT_EQ(std::memcmp(memory.data(), wanted.data(), wanted.size()), 0) << "round " << round;
      ++ended;
      until([&] { return ended >= 4; });
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Providers, PointToPoint, testing::Values("shm", "tcp"),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace baton
