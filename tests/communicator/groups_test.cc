// Groups of one endpoint: from handles, by colour, of some ranks; many at once; what they cost and
// what they leave behind.
#include "tests/communicator/endpoints.h"
#include "tests/sanitized.h"
#include "tests/used.h"
#include "transport/base/child.h"

namespace baton {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class Groups : public testing::TestWithParam<std::string> {
 public:
  static void SetUpTestSuite() { setenv("BATON_FLIGHT_RECORDER", "none", 1); }
};

// Promise(collectives): A group is made from 96-byte handles that the application has exchanged, in
//   whatever way, and create() returns at once | in state starting; wait_ready() waits
TEST_P(Groups, AGroupIsMadeFromHandles) {
  const auto endpoints = open_endpoints(3, GetParam());
  run_endpoints(endpoints, 7, [](Communicator& comm) {
    EXPECT_EQ(comm.wait_ready(), absl::OkStatus());
    EXPECT_EQ(comm.state(), GroupState::kReady);
    EXPECT_EQ(sum_of(comm), 6);
    EXPECT_EQ(comm.handles().size(), 3u);
    EXPECT_EQ(sum_of(comm, 2, 200000), 12);
  });
}

TEST_P(Groups, CallsMayBeginBeforeTheOthersAreThere) {
  const auto endpoints = open_endpoints(2, GetParam());
  const auto handles = handles_of(endpoints);
  auto first = must(Communicator::create(endpoints[0], handles, group_options(7)));
  EXPECT_EQ(first->state(), GroupState::kStarting);
  EXPECT_TRUE(absl::IsDeadlineExceeded(first->wait_ready(Time(1))));
  float data = 1;
  auto work = must(first->all_reduce_async(&data, &data, 1, DataType::kF32, ReduceOp::kSum));
  std::thread other([&] {
    auto second = must(Communicator::create(endpoints[1], handles, group_options(7)));
    EXPECT_EQ(sum_of(*second, 1, 1), 3);
  });
  EXPECT_EQ(first->wait(work), absl::OkStatus());
  other.join();
  EXPECT_EQ(data, 3);
}

// A large group connects some ranks at first; what else is used is connected then.
TEST_P(Groups, RanksThatNeverTalkedCanAtAnyTime) {
  constexpr int kRanks = 11;
  const auto endpoints = open_endpoints(kRanks, GetParam());
  run_endpoints(endpoints, 7, [](Communicator& comm) {
    EXPECT_EQ(sum_of(comm), expected_sum(kRanks));
    std::vector<float> in(kRanks), out(kRanks);
    for (int to = 0; to < kRanks; ++to) in[to] = static_cast<float>(comm.rank() * kRanks + to);
    ASSERT_EQ(comm.all_to_all(in.data(), out.data(), 1, DataType::kF32), absl::OkStatus());
    for (int from = 0; from < kRanks; ++from) {
      EXPECT_EQ(out[from], static_cast<float>(from * kRanks + comm.rank()));
    }
    EXPECT_EQ(comm.barrier(), absl::OkStatus());
  });
}

TEST_P(Groups, SubgroupsAreCalledByTheirMembersOnly) {
  const auto endpoints = open_endpoints(4, GetParam());
  run_endpoints(endpoints, 7, [](Communicator& comm) {
    for (int round = 0; round < 3; ++round) {
      if (comm.rank() == 1) continue;
      const std::vector<int> members = {3, 0, 2};
      auto group = must(comm.subgroup(members, group_options(0)));
      EXPECT_EQ(members[group->rank()], comm.rank());
      EXPECT_EQ(sum_of(*group), 6);
      // Of a group's group.
      if (group->rank() == 2) continue;
      auto pair = must(group->subgroup({1, 0}, group_options(0)));
      EXPECT_EQ(sum_of(*pair), 3);
    }
    EXPECT_EQ(comm.barrier(), absl::OkStatus());
    for (const auto& [ranks, why] : std::vector<std::pair<std::vector<int>, std::string>>{
             {{0, 1, 2, 3, 4}, "no rank 4"},
             {{comm.rank(), comm.rank()}, "named twice"},
             {{(comm.rank() + 1) % 4}, "not in"}}) {
      const auto refused = comm.subgroup(ranks, group_options(0));
      EXPECT_THAT(refused.status(), fails_with(Code::kInvalidArgument, {why}));
    }
  });
}

// Promise(collectives): Any number of groups of one endpoint is used from any number of threads at
//   once | one lock; who waits for a call of one advances all
TEST_P(Groups, ManyAtOnceFromSeveralThreads) {
  constexpr int kGroups = 6;
  const auto endpoints = open_endpoints(3, GetParam());
  run_endpoints(endpoints, 7, [](Communicator& comm) {
    std::vector<std::unique_ptr<Communicator>> groups;
    for (int g = 0; g < kGroups; ++g) {
      groups.push_back(must(comm.subgroup({0, 1, 2}, group_options(0))));
    }
    const int rounds = rounds_of(40, 10);
    on_threads(kGroups, [&](int g) {
      for (int round = 0; round < rounds; ++round) {
        const auto scale = static_cast<float>(g * 100 + round + 1);
        ASSERT_EQ(sum_of(*groups[g], scale, round % 2 == 0 ? 10 : 50000), 6 * scale);
      }
    });
  });
}

// Each waits for another call first: only one who advances the other group as well gets out of it.
TEST_P(Groups, WaitingInAnotherOrderIsNoDeadlock) {
  const auto endpoints = open_endpoints(2, GetParam());
  run_endpoints(endpoints, 7, [](Communicator& comm) {
    auto a = *comm.subgroup({0, 1}, group_options(0));
    auto b = *comm.subgroup({0, 1}, group_options(0));
    for (int round = 0; round < 10; ++round) {
      std::vector<float> x(300000, 1), y(300000, 2);
      auto first =
          a->all_reduce_async(x.data(), x.data(), x.size(), DataType::kF32, ReduceOp::kSum);
      auto second =
          b->all_reduce_async(y.data(), y.data(), y.size(), DataType::kF32, ReduceOp::kSum);
      ASSERT_TRUE(first.ok() && second.ok());
      Communicator& early = comm.rank() == 0 ? *a : *b;
      Communicator& late = comm.rank() == 0 ? *b : *a;
      ASSERT_EQ(early.wait(comm.rank() == 0 ? *first : *second), absl::OkStatus());
      ASSERT_EQ(late.wait(comm.rank() == 0 ? *second : *first), absl::OkStatus());
      ASSERT_EQ(x.back(), 2);
      ASSERT_EQ(y.back(), 4);
    }
  });
}

TEST_P(Groups, AGroupThatIsDestroyedWithCallsInFlightIsNamed) {
  const auto endpoints = open_endpoints(2, GetParam());
  run_endpoints(endpoints, 7, [](Communicator& comm) {
    auto group = *comm.subgroup({0, 1}, group_options(0));
    ASSERT_EQ(group->barrier(), absl::OkStatus());
    std::vector<float> data(100000, 1);
    if (comm.rank() == 1) {
      ASSERT_TRUE(group->receive_async(data.data(), 10, DataType::kF32, 0).ok());
      group.reset();
    } else {
      EXPECT_THAT(
          group->all_reduce(data.data(), data.data(), data.size(), DataType::kF32, ReduceOp::kSum),
          fails_with(Code::kAborted, {"rank 1", "calls in flight"}));
    }
    // The other groups of the endpoint go on.
    EXPECT_EQ(sum_of(comm), 3);
  });
}

TEST_P(Groups, ARankThatHasLeftAGroupIsNamed) {
  const auto endpoints = open_endpoints(2, GetParam());
  run_endpoints(endpoints, 7, [](Communicator& comm) {
    for (const bool used : {true, false}) {
      auto group = *comm.subgroup({0, 1}, group_options(0));
      if (used) {
        ASSERT_EQ(group->barrier(), absl::OkStatus());
      }
      if (comm.rank() == 1) {
        group.reset();
        EXPECT_EQ(comm.barrier(), absl::OkStatus());
        continue;
      }
      EXPECT_EQ(comm.barrier(), absl::OkStatus());
      float data = 1;
      EXPECT_THAT(group->all_reduce(&data, &data, 1, DataType::kF32, ReduceOp::kSum),
                  fails_with(Code::kUnavailable, {"rank 1", "left"}));
    }
    EXPECT_EQ(comm.barrier(), absl::OkStatus());
  });
}

// Calls that tell their ends, each of a place of its own.
struct Ends {
  static constexpr int kCalls = 200;  // begun in one go, the ranks have to vote on them
  explicit Ends(Communicator& of) : comm(of) {}
  static void note(void* context, Work, const absl::Status& status) {
    auto& self = *static_cast<Ends*>(context);
    ++self.count;
    self.failed += status.ok() ? 0 : 1;
  }
  // Begins the next call of a chain.
  static void next(void* context, Work, const absl::Status& status) {
    auto& self = *static_cast<Ends*>(context);
    self.failed += status.ok() ? 0 : 1;
    if (self.left.fetch_sub(1) > 1) self.begin(0, &Ends::next);
  }
  void begin(int i, decltype(CallOptions::on_end) on_end) {
    CallOptions call;
    call.on_end = on_end;
    call.context = this;
    call.detached = true;
    float* const at = data + i;
    if (!comm.all_reduce_async(at, at, 1, DataType::kF32, ReduceOp::kMax, call).ok()) ++failed;
  }
  void begin_all() {
    for (int i = 0; i < kCalls; ++i) begin(i, &Ends::note);
  }

  Communicator& comm;
  std::atomic<int> count{0}, failed{0}, left{0};
  float data[kCalls + 1] = {};
};

// Promise(collectives): A call tells its end by a callback, before wait() returns, and the callback
//   may begin another call | it runs without a lock, on the thread that drives
TEST_P(Groups, CallsTellTheirEndByACallback) {
  for (const bool background : {false, true}) {
    const auto endpoints = open_endpoints(2, GetParam(), background);
    const int rounds = background ? 50 : 300;
    run_endpoints(endpoints, 7, [rounds](Communicator& comm) {
      Ends ends(comm);
      CallOptions call;
      call.on_end = &Ends::note;
      call.context = &ends;
      float data[300] = {};
      for (int i = 0; i < rounds; ++i) {
        auto work = must(
            comm.all_reduce_async(data + i, data + i, 1, DataType::kF32, ReduceOp::kSum, call));
        ASSERT_EQ(comm.wait(work), absl::OkStatus());
        ASSERT_EQ(ends.count, i + 1);
      }
      // A chain of calls that only callbacks begin, longer than there are places for calls.
      ends.left = rounds;
      ends.begin(0, &Ends::next);
      until([&] { return ends.left <= 0; }, [&] { comm.progress(); });
      EXPECT_EQ(ends.failed, 0);
      ASSERT_EQ(comm.barrier(), absl::OkStatus());
    });
  }
}

// No callback runs meanwhile that would wait behind the vote on the thread that holds it up; and
// the background thread may be the one that awaits it.
TEST_P(Groups, CallbacksMayBeginCallsWhileRanksVote) {
  for (const bool background : {false, true}) {
    const auto endpoints = open_endpoints(2, GetParam(), background);
    run_endpoints(endpoints, 7, [background](Communicator& comm) {
      ASSERT_EQ(comm.barrier(), absl::OkStatus());
      Ends ends(comm);
      CallOptions call;
      call.context = &ends;
      call.detached = true;
      call.on_end = [](void* context, Work, const absl::Status&) {
        static_cast<Ends*>(context)->begin(Ends::kCalls, &Ends::note);
      };
      if (background) {
        call.on_end = [](void* context, Work, const absl::Status&) {
          static_cast<Ends*>(context)->begin_all();
        };
      }
      ASSERT_TRUE(comm.barrier_async(call).ok());
      if (!background) ends.begin_all();
      until([&] { return ends.count == Ends::kCalls + (background ? 0 : 1); },
            [&] {
              if (!background) comm.progress();
            });
      EXPECT_EQ(ends.failed, 0);
      ASSERT_EQ(comm.barrier(), absl::OkStatus());
    });
  }
}

// Whose callback waits for the call of the other.
struct Pair {
  Communicator* comm = nullptr;
  Work works[2];
  std::atomic<int> begun{0}, returned{0};
  absl::Status heard;
  template <int kOther>
  static void wait_for(void* context, Work, const absl::Status&) {
    auto& self = *static_cast<Pair*>(context);
    if (self.begun.fetch_add(1) == 0) {
      self.heard = self.comm->wait(self.works[kOther], patient(std::chrono::seconds(10)));
    }
    ++self.returned;
  }
};

// Two calls end at once: the first callback waits for the call whose callback is due next.
TEST_P(Groups, ACallbackMayWaitForAnotherCall) {
  for (const bool background : {false, true}) {
    const auto endpoints = open_endpoints(2, GetParam(), background);
    run_endpoints(endpoints, 7, [](Communicator& comm) {
      ASSERT_EQ(comm.barrier(), absl::OkStatus());
      if (comm.rank() == 1) {
        return until([&] { return !comm.status().ok(); }, [&] { comm.progress(); });
      }
      Pair pair;
      pair.comm = &comm;
      float data[2] = {};
      CallOptions call;
      call.context = &pair;
      call.on_end = &Pair::wait_for<1>;
      pair.works[0] = *comm.receive_async(data, 1, DataType::kF32, 1, call);
      call.on_end = &Pair::wait_for<0>;
      pair.works[1] = *comm.receive_async(data + 1, 1, DataType::kF32, 1, call);
      comm.abort(absl::CancelledError("enough"));
      until([&] { return pair.returned == 2; }, [&] { comm.progress(); });
      EXPECT_TRUE(absl::IsCancelled(pair.heard)) << pair.heard;
    });
  }
}

// The thread that would advance the call is the one that waits for it.
TEST_P(Groups, ACallbackOnTheBackgroundThreadMayMakeABlockingCall) {
  const auto endpoints = open_endpoints(2, GetParam(), true);
  run_endpoints(endpoints, 7, [](Communicator& comm) {
    struct Context {
      Communicator* comm;
      std::atomic<float> sum{0};
    } context{&comm};
    CallOptions call;
    call.context = &context;
    call.detached = true;
    call.on_end = [](void* to, Work, const absl::Status&) {
      auto& self = *static_cast<Context*>(to);
      self.sum = sum_of(*self.comm);
    };
    ASSERT_TRUE(comm.barrier_async(call).ok());
    until([&] { return context.sum != 0; });
    EXPECT_EQ(context.sum, 3);
    ASSERT_EQ(comm.barrier(), absl::OkStatus());
  });
}

// Promise(collectives): A wait's timeout is not the call's | the call runs on and can be waited for
//   again
TEST_P(Groups, AWaitGivesUpAndTheCallRunsOn) {
  const auto endpoints = open_endpoints(2, GetParam());
  std::atomic<bool> gave_up{false};
  run_endpoints(endpoints, 7, [&](Communicator& comm) {
    float data = 1;
    if (comm.rank() == 1) {
      until([&] { return gave_up.load(); });
      ASSERT_EQ(comm.send(&data, 1, DataType::kF32, 0), absl::OkStatus());
      return;
    }
    auto work = must(comm.receive_async(&data, 1, DataType::kF32, 1));
    EXPECT_THAT(comm.wait(work, std::chrono::milliseconds(5)),
                fails_with(Code::kDeadlineExceeded, {"still runs"}));
    gave_up = true;
    EXPECT_EQ(comm.wait(work), absl::OkStatus());
  });
}

// Its last turn before it computes answers what has come in that turn.
TEST_P(Groups, ARankThatComputesHasAnsweredBefore) {
  const auto endpoints = open_endpoints(2, GetParam());
  const auto comms = group_of(endpoints, 7);
  std::unique_ptr<Communicator> groups[2];
  for (const int rank : {0, 1}) groups[rank] = *comms[rank]->subgroup({0, 1}, group_options(0));
  float data = 1;
  ASSERT_TRUE(groups[0]->receive_async(&data, 1, DataType::kF32, 1).ok());
  const auto linked = [&](int rank) {
    return groups[rank]->routes().find("rank " + std::to_string(1 - rank)) != std::string::npos;
  };
  until([&] { return linked(1); }, [&] { groups[0]->progress(), endpoints[1]->progress(); });
  until([&] { return linked(0); }, [&] { groups[0]->progress(); });
}

// Promise(collectives): What ranks tell each other is not lost where a worker's transfers have run
//   out | it is told, in order, once there is one again
TEST_P(Groups, AnAbortIsToldOnceTheWorkerHasRoom) {
  std::vector<std::shared_ptr<Endpoint>> endpoints;
  for (int i = 0; i < 2; ++i) {
    EndpointOptions options = endpoint_options(GetParam());
    options.worker.max_transfers = 64;
    endpoints.push_back(*Endpoint::open(options));
  }
  const auto comms = group_of(endpoints, 7);
  const auto both = [&] { endpoints[0]->progress(), endpoints[1]->progress(); };
  Worker& worker = endpoints[0]->worker();
  // The endpoint's connection to the other one is the only one that there is.
  PeerId peer{.index = 0, .generation = 1};
  while (!worker.notify_detached(peer, "x").ok()) ASSERT_LT(++peer.index, 100u);
  absl::Status status;
  while ((status = worker.notify_detached(peer, "x")).ok()) {
  }
  ASSERT_TRUE(absl::IsResourceExhausted(status)) << status;
  comms[0]->abort(absl::CancelledError("enough"));
  until([&] { return !comms[1]->status().ok(); }, both);
  EXPECT_THAT(text(comms[1]->status()), AllOf(HasSubstr("rank 0"), HasSubstr("enough")));
}

// --- bad input -----------------------------------------------------------------------------------

TEST_P(Groups, HandlesThatMakeNoSenseAreRefusedByName) {
  const auto endpoints = open_endpoints(2, GetParam());
  const auto handles = handles_of(endpoints);
  const std::string good = handles[1].bytes();
  const auto with = [&](size_t at, char byte) {
    std::string bytes = good;
    bytes[at] = byte;
    return Handle::decode(bytes).status();
  };
  EXPECT_TRUE(absl::IsInvalidArgument(Handle::decode("short").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(Handle::decode(std::string(96, 'x')).status()));
  for (size_t at = 0; at < good.size(); ++at) {
    EXPECT_FALSE(with(at, static_cast<char>(good[at] ^ 1)).ok()) << at;
  }
  // Whole, and of the next version.
  EXPECT_THAT(Handle::decode(with_byte_raised(handles[1], 3)).status(),
              fails_with(Code::kFailedPrecondition, {"install the same Baton everywhere"}));
  struct Case {
    std::vector<Handle> handles;
    uint64_t uuid;
    std::string why;
  };
  for (const Case& c : std::vector<Case>{
           {{}, 7, "0 ranks"},
           {{handles[0], handles[1], handles[0]}, 7, "ranks 0 and 2 have the same handle"},
           {{handles[1]}, 7, "not among"},
           {{handles[0], Handle()}, 7, "rank 1: not a handle"},
           {handles, 0, "uuid"}}) {
    const auto comm = Communicator::create(endpoints[0], c.handles, group_options(c.uuid));
    EXPECT_THAT(comm.status(), fails_with(Code::kInvalidArgument, {c.why}));
  }
  EXPECT_TRUE(
      absl::IsInvalidArgument(Communicator::create(nullptr, handles, group_options(7)).status()));
  auto alone = must(Communicator::create(endpoints[0], {handles[0]}, group_options(9)));
  EXPECT_EQ(sum_of(*alone), 1);
  const auto again = Communicator::create(endpoints[0], {handles[0]}, group_options(9));
  EXPECT_TRUE(absl::IsAlreadyExists(again.status())) << again.status();
}

// Promise(collectives): Ranks whose lists of members differ hear so at once, both sides | the error
//   names the rank, its number and the number of ranks
TEST_P(Groups, RanksThatDisagreeAboutTheMembersAreTold) {
  const auto endpoints = open_endpoints(3, GetParam());
  const auto handles = handles_of(endpoints);
  const std::vector<Handle> lists[] = {{handles[0], handles[1]},
                                       {handles[0], handles[1], handles[2]}};
  on_threads(2, [&](int rank) {
    auto comm = must(Communicator::create(endpoints[rank], lists[rank], group_options(7)));
    EXPECT_THAT(comm->wait_ready(), fails_with(Code::kInvalidArgument, {"disagree", "rank"}));
    EXPECT_EQ(comm->state(), GroupState::kBroken);
  });
  for (const std::string option : {"slots", "tuned", "ordered"}) {
    on_threads(2, [&](int rank) {
      GroupOptions options = group_options(8 + static_cast<uint8_t>(option[0]));
      options.slot_bytes = rank == 0 || option != "slots" ? 64 << 10 : 128 << 10;
      options.tune = rank == 0 || option != "tuned";
      options.ordered = rank == 1 && option == "ordered";
      auto comm = must(Communicator::create(endpoints[rank], lists[0], options));
      EXPECT_THAT(comm->wait_ready(), fails_with(Code::kInvalidArgument, {option, "same options"}));
    });
  }
}

TEST_P(Groups, AProcessThatIsGoneOrOfAnotherKeyIsNamed) {
  auto endpoints = open_endpoints(2, GetParam());
  const auto handles = handles_of(endpoints);
  endpoints[1].reset();
  auto comm = must(Communicator::create(endpoints[0], handles, group_options(7)));
  const absl::Status gone = comm->wait_ready();
  EXPECT_FALSE(gone.ok());
  EXPECT_THAT(text(gone), HasSubstr("rank 1"));

  EndpointOptions foreign = endpoint_options(GetParam());
  foreign.worker.key = *ClusterKey::from_bytes("another key of tests: 24 B");
  foreign.background = true;  // it answers
  auto stranger = must(Endpoint::open(foreign));
  auto with =
      must(Communicator::create(endpoints[0], {handles[0], stranger->handle()}, group_options(8)));
  const absl::Status refused = with->wait_ready();
  EXPECT_FALSE(refused.ok());
  EXPECT_THAT(text(refused), HasSubstr("rank 1"));
}

TEST_P(Groups, AForkedChildHasNoneOfItsParents) {
  const auto endpoints = open_endpoints(2, GetParam());
  run_endpoints(endpoints, 7, [&](Communicator& comm) {
    ASSERT_EQ(comm.barrier(), absl::OkStatus());
    if (comm.rank() == 0) {
      const pid_t child = base::fork_child();
      ASSERT_GE(child, 0);
      if (child == 0) {
        bool none =
            !Communicator::create(endpoints[0], {endpoints[0]->handle()}, group_options(9)).ok() &&
            !endpoints[0]->allocate(100).ok() && !endpoints[0]->progress();
        float data = 1;
        for (const absl::Status& status :
             {comm.all_reduce(&data, &data, 1, DataType::kF32, ReduceOp::kSum),
              comm.send_async(&data, 1, DataType::kF32, 1).status(), comm.wait(Work{1}),
              *comm.test(Work{1}), comm.wait_ready(), comm.status(), comm.split(0, 0).status(),
              comm.subgroup({0}).status(), comm.shrink().status()}) {
          none &=
              absl::IsInvalidArgument(status) && text(status).find("forked") != std::string::npos;
        }
        comm.abort(absl::CancelledError("not here"));
        comm.~Communicator();
        _exit(none ? 0 : 1);
      }
      int status = 0;
      ASSERT_EQ(waitpid(child, &status, 0), child);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    EXPECT_EQ(sum_of(comm), 3);
  });
}

// --- what they cost ------------------------------------------------------------------------------

// A group of two ranks and a part of it: made, used, and ended in one of the ways in which groups
// end. `end` counts them.
void live(const std::vector<std::shared_ptr<Endpoint>>& endpoints, uint64_t uuid, size_t end) {
  const auto handles = handles_of(endpoints);
  std::atomic<int> summed = 0;
  on_threads(2, [&](int rank) {
    std::vector<float> data(1 << 20);
    auto comm = *Communicator::create(endpoints[rank], handles, group_options(uuid));
    ASSERT_EQ(sum_of(*comm, 1, 50000), 3);
    auto part = *comm->split(0, rank, group_options(0));
    ASSERT_EQ(sum_of(*part, 1, 50000), 3);
    // An abort of one rank ends calls that the other is still in.
    ++summed;
    until([&] { return summed == 2; }, [&] { endpoints[rank]->progress(); },
          [&] { return absl::StrCat("rank ", rank, ": the other has no sum"); });
    const auto sum = [&] {
      return part->all_reduce_async(data.data(), data.data(), data.size(), DataType::kF32,
                                    ReduceOp::kSum);
    };
    switch (end % 5) {
      case 0:  // in order
        break;
      case 1:  // with a call in flight that the other does not make
        if (rank == 0) (void)sum();
        break;
      case 2:  // in the middle of one
        (void)sum();
        part->abort(absl::CancelledError("enough"));
        break;
      case 3:  // one after the other: this is over for one while the other is in it
        if (rank == 0) comm->abort(absl::CancelledError("enough"));
        (void)comm->barrier();
        break;
      default: {
        if (rank == 0) comm->abort(absl::CancelledError("enough"));
        const auto work = must(comm->reconfigure({handles[1], handles[0]}, uuid + 1,
                                                 patient(std::chrono::seconds(60))));
        ASSERT_EQ(comm->wait(work), absl::OkStatus());
        ASSERT_EQ(sum_of(*comm, 1, 50000), 3);
      }
    }
  });
}

// Promise(collectives): One more group of the same ranks takes no descriptor and no thread, and 200
//   of them, one after the other, leave nothing behind | left in order and in calls, aborted,
//   reconfigured; descriptors, threads, shared mappings and bytes are counted
TEST_P(Groups, TwoHundredLivesLeaveNothingBehind) {
  const auto endpoints = open_endpoints(2, GetParam());
  uint64_t uuid = 100;
  const auto run = [&](size_t lives) {
    for (size_t life = 0; life < lives && !HasFatalFailure(); ++life) {
      live(endpoints, uuid += 2, life);
    }
  };
  const auto both = [&] { endpoints[0]->progress(), endpoints[1]->progress(); };
  run(20);
  for (int i = 0; i < 1000; ++i) both();
  const Used before;
  std::printf("%s\n", before.text().c_str());
  run(200);
  until([&] { return Used().within(before); }, both,
        [&] { return "before: " + before.text() + ", now: " + Used().text(); });
}

size_t sockets() {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // the iteration's own
    const auto target = std::filesystem::read_symlink(entry.path(), gone);
    count += !gone && target.string().starts_with("socket:") ? 1 : 0;
  }
  return count;
}

// What is mapped twice, by its owner and by a peer, counts once.
size_t proportional_bytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  std::string word;
  size_t kib = 0;
  while (file >> word && word != "Pss:") {
  }
  file >> kib;
  return kib * 1024;
}

// Promise(collectives): One more group takes no socket, and 1 MiB of memory of each of 4 ranks at
//   most, over tcp too where each talks to all others | counted after its first calls
TEST_P(Groups, OneMoreGroupTakesLittleMemoryAndNoSocket) {
  constexpr int kRanks = 4, kGroups = 16;
  if (kSanitized) GTEST_SKIP() << "a sanitizer's own memory counts";
  const auto endpoints = open_endpoints(kRanks, GetParam());
  size_t more_sockets = 0, more_bytes = 0;
  run_endpoints(endpoints, 7, [&](Communicator& comm) {
    std::vector<std::unique_ptr<Communicator>> groups;
    const auto make = [&](int count) {
      for (int i = 0; i < count; ++i) {
        groups.push_back(*comm.subgroup({0, 1, 2, 3}, group_options(0)));
        for (int call = 0; call < 20; ++call) {
          ASSERT_EQ(sum_of(*groups.back()), expected_sum(kRanks));
        }
      }
      ASSERT_EQ(comm.barrier(), absl::OkStatus());
    };
    make(4);
    const size_t sockets_before = sockets(), bytes_before = proportional_bytes();
    ASSERT_EQ(comm.barrier(), absl::OkStatus());
    make(kGroups);
    for (const auto& group : groups) EXPECT_LE(group->stats().link_bytes, size_t{1} << 20);
    if (comm.rank() == 0) {
      more_sockets = sockets() - sockets_before;
      more_bytes = proportional_bytes() - bytes_before;
    }
    ASSERT_EQ(comm.barrier(), absl::OkStatus());
  });
  EXPECT_EQ(more_sockets, 0u);
  // Over tcp with what the last slab has left.
  const size_t slabs = GetParam() == "shm" ? 0 : kRanks * (size_t{16} << 20);
  EXPECT_LE(more_bytes, slabs + kGroups * kRanks * (size_t{1} << 20));
  RecordProperty("bytes_of_a_group_at_a_rank", static_cast<int>(more_bytes / kGroups / kRanks));
}

INSTANTIATE_TEST_SUITE_P(Providers, Groups, testing::Values("shm", "tcp"),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace baton
