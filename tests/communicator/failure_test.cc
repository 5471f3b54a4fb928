// Nothing hangs silently: who died, stopped, is late, left, called something else or gave up is
// named at every survivor.
#include "collectives/window.h"
#include "tests/communicator/group.h"
#include "tests/communicator/processes.h"
#include "tests/fails_with.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"
#include "tests/until.h"

namespace baton {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// An environment variable, for as long as this lives.
class ChangedVariable {
 public:
  ChangedVariable(const char* name, const std::string& value) : name_(name) {
    if (const char* was = std::getenv(name)) was_ = was;
    setenv(name, value.c_str(), 1);
  }
  ~ChangedVariable() {
    if (was_) {
      setenv(name_, was_->c_str(), 1);
    } else {
      unsetenv(name_);
    }
  }

 private:
  const char* name_;
  std::optional<std::string> was_;
};

class Failure : public testing::TestWithParam<std::string> {
 protected:
  static CommunicatorOptions options(Time timeout = patient(std::chrono::seconds(30))) {
    CommunicatorOptions out = test_options(GetParam());
    out.timeout = timeout;
    return out;
  }

 private:
  // A call's error names its record, the state of the communicator does not: without, they are
  // equal.
  const ChangedVariable no_records_{"BATON_FLIGHT_RECORDER", "none"};
};

absl::Status sum(Communicator& comm, size_t count, float* result = nullptr,
                 Time timeout = Time::zero()) {
  std::vector<float> data(count, static_cast<float>(comm.rank() + 1));
  CallOptions call;
  call.timeout = timeout;
  absl::Status status =
      comm.all_reduce(data.data(), data.data(), count, DataType::kF32, ReduceOp::kSum, call);
  if (result != nullptr && count > 0) *result = data[count - 1];
  return status;
}

bool has(const absl::Status& status, std::string_view part) {
  return text(status).find(part) != std::string::npos;
}

TEST_P(Failure, AKilledRankIsNamedAndTheOthersGoOnWithoutIt) {
  run_processes(3, options(), {1}, [](Communicator& comm) -> std::string {
    if (absl::Status status = sum(comm, 10000); !status.ok()) return status.ToString();
    // It dies when the others are done with the first call.
    float token = 0;
    for (int other : {0, 2}) {
      if (comm.rank() == 1) {
        if (!comm.receive(&token, 1, DataType::kF32, other).ok()) return "no token";
      } else if (comm.rank() == other) {
        comm.send(&token, 1, DataType::kF32, 1).IgnoreError();  // it may die before it says thanks
      }
    }
    if (comm.rank() == 1) raise(SIGKILL);
    const absl::Status status = sum(comm, 10000);
    if (!absl::IsUnavailable(status)) return "not Unavailable: " + status.ToString();
    if (!has(status, "rank 1")) return "does not name rank 1: " + status.ToString();
    if (comm.status() != status) return "status() says something else";
    if (comm.lost_ranks() != std::vector<int>{1}) return "lost_ranks() is wrong";
    if (comm.barrier() != status) return "later calls do not fail alike";
    auto left = comm.shrink();
    if (!left.ok()) return "shrink: " + left.status().ToString();
    if ((*left)->ranks() != 2 || (*left)->rank() != (comm.rank() == 0 ? 0 : 1)) {
      return "wrong ranks after shrink";
    }
    float result = 0;
    if (absl::Status again = sum(**left, 70000, &result); !again.ok()) return again.ToString();
    return result == 3 ? "" : "wrong sum after shrink";
  });
}

// Promise(collectives): A rank that is killed ends puts to it and waits for its signals | they are
//   works of the communicator, which ends them all
TEST_P(Failure, AKilledRankEndsWhatIsUnderWayInWindows) {
  run_processes(3, options(), {1}, [](Communicator& comm) -> std::string {
    constexpr size_t kBytes = 32 << 20;
    auto window = Window::allocate(comm, kBytes);
    if (!window.ok()) return window.status().ToString();
    if (absl::Status status = comm.barrier(); !status.ok()) return status.ToString();
    std::vector<char> data(kBytes);
    std::vector<Work> works;
    for (const auto& work : {(*window)->wait_signal(1, 0, 1), (*window)->flush(1),
                             (*window)->put(data.data(), kBytes, 1, 0)}) {
      if (work.ok()) works.push_back(*work);
    }
    if (comm.rank() == 1) {
      for (int turn = 0; turn < 20; ++turn) comm.progress();
      raise(SIGKILL);
    }
    for (const Work work : works) {
      const absl::Status status = comm.wait(work);
      if (status.ok() && work.sequence != works[0].sequence) continue;  // was over
      if (!absl::IsUnavailable(status)) return "not Unavailable: " + status.ToString();
      if (!has(status, "rank 1")) return "rank 1 is not named: " + status.ToString();
    }
    const absl::Status later = (*window)->signal(2 - comm.rank(), 0, 1).status();
    return absl::IsUnavailable(later) ? "" : "a signal goes on: " + later.ToString();
  });
}

// Promise(collectives): A group with mask_lost goes on with its windows when a rank is killed, and
//   breaks when a call that needs all ranks begins | accesses to that rank alone end
TEST_P(Failure, AGroupThatMasksLostRanksGoesOnWithItsWindows) {
  run_processes(3, options(), {1}, [](Communicator& comm) -> std::string {
    GroupOptions masks;
    masks.mask_lost = true;
    const auto group = comm.subgroup({0, 1, 2}, masks);
    if (!group.ok()) return group.status().ToString();
    const auto window = Window::allocate(**group, 64);
    if (!window.ok()) return window.status().ToString();
    const auto ended = [&](const absl::StatusOr<Work>& work) {
      return work.ok() ? (*group)->wait(*work) : work.status();
    };
    // It dies when the others have their windows.
    if (comm.rank() == 1) {
      for (const int other : {0, 2}) ended((*window)->wait_signal(other, 0, 1)).IgnoreError();
      raise(SIGKILL);
    }
    ended((*window)->signal(1, 0, 1)).IgnoreError();  // it may die before it says thanks
    const absl::Status gone = ended((*window)->wait_signal(1, 0, 1));
    if (!absl::IsUnavailable(gone)) return "not Unavailable: " + gone.ToString();
    if (!(*group)->status().ok()) return "broken: " + (*group)->status().ToString();
    if ((*group)->lost_ranks() != std::vector<int>{1}) return "lost_ranks() is wrong";
    const uint64_t word = 7;
    const int other = 2 - comm.rank();
    for (const absl::Status& status : {ended((*window)->put_signal(&word, 8, other, 0, 0, 1)),
                                       ended((*window)->wait_signal(other, 0, 1))}) {
      if (!status.ok()) return status.ToString();
    }
    if ((*window)->data()[0] != std::byte{7}) return "nothing was put";
    // What breaks the group ends accesses of others: they come first.
    if (comm.rank() == 2) {
      ended((*window)->signal(0, 0, 1)).IgnoreError();  // the group may be broken before its end
      return "";
    }
    const absl::Status last = ended((*window)->wait_signal(2, 0, 2));
    if (!last.ok()) return last.ToString();
    const absl::Status all = (*group)->barrier();
    if (!absl::IsUnavailable(all)) return "a barrier: " + all.ToString();
    return (*group)->status().ok() ? "the group is not broken" : "";
  });
}

TEST_P(Failure, AReceiveEndsWhenItsRankIsKilledOrStopped) {
  for (const int how : {SIGKILL, SIGSTOP}) {
    const bool killed = how == SIGKILL;
    run_processes(killed ? 3 : 2, options(), {1}, [&](Communicator& comm) -> std::string {
      constexpr size_t kCount = 4 << 20;
      std::vector<float> data(kCount);
      if (comm.rank() == 1) {
        auto work = comm.send_async(data.data(), kCount, DataType::kF32, 0);
        if (!work.ok()) return work.status().ToString();
        for (int turn = 0; turn < 20; ++turn) comm.progress();
        raise(how);
      }
      CallOptions other;  // rank 0 may get what rank 1 has sent, and then one more
      other.tag = 1;
      if (!killed) other.timeout = std::chrono::seconds(1);
      const absl::Status status =
          comm.receive(data.data(), kCount, DataType::kF32, killed ? kAnyRank : 1, other);
      if (killed ? !absl::IsUnavailable(status) : !absl::IsDeadlineExceeded(status)) {
        return "another error: " + status.ToString();
      }
      for (const char* part : {"rank 1", killed ? "" : "does not answer"}) {
        if (!has(status, part)) return std::string(part) + " is missing: " + status.ToString();
      }
      return "";
    });
  }
}

TEST_P(Failure, AStoppedRankIsNamedAtTheDeadline) {
  run_processes(3, options(), {2}, [](Communicator& comm) -> std::string {
    if (absl::Status status = sum(comm, 100); !status.ok()) return status.ToString();
    if (comm.rank() == 2) raise(SIGSTOP);
    // A quarter of it, or a second, is left for the answer of the other one that lives.
    const absl::Status status = sum(comm, 100, nullptr, std::chrono::seconds(4));
    if (!absl::IsDeadlineExceeded(status)) return "not DeadlineExceeded: " + status.ToString();
    for (const char* part : {"rank 2", "does not answer", "all_reduce #2", "chunk 1"}) {
      if (!has(status, part)) return std::string(part) + " is missing: " + status.ToString();
    }
    return "";
  });
}

TEST_P(Failure, ALateRankIsNamedAndWhatItDid) {
  using Begin = std::function<absl::StatusOr<Work>(Communicator&, float*)>;
  const std::pair<Begin, std::vector<const char*>> cases[] = {
      {[](Communicator& comm, float* data) {
         return comm.all_reduce_async(data, data, 100, DataType::kF32, ReduceOp::kSum);
       },
       {"rank 1", "has not made this call", "all_reduce #1"}},
      {[](Communicator& comm, float* data) {
         const size_t counts[2] = {10, 10}, at[2] = {0, 10};
         return comm.all_to_all_v_async(data, counts, at, data + 50, counts, at, DataType::kF32);
       },
       {"rank 1", "has not made this call", "all_to_all_v #1"}},
      {[](Communicator& comm, float* data) {
         return comm.receive_async(data, 1, DataType::kF32, kAnyRank);
       },
       {"waits for any rank", "No rank has sent"}}};
  for (const auto& [begin, says] : cases) {
    DeadlineInRounds deadline;
    CommunicatorOptions own = options(std::chrono::seconds(2));
    own.worker.clock = &deadline.clock();
    run_group(2, own, [&, begin = begin, says = says](Communicator& comm) {
      if (comm.rank() == 1) {
        deadline.stay_away(comm);
        EXPECT_THAT(text(comm.status()), HasSubstr("rank 0"));
        return;
      }
      std::vector<float> data(100);
      const auto work = must(begin(comm, data.data()));
      const absl::Status status = deadline.wait(comm, work);
      EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
      for (const char* part : says) EXPECT_THAT(text(status), HasSubstr(part));
    });
  }
}

// Two calls that differ in their options alone must not be shown as one.
TEST_P(Failure, WhatOptionsMadeDifferentIsSaid) {
  run_group(2, options(), [](Communicator& comm) {
    std::vector<float> data(100000);
    CallOptions call{.algorithm = Algorithm::kRing};
    call.channels = comm.rank() == 0 ? 1 : 2;
    EXPECT_THAT(comm.all_reduce(data.data(), data.data(), data.size(), DataType::kF32,
                                ReduceOp::kSum, call),
                fails_with(Code::kInvalidArgument, {"1 channels", "2 channels"}));
  });
}

TEST_P(Failure, AbortFromAnyThreadEndsCallsEverywhere) {
  run_group(2, options(), [](Communicator& comm) {
    const absl::Status met = comm.barrier();  // rank 1 may hear of the abort in it
    if (comm.rank() == 0) {
      ASSERT_EQ(met, absl::OkStatus());
      std::vector<float> data(1000);
      auto work = must(
          comm.all_reduce_async(data.data(), data.data(), 1000, DataType::kF32, ReduceOp::kSum));
      std::thread other([&] { comm.abort(absl::InternalError("enough")); });
      const absl::Status status = comm.wait(work);
      other.join();
      EXPECT_THAT(status, fails_with(Code::kInternal, {"rank 0", "abort()", "enough"}));
    } else {
      until([&] { return !comm.status().ok(); }, [&] { comm.progress(); });
      EXPECT_THAT(text(comm.status()), AllOf(HasSubstr("rank 0"), HasSubstr("enough")));
    }
  });
}

// The root has all that it needs and leaves before the other rank has looked: the acknowledgement
// and the goodbye come in one round there.
// Promise(collectives): A rank that has what it needs may leave; the others' call does not fail for
//   it | what arrived is used before the end counts
TEST_P(Failure, ARankThatLeavesAfterTheCallFailsNoOtherRank) {
  const CommunicatorOptions group = test_options(GetParam());
  auto server = *collectives::RendezvousServer::start(*group.worker.key, "", 0, 2);
  std::atomic<bool> summed{false}, gone{false};
  const auto make = [&](int rank) {
    CommunicatorOptions own = group;
    own.rank = rank;
    own.ranks = 2;
    own.rendezvous = server->address();
    return Communicator::create(own);
  };
  std::thread root = rank_thread(0, [&] {
    auto comm = must(make(0));
    std::vector<float> in(100, 1), out(100);
    EXPECT_EQ(comm->reduce(in.data(), out.data(), 100, DataType::kF32, ReduceOp::kSum, 0),
              absl::OkStatus());
    EXPECT_EQ(out[0], 3);
    summed = true;
    comm.reset();
    gone = true;
  });
  auto comm = must(make(1));
  std::vector<float> in(100, 2), out(100);
  auto work =
      must(comm->reduce_async(in.data(), out.data(), 100, DataType::kF32, ReduceOp::kSum, 0));
  std::optional<absl::Status> ended;
  while (!summed) {  // seldom enough to miss how the root leaves
    if (!ended.has_value()) ended = comm->test(work);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  until([&] { return gone.load(); });
  EXPECT_EQ(ended.has_value() ? *ended : comm->wait(work), absl::OkStatus());
  root.join();
}

// The end of such a wait is past the end of time, and no sum of it may be a moment that has passed.
TEST_P(Failure, NothingIsLateThatMayTakeForEver) {
  for (const Time long_time : {kNever, kNever - Time(1)}) {
    CommunicatorOptions patience = options(long_time);
    patience.start_timeout = long_time;
    run_group(2, patience, [long_time](Communicator& comm) {
      EXPECT_EQ(sum(comm, 1000), absl::OkStatus());
      EXPECT_EQ(sum(comm, 1000, nullptr, long_time), absl::OkStatus());
    });
  }
}

TEST_P(Failure, TheFlightRecorderKnowsTheCall) {
  // Everybody else is told to write none.
  const TemporaryFolder folder;
  const std::string prefix = folder.path("flight");
  const ChangedVariable variable("BATON_FLIGHT_RECORDER", prefix);
  run_group(2, options(), [&prefix](Communicator& comm) {
    ASSERT_EQ(sum(comm, 1000), absl::OkStatus());
    if (comm.rank() == 1) {
      until([&] { return !comm.status().ok(); }, [&] { comm.progress(); });
      return;
    }
    const absl::Status status = sum(comm, 1000, nullptr, std::chrono::seconds(1));
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
    const std::string path = prefix + ".0.json";
    EXPECT_THAT(text(status), HasSubstr("its last events are in " + path));
    std::stringstream written;
    written << std::ifstream(path).rdbuf();
    EXPECT_THAT(written.str(), AllOf(HasSubstr("all_reduce"), HasSubstr("abort")));
    EXPECT_THAT(comm.flight_record(), AllOf(HasSubstr("all_reduce #1"), HasSubstr("all_reduce #2"),
                                            HasSubstr("send"), HasSubstr("abort")));
  });
}

// Promise(collectives): After an abort a new communicator needs a higher generation; an old one is
//   refused at once | the rendezvous counts generations
TEST_P(Failure, AfterAnAbortTheNextGenerationMeetsOverTheSameRendezvous) {
  auto server = must(collectives::RendezvousServer::start(test_key(), "", 0, 2));
  const auto rank = [&](int number) {
    std::vector<std::unique_ptr<Communicator>> kept;  // half of those that broke live on
    for (uint64_t generation = 0; generation < 4; ++generation) {
      SCOPED_TRACE(testing::Message() << "rank " << number << ", generation " << generation);
      CommunicatorOptions own = options();
      own.rank = number;
      own.ranks = 2;
      own.rendezvous = server->address();
      if (generation > 0) {
        own.generation = generation - 1;
        EXPECT_THAT(Communicator::create(own).status(),
                    fails_with(Code::kFailedPrecondition,
                               {"is over", "CommunicatorOptions",
                                absl::StrCat("with ", generation, " or higher")}));
      }
      own.generation = generation;
      auto comm = must(Communicator::create(own));
      std::vector<float> data(100, 1);
      const absl::Status summed =
          comm->all_reduce(data.data(), data.data(), 100, DataType::kF32, ReduceOp::kSum);
      // Rank 1 may hear of the abort in it.
      EXPECT_TRUE(summed.ok() || (number == 1 && absl::IsInternal(summed))) << summed;
      if (number == 0) comm->abort(absl::InternalError("enough"));
      until([&] { return !comm->status().ok(); }, [&] { comm->progress(); });
      if (generation % 2 == 0) kept.push_back(std::move(comm));
    }
  };
  std::thread other = rank_thread(1, [&] { rank(1); });
  rank(0);
  other.join();
}

TEST_P(Failure, BadArgumentsAreRefusedAndBreakNothing) {
  run_group(2, options(), [](Communicator& comm) {
    std::vector<float> a(100), b(100);
    auto* bytes = reinterpret_cast<std::byte*>(a.data());
    auto refused = [](const absl::Status& status, std::string_view why) {
      EXPECT_THAT(status, fails_with(Code::kInvalidArgument, {std::string(why)}));
    };
    const auto f32 = DataType::kF32;
    const auto plus = ReduceOp::kSum;
    refused(comm.all_reduce(a.data(), a.data() + 10, 50, f32, plus), "overlap");
    refused(comm.all_reduce(bytes + 1, b.data(), 10, f32, plus), "aligned");
    refused(comm.all_reduce(nullptr, b.data(), 10, f32, plus), "null");
    refused(comm.all_reduce(a.data(), b.data(), 10, static_cast<DataType>(99), plus), "type");
    refused(comm.all_reduce(a.data(), b.data(), 10, f32, static_cast<ReduceOp>(99)), "operation");
    refused(comm.broadcast(a.data(), a.data(), 10, f32, 2), "root 2");
    refused(comm.send(a.data(), 10, f32, comm.rank()), "another rank");
    refused(comm.all_to_all(a.data(), a.data(), 10, f32), "overlap");
    refused(comm.all_reduce(a.data(), b.data(), SIZE_MAX / 2, f32, plus), "too large");
    const int other = 1 - comm.rank();
    refused(comm.send(a.data(), SIZE_MAX / 2 + 2, f32, other), "too large");  // 4 bytes, wrapped
    const std::vector<size_t> none(2), far = {SIZE_MAX / 2 + 2, 0};
    refused(comm.all_to_all_v_async(a.data(), none, far, b.data(), none, none, f32).status(),
            "too large");
    float* const d = b.data();
    const size_t counts[] = {4, 8}, more[] = {4, 8, 2}, at[] = {0, 4}, huge[] = {SIZE_MAX / 2, 4};
    refused(comm.all_reduce(d, d, 4, f32, ReduceOp::kAnd), "f32 have no and");
    refused(comm.reduce(d, d, 4, DataType::kF8E5M2, ReduceOp::kXor, 0), "f8e5m2 have no xor");
    refused(comm.all_reduce(d, d, 4, DataType::kBool, ReduceOp::kAvg), "bool have no avg");
    refused(comm.all_reduce(d, d, 4, f32, ReduceOp::kPreMulSum), "CallOptions::factor");
    refused(comm.gather(d, d, 4, f32, 2), "root 2 is not a rank");
    refused(comm.scatter(d, d + 1, 4, f32, comm.rank()), "overlap");
    refused(comm.scatter(nullptr, d, 4, f32, comm.rank()), "in is null");
    refused(comm.all_gather_v_async(d, 4, d + 50, more, at, f32).status(),
            "3 counts and 2 offsets");
    refused(comm.all_gather_v_async(d, 5, d + 50, counts, at, f32).status(), "names 5 elements");
    const auto scatter = [&](absl::Span<const size_t> lengths, absl::Span<const size_t> starts,
                             float* out, CallOptions options = {}) {
      return comm.reduce_scatter_v_async(d, lengths, starts, out, f32, plus, options).status();
    };
    refused(scatter({}, {}, d + 50), "0 counts");
    refused(scatter(huge, at, d + 50), "too large");
    refused(scatter(counts, at, d + 1 + comm.rank()), "overlap");
    refused(scatter(counts, at, d + 50, {.algorithm = Algorithm::kHalvingDoubling}),
            "blocks of different lengths");
    EXPECT_EQ(comm.all_reduce(a.data(), b.data(), 0, f32, plus), absl::OkStatus());
    EXPECT_EQ(comm.all_reduce(nullptr, nullptr, 0, f32, plus), absl::OkStatus());
    EXPECT_EQ(comm.all_reduce(a.data(), b.data(), 100, f32, plus), absl::OkStatus());
  });
}

INSTANTIATE_TEST_SUITE_P(Providers, Failure, testing::Values("shm", "tcp"),
                         [](const auto& param) { return param.param; });

// Promise(collectives): What a finished call left under way arrives although its sender leaves | up
//   to 4 KiB is copied; leaving waits for acknowledgements, 60 s at most
TEST(Leave, WhatACallLeftOnItsWayArrives) {
  ManualClock clock;
  std::atomic<bool> leaving{false};
  CommunicatorOptions options = test_options("tcp");
  options.worker.clock = &clock;
  run_group(2, options, [&](Communicator& comm) {
    ASSERT_TRUE(comm.barrier().ok());
    float value = comm.rank() == 0 ? 7.0f : 0.0f;
    if (comm.rank() == 1) {
      // Busy with something else, for longer than goodbyes are waited for.
      until([&] { return leaving.load(); });
      for (int i = 0; i < 600; ++i) {
        clock.advance(std::chrono::milliseconds(1));
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    const absl::Status status = comm.broadcast(&value, &value, 1, DataType::kF32, 0);
    EXPECT_TRUE(status.ok()) << "rank " << comm.rank() << ": " << status;
    EXPECT_EQ(value, 7.0f);
    // Over for rank 0 as soon as its message was sent.
    if (comm.rank() == 0) leaving = true;
  });
}

}  // namespace

}  // namespace baton
