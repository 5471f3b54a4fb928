// What goes on where ranks and callbacks do what they should not: others hear of it, and go on.
#include "collectives/internal/endpoint_impl.h"
#include "tests/communicator/endpoints.h"
#include "tests/manual_clock.h"

namespace baton {
namespace {

using collectives::internal::ControlMessage;
using collectives::internal::EndpointImpl;

class Misuse : public testing::TestWithParam<std::string> {};

// Promise(collectives): A rank that starts a group which another has left hears so at once | not
//   when its start's time is over
TEST_P(Misuse, AGroupThatARankHasLeftBeforeFails) {
  const auto endpoints = open_endpoints(2, GetParam());
  const auto handles = handles_of(endpoints);
  GroupOptions patient = group_options(7);
  patient.start_timeout = kNever;
  Communicator::create(endpoints[1], handles, patient)->reset();
  auto comm = must(Communicator::create(endpoints[0], handles, patient));
  until([&] { return comm->state() == GroupState::kBroken; },
        [&] { endpoints[0]->progress(), endpoints[1]->progress(); });
  EXPECT_THAT(comm->status(), fails_with(Code::kUnavailable, {"rank 1", "left"}));
}

// As many as nothing can have are cut down like any that are too many for the group's size.
TEST_P(Misuse, SlotsOfAnySizeAreCutToWhatTheGroupMayHave) {
  const auto endpoints = open_endpoints(2, GetParam());
  const auto handles = handles_of(endpoints);
  uint64_t uuid = 10;
  for (const size_t bytes :
       {size_t{1} << 30, size_t{1} << 58, size_t{1} << 59, size_t{1} << 62, ~size_t{4095}}) {
    GroupOptions group = group_options(++uuid);
    group.slot_bytes = bytes;
    on_threads(2, [&](int rank) {
      auto comm = must(Communicator::create(endpoints[rank], handles, group));
      EXPECT_EQ(sum_of(*comm, 1, 3 << 20), 3) << "slots of " << bytes;
    });
  }
}

struct Owner {
  std::unique_ptr<Communicator> comm;
  std::atomic<bool> gone{false};
  static void destroy(void* context, Work, const absl::Status&) {
    auto& self = *static_cast<Owner*>(context);
    self.comm.reset();
    self.gone = true;
  }
};

// Promise(collectives): A callback may destroy its own communicator: the group is left, and nothing
//   hangs | while the call is waited for, and by the background thread
TEST_P(Misuse, ACallbackDestroysItsCommunicator) {
  for (const bool background : {false, true}) {
    const auto endpoints = open_endpoints(2, GetParam(), background);
    run_endpoints(endpoints, 7, [&](Communicator& comm) {
      Owner owner;
      owner.comm = *comm.subgroup({0, 1}, group_options(0));
      CallOptions call;
      call.context = &owner;
      call.on_end = &Owner::destroy;
      Communicator& group = *owner.comm;
      const auto work = must(group.barrier_async(call));
      if (background) {
        until([&] { return owner.gone.load(); });
      } else {
        EXPECT_EQ(group.wait(work), absl::OkStatus());
        EXPECT_TRUE(owner.gone);
      }
      EXPECT_EQ(sum_of(comm), 3);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Providers, Misuse, testing::Values("shm", "tcp"),
                         [](const auto& param) { return param.param; });

// A group without calls.
class IdleGroup final : public EndpointImpl::Group {
 public:
  explicit IdleGroup(int& asked) : asked_(asked) {}
  void on_control_message(collectives::internal::Process&, ControlMessage,
                          std::string_view) override {}
  void on_ready(collectives::internal::Process&) override {}
  void on_goodbye(collectives::internal::Process&) override {}
  void on_down(collectives::internal::Process&, const absl::Status&) override {}
  bool busy() const override { return ++asked_, false; }
  bool advance() override { return ++asked_, false; }
  void look(Time) override { ++asked_; }
  bool idle() const override { return ++asked_, true; }
  void set_sleeping(uint32_t) override { ++asked_; }

 private:
  int& asked_;
};

// Promise(collectives): Groups without calls cost a waiting thread nothing, however many | what is
//   asked of them is counted
TEST(IdleGroups, AreNotAskedInEveryTurn) {
  ManualClock clock;
  EndpointOptions options = endpoint_options("shm");
  options.worker.clock = &clock;
  auto endpoint = *EndpointImpl::open(options);
  int asked = 0;
  std::vector<std::unique_ptr<IdleGroup>> groups;
  for (uint64_t id = 1; id <= 1000; ++id) {
    groups.push_back(std::make_unique<IdleGroup>(asked));
    ASSERT_TRUE(endpoint->add_group(id, *groups.back()).ok());
  }
  const auto turn = [&] {
    clock.advance(std::chrono::milliseconds(2));
    endpoint->progress();
    endpoint->begin_sleep();
    endpoint->end_sleep();
  };
  turn();
  asked = 0;
  for (int i = 0; i < 100; ++i) turn();
  EXPECT_EQ(asked, 0);
  endpoint->wake(*groups[500]);
  turn();
  EXPECT_GT(asked, 0);
  asked = 0;
  for (int i = 0; i < 100; ++i) turn();
  EXPECT_EQ(asked, 0);
  for (uint64_t id = 1; id <= 1000; ++id) endpoint->remove_group(id, nullptr);
}

}  // namespace
}  // namespace baton
