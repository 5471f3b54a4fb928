// Calls that do not fit together, or come too late: errors on both sides, never other data.
#include <future>

#include "collectives/executor/control_block.h"
#include "tests/communicator/over_providers.h"
#include "tests/test.h"

namespace baton {
namespace {

using testing::HasSubstr;

class Mismatch : public OverProviders {};

// run_group(), of ranks that leave together: one that has failed and left is gone for those that
// have not heard yet what is wrong.
void run_to_the_last(int ranks, const CommunicatorOptions& options,
                     const std::function<void(Communicator&)>& body) {
  std::atomic<int> ended{0};
  run_group(ranks, options, [&](Communicator& comm) {
    body(comm);
    ++ended;
    until([&] { return ended == ranks; }, [&] { comm.progress(); });
  });
}

// One count that fits a small message, one that does not, one of several messages.
const size_t kMismatchedCounts[] = {100, 10000, 100000};

// Promise(collectives): Ranks that disagree on count or type all get an error | messages carry both
TEST_P(Mismatch, SendingLessThanIsReceivedIsAnErrorOnBothSides) {
  struct Case {
    size_t sent, received;
    DataType type = DataType::kF32;
    int from = 0;
  };
  std::vector<Case> cases = {{100, 100, DataType::kI32}, {100000, 99999, DataType::kF32, kAnyRank}};
  for (const size_t count : kMismatchedCounts) {
    cases.insert(cases.end(), {{count, 2 * count}, {count, count / 2}});
  }
  for (const Case& c : cases) {
    run_to_the_last(2, options(), [&](Communicator& comm) {
      std::vector<float> data(2 * c.sent, 1);
      EXPECT_THAT(
          comm.rank() == 0 ? comm.send(data.data(), c.sent, DataType::kF32, 1)
                           : comm.receive(data.data(), c.received, c.type, c.from),
          fails_with(Code::kInvalidArgument, {absl::StrCat(c.sent, " f32"), "same count and type"}))
          << comm.rank();
    });
  }
}

// All ranks name the same lengths, and hear where they do not; also where the sum is the same.
TEST_P(Mismatch, BlocksOfOtherLengthsAreAnErrorOnBothSides) {
  for (const std::string what : {"all_gather_v", "reduce_scatter_v", "all_to_all_v"}) {
    for (size_t count : kMismatchedCounts) {
      run_to_the_last(2, options(), [&](Communicator& comm) {
        std::vector<float> in(4 * count, 1), out(4 * count, 1);
        const auto own = static_cast<size_t>(comm.rank());
        const size_t at[2] = {0, 2 * count};
        const size_t lengths[2] = {own == 0 ? 2 * count : count, own == 0 ? count : 2 * count};
        // Rank 0 sends `count` elements to rank 1, which expects twice as many.
        const size_t sent[2] = {count, count}, expected[2] = {own == 1 ? 2 * count : count, count};
        const auto work = must(what == "all_gather_v"
                                   ? comm.all_gather_v_async(in.data(), lengths[own], out.data(),
                                                             lengths, at, DataType::kF32)
                               : what == "all_to_all_v"
                                   ? comm.all_to_all_v_async(in.data(), sent, at, out.data(),
                                                             expected, at, DataType::kF32)
                                   : comm.reduce_scatter_v_async(in.data(), lengths, at, out.data(),
                                                                 DataType::kF32, ReduceOp::kSum));
        absl::Status status = comm.wait(work);
        if (status.ok()) status = comm.barrier();  // a rank that has taken what it expects
        EXPECT_THAT(status, fails_with(Code::kInvalidArgument, {what + " #1"})) << comm.rank();
      });
    }
  }
}

constexpr Collective kAllToAllV = Collective::kSendReceive;  // has none of its own

// What one call of a rank names.
struct Named {
  const char* what;
  Collective kind = Collective::kAllReduce;
  int root = 0;
  size_t count = 100;
  DataType type = DataType::kF32;
  ReduceOp op = ReduceOp::kSum;
};

absl::Status call(Communicator& comm, const Named& named, float* in, float* out) {
  const auto [what, kind, root, count, type, op] = named;
  switch (kind) {
    case Collective::kAllReduce:
      return comm.all_reduce(in, in, count, type, op);
    case Collective::kReduceScatter:
      return comm.reduce_scatter(in, out, count, type, op);
    case Collective::kAllGather:
      return comm.all_gather(in, out, count, type);
    case Collective::kBroadcast:
      return comm.broadcast(in, in, count, type, root);
    case Collective::kReduce:
      return comm.reduce(in, in, count, type, op, root);
    case Collective::kAllToAll:
      return comm.all_to_all(in, out, count, type);
    case Collective::kGather:
      return comm.gather(in, out, count, type, root);
    case Collective::kScatter:
      return comm.scatter(in, out, count, type, root);
    case kAllToAllV: {
      const auto ranks = static_cast<size_t>(comm.ranks());
      std::vector<size_t> at, counts(ranks, count);
      for (size_t r = 0; r < ranks; ++r) at.push_back(r * count);
      const auto work = comm.all_to_all_v_async(in, counts, at, out, counts, at, type);
      return work.ok() ? comm.wait(*work) : work.status();
    }
    default:
      return comm.barrier();
  }
}

// Promise(collectives): Where ranks name another root, count, type, operation or call, all hear of
//   it in that call or, where it has ended for a rank that only sends, in its next | what came
//   unasked is looked at when a call with a root ends and when the next one begins; whoever waits
//   tells for what
TEST_P(Mismatch, CallsThatDifferAreNamedAtEveryRankByItsNextCall) {
  using C = Collective;
  // What the last rank calls, and what all others do.
  const std::vector<std::pair<Named, Named>> differ = {
      {{"its own root", C::kBroadcast, -1}, {"", C::kBroadcast, 0}},
      {{"another root", C::kBroadcast, 0}, {"", C::kBroadcast, 1}},
      {{"its own root", C::kReduce, -1}, {"", C::kReduce, 0}},
      {{"another root", C::kReduce, 0}, {"", C::kReduce, -1}},
      {{"its own root", C::kGather, -1}, {"", C::kGather, 0}},
      {{"another root", C::kGather, 0}, {"", C::kGather, -1}},
      {{"its own root", C::kScatter, -1}, {"", C::kScatter, 0}},
      {{"another root", C::kScatter, 0}, {"", C::kScatter, 1}},
      {{"another call", C::kReduce, 0}, {"", C::kBroadcast, 0}},
      {{"another call", C::kBarrier}, {"", C::kBroadcast, 0}},
      {{"another call", C::kAllGather}, {"", C::kAllToAll}},
      {{"another count", C::kBroadcast, 0, 101}, {"", C::kBroadcast}},
      {{"another count", C::kAllReduce, 0, 50}, {"", C::kAllReduce}},
      {{"a count that is far from it", C::kAllReduce, 0, 1}, {"", C::kAllReduce, 0, 700}},
      {{"another count", C::kAllGather, 0, 200}, {"", C::kAllGather}},
      {{"another type", C::kScatter, 0, 100, DataType::kI32}, {"", C::kScatter}},
      {{"another type", C::kAllToAll, 0, 100, DataType::kI32}, {"", C::kAllToAll}},
      {{"another op", C::kReduce, 0, 100, DataType::kF32, ReduceOp::kMax}, {"", C::kReduce}},
      {{"another op", C::kReduceScatter, 0, 100, DataType::kF32, ReduceOp::kMax},
       {"", C::kReduceScatter}},
      {{"another call", C::kAllReduce}, {"", kAllToAllV}},
      {{"another call", C::kBroadcast, 0}, {"", kAllToAllV}},
      {{"another call", C::kBroadcast, -1}, {"", kAllToAllV}},
      {{"another call", C::kBarrier}, {"", kAllToAllV}},
      {{"another type", kAllToAllV, 0, 100, DataType::kI32}, {"", kAllToAllV}},
  };
  size_t turn = 0;
  for (const auto& [odd, others] : differ) {
    for (const int ranks : {2, 3, 4}) {
      if (others.kind == kAllToAllV && ranks > 2) break;  // each message is between two ranks
      const size_t times = ++turn % 2 == 0 ? 1 : 100;     // in one message; in several
      SCOPED_TRACE(testing::Message() << odd.what << " of a " << name_of(others.kind) << ", "
                                      << ranks << " ranks, " << times << " times the count");
      run_to_the_last(ranks, options(), [&, odd = odd, others = others](Communicator& comm) {
        Named own = comm.rank() + 1 == ranks ? odd : others;
        own.root = own.root < 0 ? ranks - 1 : own.root;
        own.count *= times;
        std::vector<float> in(4 * 20000, 1), out(4 * 20000);
        // Who is still being made would hear of it there, who comes late in this barrier.
        absl::Status status = comm.barrier();
        if (status.ok()) status = call(comm, own, in.data(), out.data());
        // Over a network that keeps no order the word of it may come behind the next call's data.
        for (int i = GetParam() == "shm" ? 1 : 4; i > 0 && status.ok(); --i) {
          status = comm.barrier();
        }
        EXPECT_THAT(status, fails_with(Code::kInvalidArgument, {"ranks disagree about call #2:"}))
            << "rank " << comm.rank();
        if (others.kind == kAllToAllV) {
          EXPECT_THAT(text(status), HasSubstr("all_to_all_v #2 of f32"));
        }
      });
      if (HasFailure()) return;
    }
  }
}

struct LateRank {
  std::atomic<bool> met{false};  // it does not answer from here on
  std::promise<void> rewritten;
};

// What a late rank gets is what was sent, or an error: never what the sender wrote there later.
void expect_never_later_data(Communicator& comm, LateRank& late, size_t count,
                             const std::function<absl::Status(float*)>& call) {
  const absl::Status met = comm.barrier();
  auto buffer = comm.allocate(count * sizeof(float));
  if (comm.rank() == 1) late.met = true;
  until([&] { return late.met.load(); },
        [&] { comm.progress(); });  // else it might hear of the deadline in the barrier
  ASSERT_TRUE(met.ok() && buffer.ok()) << met;
  auto* data = reinterpret_cast<float*>(buffer->data);
  if (comm.rank() == 0) {
    std::fill(data, data + count, 1.0F);
    // A collective may be over for a rank that only sends: the data is on its way then.
    const absl::Status status = call(data);
    EXPECT_TRUE(absl::IsDeadlineExceeded(status) || status.ok()) << status;
    std::fill(data, data + count, 2.0F);
    late.rewritten.set_value();
    return;
  }
  late.rewritten.get_future().wait();
  const absl::Status status = call(data);
  if (!status.ok()) return;
  for (size_t i = 0; i < count; ++i) ASSERT_EQ(data[i], 1.0F) << i;
}

// Promise(collectives): A receiver never gets what its sender wrote after its call ended | failed
//   calls are marked before they return
TEST_P(Mismatch, ALateReceiverNeverGetsWhatTheSenderWroteAfterItsDeadline) {
  for (size_t count : kMismatchedCounts) {
    for (const char* what : {"send", "broadcast", "reduce", "all_to_all_v"}) {
      SCOPED_TRACE(what);
      LateRank late;
      CommunicatorOptions own = options();
      own.tune = false;
      run_group(2, own, [&](Communicator& comm) {
        CallOptions hasty;
        if (comm.rank() == 0) hasty.timeout = std::chrono::milliseconds(50);
        std::vector<float> sum(count);
        expect_never_later_data(comm, late, count, [&](float* data) -> absl::Status {
          const std::string name = what;
          if (name == "send" && comm.rank() == 0) {
            const absl::Status status = comm.send(data, count, DataType::kF32, 1, hasty);
            EXPECT_FALSE(status.ok()) << "nobody has received it";
            return status;
          }
          if (name == "send") return comm.receive(data, count, DataType::kF32, 0);
          if (name == "broadcast")
            return comm.broadcast(data, data, count, DataType::kF32, 0, hasty);
          if (name == "reduce") {
            // Rank 1 contributes nothing and is the root.
            return comm.reduce(data, data, count, DataType::kF32, ReduceOp::kSum, 1, hasty);
          }
          const size_t sent[2] = {0, comm.rank() == 0 ? count : 0}, at[2] = {0, 0};
          const size_t got[2] = {comm.rank() == 1 ? count : 0, 0};
          auto work = comm.all_to_all_v_async(data, sent, at, data, got, at, DataType::kF32, hasty);
          return work.ok() ? comm.wait(*work) : work.status();
        });
      });
    }
  }
}

// Promise(collectives): A refused call counts for nothing: the ranks stay in step | votes are
//   counted when the call is admitted
TEST_P(Mismatch, CallsThatWereRefusedDoNotMakeRanksDisagreeLater) {
  constexpr size_t kOpen = 256, kCount = 3000;
  run_group(2, options(), [](Communicator& comm) {
    std::vector<float> data(kCount, 1);
    const auto sum = [&] {
      return comm.all_reduce_async(data.data(), data.data(), kCount, DataType::kF32,
                                   ReduceOp::kMax);
    };
    std::vector<Work> open;
    if (comm.rank() == 0) {
      for (size_t i = 0; i < kOpen; ++i) {
        open.push_back(must(comm.barrier_async()));
      }
      for (int i = 0; i < 30; ++i) EXPECT_TRUE(absl::IsResourceExhausted(sum().status()));
    }
    // A barrier keeps its place until its end has been asked for.
    if (comm.rank() == 1) {
      for (size_t i = 0; i < kOpen; ++i) ASSERT_EQ(comm.barrier(), absl::OkStatus());
    }
    for (Work work : open) ASSERT_EQ(comm.wait(work), absl::OkStatus());
    for (int call = 0; call < 200; ++call) {
      auto work = sum();
      ASSERT_TRUE(work.ok()) << call << ": " << work.status();
      ASSERT_EQ(comm.wait(*work), absl::OkStatus()) << call;
    }
  });
}

// Begins calls that rank 1 never makes until one is refused; says how many there were.
absl::Status begin_calls(Communicator& comm, std::atomic<int>& begun) {
  std::vector<float> data(100);
  while (true) {
    auto work = comm.all_reduce_async(data.data(), data.data(), data.size(), DataType::kF32,
                                      ReduceOp::kMax);
    if (!work.ok()) return work.status();
    ++begun;
  }
}

// Promise(collectives): `abort()` returns at once, also while a call waits | votes are awaited
//   without the lock
TEST_P(Mismatch, AbortReturnsWhileACallWaitsForTheVoteOnHowItRuns) {
  int until_vote = 0;
  for (bool aborts : {false, true}) {
    CommunicatorOptions own = options();
    if (!aborts) own.timeout = std::chrono::milliseconds(300);
    run_group(2, own, [&](Communicator& comm) {
      CallOptions whole;  // only what rank 1 never joins is to end early
      whole.timeout = patient(std::chrono::seconds(30));
      const absl::Status met = comm.barrier(whole);  // rank 1 may hear of the abort in it
      if (comm.rank() == 1) {
        until([&] { return !comm.status().ok(); }, [&] { comm.progress(); });
        return;
      }
      ASSERT_EQ(met, absl::OkStatus());
      std::atomic<int> begun{0};
      if (!aborts) {
        EXPECT_TRUE(absl::IsDeadlineExceeded(begin_calls(comm, begun)));
        until_vote = begun;
        return;
      }
      std::thread other([&] {
        until([&] { return begun >= until_vote; });
        comm.abort(absl::InternalError("enough"));
      });
      const absl::Status ended = begin_calls(comm, begun);
      other.join();
      EXPECT_TRUE(absl::IsInternal(ended)) << ended;
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Providers, Mismatch, testing::Values("shm", "tcp", "ucx", "verbs_fake"),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace baton
