// A communicator takes other members in place: fewer, more, all others, after an abort.
#include "collectives/window.h"
#include "tests/communicator/endpoints.h"
#include "tests/test.h"

namespace baton {
namespace {

using testing::HasSubstr;

constexpr Time kLong = std::chrono::seconds(60);

class Reconfigure : public testing::TestWithParam<std::string> {
 public:
  static void SetUpTestSuite() { setenv("BATON_FLIGHT_RECORDER", "none", 1); }
};

absl::Status reconfigure(Communicator& comm, absl::Span<const Handle> handles, uint64_t uuid,
                         Time timeout = kLong) {
  const auto work = comm.reconfigure(handles, uuid, timeout);
  return work.ok() ? comm.wait(*work) : work.status();
}

// Processes, by number; who is in no group makes a communicator, who is in one reconfigures it.
struct Step {
  std::string what;
  std::vector<std::vector<int>> groups;  // disjoint, each in rank order
  bool after_abort = false;
};

// Promise(collectives): reconfigure() takes a communicator to other members in place, over the
//   connections that are there | shrink, grow, merge, split, all new, late join, after an abort
TEST_P(Reconfigure, MembersComeAndGo) {
  const std::vector<Step> steps = {
      {"the first group", {{0, 1, 2}}},
      {"shrink at the end", {{0, 1}}},
      {"grow by one that was there", {{0, 1, 2}}},
      {"shrink at the beginning", {{1, 2}}},
      {"grow at the beginning", {{0, 1, 2}}},
      {"shrink in the middle", {{0, 2}}},
      {"the same", {{0, 2}}},
      {"another order", {{2, 0}}},
      {"a late one joins", {{2, 0, 3}}},
      {"one alone, and all others", {{3}, {1, 0, 2, 4}}},
      {"merge", {{4, 3, 2, 1, 0}}},
      {"two groups", {{0, 2, 4}, {1, 3}}},
      {"all new at either side", {{1, 3}, {4, 2, 0}}},
      {"after an abort", {{0, 1, 2, 3, 4}}, true},
      {"again after an abort, fewer", {{4, 1}}, true},
  };
  const auto endpoints = open_endpoints(5, GetParam());
  const auto handles = handles_of(endpoints);
  std::vector<std::unique_ptr<Communicator>> comms(endpoints.size());
  uint64_t uuid = 100;
  for (const Step& step : steps) {
    SCOPED_TRACE(step.what);
    std::vector<std::pair<int, const std::vector<int>*>> members;
    std::vector<uint64_t> uuids;
    for (const auto& group : step.groups) {
      uuids.push_back(++uuid);
      for (const int one : group) members.emplace_back(one, &group);
    }
    on_threads(members.size(), [&](int i) {
      const auto [me, group] = members[i];
      const uint64_t id = uuids[group - step.groups.data()];
      std::vector<Handle> list;
      for (const int one : *group) list.push_back(handles[one]);
      if (comms[me] == nullptr) {
        comms[me] = must(Communicator::create(endpoints[me], list, group_options(id)));
        ASSERT_EQ(comms[me]->wait_ready(), absl::OkStatus());
      } else {
        if (step.after_abort) comms[me]->abort(absl::CancelledError("over"));
        ASSERT_EQ(reconfigure(*comms[me], list, id), absl::OkStatus());
      }
      ASSERT_EQ(comms[me]->ranks(), static_cast<int>(group->size()));
      ASSERT_EQ((*group)[comms[me]->rank()], me);
      ASSERT_EQ(comms[me]->handles(), list);
      for (const size_t count : {size_t{10}, size_t{50000}}) {
        ASSERT_EQ(sum_of(*comms[me], 1, count), expected_sum(comms[me]->ranks()));
      }
      Communicator& comm = *comms[me];
      if (comm.ranks() == 1) return;
      const int before = (comm.rank() + comm.ranks() - 1) % comm.ranks();
      int32_t mine = comm.rank(), theirs = -1;
      const auto sent =
          must(comm.send_async(&mine, 1, DataType::kI32, (comm.rank() + 1) % comm.ranks()));
      ASSERT_EQ(comm.receive(&theirs, 1, DataType::kI32, kAnyRank), absl::OkStatus());
      ASSERT_EQ(theirs, before);
      ASSERT_EQ(comm.wait(sent), absl::OkStatus());
    });
  }
}

TEST_P(Reconfigure, CallsInFlightEndFirstAndTheirResultsStay) {
  const auto endpoints = open_endpoints(2, GetParam());
  const auto handles = handles_of(endpoints);
  run_endpoints(endpoints, 7, [&](Communicator& comm) {
    ASSERT_EQ(comm.barrier(), absl::OkStatus());
    float data = 0;
    auto work = comm.receive_async(&data, 1, DataType::kF32, 1 - comm.rank());
    // The other's reconfigure() may have ended this group already.
    const bool begun = work.ok();
    ASSERT_EQ(reconfigure(comm, {handles[1], handles[0]}, 8), absl::OkStatus());
    if (begun) {
      EXPECT_THAT(comm.wait(*work), fails_with(Code::kAborted, {"reconfigures the group"}));
    }
    EXPECT_EQ(sum_of(comm), 3);
    EXPECT_EQ(comm.lost_ranks(), std::vector<int>());
    EXPECT_EQ(comm.status(), absl::OkStatus());
  });
}

// What it had sent is not free at once: it is when the worker has had a turn.
TEST_P(Reconfigure, WhatIsOnItsWayDoesNotHoldItUp) {
  for (const bool background : {false, true}) {
    ManualClock clock;
    const auto while_time_goes_on = [&](const std::function<void()>& body) {
      std::atomic<bool> over{false};
      std::thread ticks([&] {
        LetOthersRun turn;
        until([&] { return over.load(); },
              [&] {
                clock.advance(std::chrono::milliseconds(1));
                turn();
              });
      });
      body();
      over = true;
      ticks.join();
    };
    EndpointOptions of_first = endpoint_options(GetParam());
    of_first.worker.clock = &clock;
    of_first.background = background;
    const std::vector<std::shared_ptr<Endpoint>> endpoints = {*Endpoint::open(of_first),
                                                              open_endpoints(1, GetParam())[0]};
    const auto handles = handles_of(endpoints);
    std::vector<std::unique_ptr<Communicator>> comms;
    while_time_goes_on([&] { comms = group_of(endpoints, 7); });
    std::vector<float> data(1 << 18, 1);
    const auto old = must(comms[0]->all_reduce_async(data.data(), data.data(), data.size(),
                                                     DataType::kF32, ReduceOp::kSum));
    const auto work = must(comms[0]->reconfigure({handles[0]}, 8, kLong));
    // The old group's calls end before it is time to look at anything else.
    EXPECT_TRUE(absl::IsAborted(comms[0]->wait(old)));
    while_time_goes_on([&] { EXPECT_EQ(comms[0]->wait(work), absl::OkStatus()); });
    EXPECT_EQ(sum_of(*comms[0]), 1);
  }
}

// Promise(collectives): Works that have ended do not hold up a reconfigure(), and can be waited for
//   behind it | as many as there is room for
TEST_P(Reconfigure, WorksThatNoCallerHasWaitedForDoNotHoldItUp) {
  const auto endpoints = open_endpoints(2, GetParam());
  const auto handles = handles_of(endpoints);
  std::atomic<int> full{0};
  run_endpoints(endpoints, 7, [&](Communicator& comm) {
    auto window = must(Window::allocate(comm, 8));
    const auto signal = [&] { return window->signal(comm.rank(), 0, 1); };
    std::vector<Work> works;
    for (auto work = signal(); work.ok(); work = signal()) works.push_back(*work);
    EXPECT_EQ(works.size(), 4096u);
    ++full;
    until([&] { return full == 2; }, [&] { comm.progress(); });
    ASSERT_EQ(reconfigure(comm, handles, 8), absl::OkStatus());
    EXPECT_THAT(text(comm.barrier()), HasSubstr("wait() for the first of them"));
    for (const Work& work : works) ASSERT_EQ(comm.wait(work), absl::OkStatus());
    EXPECT_EQ(sum_of(comm), 3);
  });
}

TEST_P(Reconfigure, WhatMakesNoSenseChangesNothing) {
  const auto endpoints = open_endpoints(2, GetParam());
  const auto handles = handles_of(endpoints);
  run_endpoints(endpoints, 7, [&](Communicator& comm) {
    ASSERT_EQ(comm.barrier(), absl::OkStatus());
    EXPECT_TRUE(absl::IsAlreadyExists(reconfigure(comm, handles, 7)));
    EXPECT_TRUE(absl::IsInvalidArgument(reconfigure(comm, {}, 8)));
    EXPECT_TRUE(absl::IsInvalidArgument(reconfigure(comm, {handles[1 - comm.rank()]}, 8)));
    EXPECT_EQ(sum_of(comm), 3);
  });
}

// Promise(collectives): A reconfigure() that others do not join ends at its timeout |
//   the error names them; another uuid may be tried
TEST_P(Reconfigure, MissingMembersAreNamed) {
  const auto endpoints = open_endpoints(2, GetParam());
  const auto handles = handles_of(endpoints);
  std::atomic<bool> named{false};
  run_endpoints(endpoints, 7, [&](Communicator& comm) {
    ASSERT_EQ(comm.barrier(), absl::OkStatus());
    if (comm.rank() == 1) {
      until([&] { return named.load(); }, [&] { comm.progress(); });
    } else {
      EXPECT_THAT(reconfigure(comm, handles, 8, std::chrono::milliseconds(100)),
                  fails_with(Code::kDeadlineExceeded, {"could not connect", "rank 1"}));
      EXPECT_EQ(comm.state(), GroupState::kBroken);
      named = true;
    }
    EXPECT_EQ(reconfigure(comm, handles, 9), absl::OkStatus());
    EXPECT_EQ(sum_of(comm), 3);
  });
}

// One process dies, the others go on in place, and a new one takes its rank.
TEST_P(Reconfigure, AnotherProcessTakesTheRankOfOneThatDied) {
  auto endpoints = open_endpoints(3, GetParam());
  auto handles = handles_of(endpoints);
  auto comms = group_of(endpoints, 7);
  comms[1].reset();
  endpoints[1].reset();
  on_threads(2, [&](int i) {
    Communicator& comm = *comms[2 * i];
    EXPECT_FALSE(comm.barrier().ok());
    ASSERT_EQ(reconfigure(comm, {handles[0], handles[2]}, 8), absl::OkStatus());
    ASSERT_EQ(sum_of(comm), 3);
  });
  endpoints[1] = open_endpoints(1, GetParam())[0];
  handles[1] = endpoints[1]->handle();
  on_threads(3, [&](int rank) {
    if (rank == 1) {
      comms[1] = *Communicator::create(endpoints[1], handles, group_options(9));
      ASSERT_EQ(comms[1]->wait_ready(), absl::OkStatus());
    } else {
      ASSERT_EQ(reconfigure(*comms[rank], handles, 9), absl::OkStatus());
    }
    ASSERT_EQ(sum_of(*comms[rank]), 6);
  });
}

INSTANTIATE_TEST_SUITE_P(Providers, Reconfigure, testing::Values("shm", "tcp"),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace baton
