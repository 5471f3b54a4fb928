// Which call a rank is in, and which group: what an all_to_all_v is told apart from, and a group
// that is made again.
#include "tests/communicator/group.h"
#include "tests/test.h"
#include "tests/until.h"

namespace baton {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// `count` elements between any two of two ranks.
absl::Status all_to_all_v(Communicator& comm, float* data, size_t count, DataType type) {
  std::vector<float> out(2 * count);
  const size_t counts[2] = {count, count}, at[2] = {0, count};
  const auto work = comm.all_to_all_v_async(data, counts, at, out.data(), counts, at, type);
  return work.ok() ? comm.wait(*work) : work.status();
}

class Calls : public testing::TestWithParam<std::string> {
 public:
  static void SetUpTestSuite() { setenv("BATON_FLIGHT_RECORDER", "none", 1); }

 protected:
  static CommunicatorOptions options(Time timeout = patient(std::chrono::seconds(30))) {
    CommunicatorOptions out = test_options(GetParam());
    out.timeout = timeout;
    return out;
  }
};

// Its messages go between two ranks each, and the others must know all the same which call it is.
TEST_P(Calls, AnAllToAllVAgainstAnotherCallIsToldWithBothNames) {
  struct Case {
    const char* name;
    std::function<absl::Status(Communicator&, float*)> call;
  };
  const Case cases[] = {
      {"all_reduce #2 of 100 f32",
       [](Communicator& comm, float* data) {
         return comm.all_reduce(data, data, 100, DataType::kF32, ReduceOp::kSum);
       }},
      {"broadcast #2 of 100 f32",  // one side of it gives, and may be through with it
       [](Communicator& comm, float* data) {
         return comm.broadcast(data, data, 100, DataType::kF32, 0);
       }},
      {"broadcast #2 of 100 f32",
       [](Communicator& comm, float* data) {
         return comm.broadcast(data, data, 100, DataType::kF32, 1);
       }},
      {"barrier #2", [](Communicator& comm, float*) { return comm.barrier(); }},
      {"all_to_all_v #2 of i32",
       [](Communicator& comm, float* data) {
         return all_to_all_v(comm, data, 10, DataType::kI32);
       }},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    run_group(2, options(), [&](Communicator& comm) {
      std::vector<float> data(1000);
      ASSERT_EQ(all_to_all_v(comm, data.data(), 10, DataType::kF32), absl::OkStatus());
      const absl::Status status = comm.rank() == 0
                                      ? all_to_all_v(comm, data.data(), 10, DataType::kF32)
                                      : c.call(comm, data.data());
      const absl::Status later = status.ok() ? comm.barrier() : status;
      EXPECT_TRUE(absl::IsInvalidArgument(later)) << later;
      EXPECT_THAT(text(later), AllOf(HasSubstr("disagree about call #2"), HasSubstr("rank 0"),
                                     HasSubstr("rank 1"), HasSubstr("all_to_all_v #2 of f32"),
                                     HasSubstr(c.name)));
    });
  }
}

TEST_P(Calls, AMessageOfAnAllToAllVIsNoReceivesMessage) {
  run_group(2, options(), [](Communicator& comm) {
    std::vector<float> data(100), token(10);
    const int other = 1 - comm.rank();
    // The receive is there before the messages of the all_to_all_v, and takes what comes later.
    auto receive = comm.receive_async(token.data(), 10, DataType::kF32, other);
    ASSERT_TRUE(receive.ok()) << receive.status();
    ASSERT_EQ(all_to_all_v(comm, data.data(), 10, DataType::kF32), absl::OkStatus());
    const std::vector<float> sent(10, 7);
    ASSERT_EQ(comm.send(sent.data(), 10, DataType::kF32, other), absl::OkStatus());
    ASSERT_EQ(comm.wait(*receive), absl::OkStatus());
    EXPECT_EQ(token, sent);
  });
}

TEST_P(Calls, TheRankMissingFromAnAllToAllVIsNamed) {
  DeadlineInRounds deadline;
  CommunicatorOptions own = options(std::chrono::seconds(2));
  own.worker.clock = &deadline.clock();
  run_group(2, own, [&deadline](Communicator& comm) {
    if (comm.rank() == 1) return deadline.stay_away(comm);
    std::vector<float> in(20), out(20);
    const size_t counts[2] = {10, 10}, at[2] = {0, 10};
    const auto work =
        comm.all_to_all_v_async(in.data(), counts, at, out.data(), counts, at, DataType::kF32);
    ASSERT_TRUE(work.ok()) << work.status();
    const absl::Status status = deadline.wait(comm, *work);
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
    EXPECT_THAT(text(status), AllOf(HasSubstr("all_to_all_v #1"), HasSubstr("rank 1"),
                                    HasSubstr("has not made this call")));
  });
}

// Promise(collectives): After an abort a new communicator needs a higher generation; an old one is
//   refused at once | the rendezvous counts generations
TEST_P(Calls, AfterAnAbortTheNextGenerationMeetsOverTheSameRendezvous) {
  auto server = collectives::RendezvousServer::start(test_key(), "", 0, 2);
  ASSERT_TRUE(server.ok()) << server.status();
  const auto rank = [&](int number) {
    std::vector<std::unique_ptr<Communicator>> kept;  // half of those that broke live on
    for (uint64_t generation = 0; generation < 4; ++generation) {
      SCOPED_TRACE(testing::Message() << "rank " << number << ", generation " << generation);
      CommunicatorOptions own = options();
      own.rank = number;
      own.ranks = 2;
      own.rendezvous = (*server)->address();
      if (generation > 0) {
        own.generation = generation - 1;
        const absl::Status old = Communicator::create(own).status();
        EXPECT_TRUE(absl::IsFailedPrecondition(old)) << old;
        EXPECT_THAT(text(old), AllOf(HasSubstr("is over"), HasSubstr("CommunicatorOptions"),
                                     HasSubstr(absl::StrCat("with ", generation, " or higher"))));
      }
      own.generation = generation;
      auto comm = Communicator::create(own);
      ASSERT_TRUE(comm.ok()) << comm.status();
      std::vector<float> data(100, 1);
      const absl::Status summed =
          (*comm)->all_reduce(data.data(), data.data(), 100, DataType::kF32, ReduceOp::kSum);
      // Rank 1 may hear of the abort in it.
      EXPECT_TRUE(summed.ok() || (number == 1 && absl::IsInternal(summed))) << summed;
      if (number == 0) (*comm)->abort(absl::InternalError("enough"));
      until([&] { return !(*comm)->status().ok(); }, [&] { (*comm)->progress(); });
      if (generation % 2 == 0) kept.push_back(*std::move(comm));
    }
  };
  std::thread other([&] { rank(1); });
  rank(0);
  other.join();
}

INSTANTIATE_TEST_SUITE_P(Providers, Calls, testing::Values("shm", "tcp"),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace baton
