// Windows whose ranks ask for too much, come too late, do not answer, or are stopped.
#include <malloc.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <csignal>

#include "tests/captured_log.h"
#include "tests/communicator/endpoints.h"
#include "tests/communicator/over_providers.h"
#include "tests/manual_clock.h"
#include "tests/test.h"
#include "tests/until.h"
#include "transport/base/child.h"
#include "transport/base/unique_fd.h"

namespace baton {
namespace {

using testing::HasSubstr;

constexpr Time kLongStart = std::chrono::seconds(60);

class WindowFaults : public OverProviders {};

// Counters of 48 bits would begin again at 0.
TEST_P(WindowFaults, ACounterThatCannotRiseFurtherIsNotRaised) {
  run_group(2, options(), [](Communicator& comm) {
    auto window = window_of(comm, 100, 2);
    ASSERT_NE(window, nullptr);
    constexpr uint64_t kMost = (uint64_t{1} << 48) - 1;
    const int other = 1 - comm.rank();
    for (const int to : {other, comm.rank()}) {
      ASSERT_EQ(ended(comm, window->signal(to, 0, kMost - 1)), absl::OkStatus());
      ASSERT_EQ(ended(comm, window->signal(to, 0, 1)), absl::OkStatus());
      const char data = 1;
      for (const absl::Status& status : {window->signal(to, 0, 1).status(),
                                         window->put_signal(&data, 1, to, 0, 0, kMost).status()}) {
        EXPECT_THAT(status,
                    fails_with(Code::kInvalidArgument,
                               {"281474976710655 that this rank added before", "2^48 - 1"}));
      }
      EXPECT_EQ(ended(comm, window->signal(to, 1, 1)), absl::OkStatus());
    }
    for (const int from : {other, comm.rank()}) {
      EXPECT_EQ(ended(comm, window->wait_signal(from, 0, kMost)), absl::OkStatus());
      EXPECT_EQ(*window->signal_value(from, 0), kMost);
    }
    EXPECT_EQ(comm.barrier(), absl::OkStatus());
  });
}

// Promise(collectives): Behind a put that never began, since its time was over, no signal says that
//   its bytes are there | it is refused as behind one that failed on its way
TEST_P(WindowFaults, APutThatComesTooLateFailsWhatComesBehindIt) {
  run_group(2, options(), [](Communicator& comm) {
    constexpr size_t kLongPut = 10'000;
    auto window = window_of(comm, kLongPut);
    auto other = window_of(comm, 100);
    ASSERT_TRUE(window != nullptr && other != nullptr);
    if (comm.rank() == 0) {
      CallOptions hasty;
      hasty.timeout = std::chrono::nanoseconds(1);
      hasty.detached = true;
      // More than what is over at once.
      std::vector<std::byte> data(kLongPut);
      ASSERT_TRUE(other->get(data.data(), 1, 1, 0, hasty).ok());
      ASSERT_TRUE(window->put(data.data(), kLongPut, 1, 0, hasty).ok());
      const absl::Status signal = ended(comm, window->signal(1, 0, 1));
      EXPECT_THAT(text(signal), HasSubstr("an earlier access has failed: put of 10000 bytes"));
      for (const int to : {1, kAnyRank, 1}) {
        EXPECT_THAT(ended(comm, window->flush(to)),
                    fails_with(Code::kDeadlineExceeded, {"put of 10000 bytes at 0 to rank 1"}));
      }
      // A get that failed changes nothing for others.
      EXPECT_THAT(text(ended(comm, other->flush())), HasSubstr("get of 1 bytes at 0 from rank 1"));
      EXPECT_EQ(ended(comm, other->flush()), absl::OkStatus());
      EXPECT_EQ(ended(comm, other->signal(1, 0, 1)), absl::OkStatus());
    } else {
      EXPECT_EQ(ended(comm, other->wait_signal(0, 0, 1)), absl::OkStatus());
      EXPECT_EQ(*window->signal_value(0, 0), 0u);
    }
    EXPECT_EQ(comm.barrier(), absl::OkStatus());
  });
}

// Promise(collectives): An access ends when its time is over, or its window is destroyed, though
//   its target answers nothing, and the group goes on | over the network as soon as this rank's
//   memory is its own again
TEST_P(WindowFaults, ATargetThatDoesNotAnswerHoldsNobodyUp) {
  constexpr size_t kMuch = 32 << 20;
  ManualClock clock;
  CommunicatorOptions own = options();
  own.worker.clock = &clock;
  for (const bool destroy : {false, true}) {
    std::atomic<bool> made{false}, over{false};
    run_group(2, own, [&](Communicator& comm) {
      auto window = window_of(comm, kMuch);
      made = made || comm.rank() == 0;
      ASSERT_NE(window, nullptr);
      if (comm.rank() == 1) {
        // Its last words for the other's window may still be on their way.
        until([&] {
          comm.progress();
          return made.load();
        });
        until([&] { return over.load(); });
      } else {
        std::vector<std::byte> data(kMuch), out(kMuch);
        CallOptions hasty;
        hasty.timeout = std::chrono::seconds(1);
        std::vector<Work> works;
        for (const auto& work : {window->put(data.data(), kMuch, 1, 0, hasty),
                                 window->get(out.data(), kMuch, 1, 0, hasty),
                                 window->signal(1, 0, 1, hasty), window->flush(1, hasty)}) {
          ASSERT_TRUE(work.ok()) << work.status();
          works.push_back(*work);
        }
        for (int turn = 0; turn < 50; ++turn) comm.progress();
        destroy ? window.reset() : clock.advance(std::chrono::seconds(2));
        for (const Work work : works) {
          std::optional<absl::Status> status;
          until([&] { return (status = comm.test(work)).has_value(); });
          // Where the origin moves the bytes they may be there.
          EXPECT_TRUE(destroy ? status->ok() || absl::IsAborted(*status)
                              : status->ok() || absl::IsDeadlineExceeded(*status))
              << *status;
        }
        std::memset(out.data(), 7, kMuch);
        data = {};
        over = true;
        EXPECT_EQ(comm.barrier(), absl::OkStatus());
        EXPECT_TRUE(out == std::vector<std::byte>(kMuch, std::byte{7}))
            << "bytes of a get landed behind its end";
        return;
      }
      EXPECT_EQ(comm.barrier(), absl::OkStatus());
    });
  }
}

// What a window's ranks tell each other, as windows_open.cc has it.
struct ForgedInvitation {
  uint64_t magic = 0x77696e646f773032;
  uint64_t bytes = 0, offset = 0;
  int32_t code = 0;
  uint32_t unused = 0;
  char region[RemoteRegion::kEncodedBytes] = {};
  char why[176] = {};
  uint64_t counter = 0;
};
static_assert(sizeof(ForgedInvitation) == 264);

// Promise(collectives): What another rank tells of its window is checked before it is used | places
//   outside of its memory, no key at all, a text without an end
TEST_P(WindowFaults, WhatARankTellsOfItsWindowIsChecked) {
  run_group(2, options(), [](Communicator& comm) {
    std::vector<std::byte> memory(4096);
    const auto region = comm.worker().register_memory(memory.data(), memory.size());
    ASSERT_TRUE(region.ok()) << region.status();
    const std::string key = comm.worker().remote_region(*region)->encode();
    struct Case {
      const char* says;
      std::function<void(ForgedInvitation&)> forge;
    };
    const Case cases[] = {
        {"rank 1",
         [](ForgedInvitation& of) {
           of.code = 8;
           std::fill(std::begin(of.why), std::end(of.why), 'x');
           of.counter = ~uint64_t{0};
         }},
        {"not a RemoteRegion", [](ForgedInvitation& of) { of.bytes = 1; }},
        {"same calls in the same order", [](ForgedInvitation& of) { of.magic = 0; }},
        {"outside of its memory", [&](ForgedInvitation& of) { of.bytes = 4097; }},
        {"outside of its memory", [&](ForgedInvitation& of) { of.offset = 4097, of.bytes = 1; }},
        {"outside of its memory", [&](ForgedInvitation& of) { of.offset = 1, of.bytes = 4096; }},
        {"outside of its memory",
         [&](ForgedInvitation& of) { of.offset = 1, of.bytes = SIZE_MAX; }},
    };
    for (const Case& c : cases) {
      SCOPED_TRACE(c.says);
      if (comm.rank() == 0) {
        const auto window = Window::allocate(comm, 100);
        EXPECT_FALSE(window.ok());
        EXPECT_THAT(text(window.status()), HasSubstr(c.says));
        EXPECT_LT(text(window.status()).size(), 300u) << window.status();
      } else {
        ForgedInvitation forged[2], out[2];
        if (std::string_view(c.says) == "outside of its memory") {
          key.copy(forged[0].region, sizeof forged[0].region);
        }
        c.forge(forged[0]);
        EXPECT_EQ(comm.all_to_all(forged, out, sizeof forged[0], DataType::kU8), absl::OkStatus());
      }
    }
    EXPECT_EQ(comm.barrier(), absl::OkStatus());
    EXPECT_EQ(comm.worker().deregister_memory(*region), absl::OkStatus());
  });
}

TEST_P(WindowFaults, ARankWithoutCountersIsNamed) {
  run_group(2, options(), [](Communicator& comm) {
    window_of(comm, 100).reset();  // what the links need is there
    std::vector<CounterId> counters;
    while (comm.rank() == 1) {
      const auto counter = comm.worker().allocate_counter();
      if (!counter.ok()) break;
      counters.push_back(*counter);
    }
    const auto window = Window::allocate(comm, 100);
    EXPECT_TRUE(absl::IsResourceExhausted(window.status())) << window.status();
    EXPECT_EQ(text(window.status()).find("rank 1") != std::string::npos, comm.rank() == 0);
    for (const CounterId counter : counters) {
      EXPECT_EQ(comm.worker().free_counter(counter), absl::OkStatus());
    }
    ASSERT_EQ(comm.barrier(), absl::OkStatus());
    EXPECT_TRUE(Window::allocate(comm, 100).ok());
  });
}

// --- a process that is stopped -------------------------------------------------------------------

// A rank in a process of its own.
struct WindowRank {
  WindowRank(int rank, int other, const char* fence_ms) {
    EndpointOptions options;
    options.worker.providers = {"shm"};
    options.worker.key = test_key();
    options.worker.settings = {{"shm.fence_ms", fence_ms}};
    endpoint = *Endpoint::open(options);
    std::string bytes = endpoint->handle().bytes();
    std::vector<Handle> handles(2, endpoint->handle());
    const auto all = static_cast<ssize_t>(bytes.size());
    EXPECT_EQ(send(other, bytes.data(), bytes.size(), MSG_NOSIGNAL), all);
    EXPECT_EQ(recv(other, bytes.data(), bytes.size(), MSG_WAITALL), all);
    handles[1 - rank] = *Handle::decode(bytes);
    GroupOptions group;
    group.uuid = 1;
    comm = *Communicator::create(endpoint, handles, group);
  }
  std::shared_ptr<Endpoint> endpoint;
  std::unique_ptr<Communicator> comm;
};

// A child that puts to a window of this process again and again, and was stopped at it.
struct StoppedPut {
  static constexpr size_t kMuch = 32 << 20;
  explicit StoppedPut(const char* fence_ms) {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    const base::UniqueFd here(ends[0]), there(ends[1]);
    child = base::fork_child();
    if (child == 0) {
      WindowRank origin(0, there.get(), fence_ms);
      auto target = Window::allocate(*origin.comm, kMuch);
      const std::vector<std::byte> data(kMuch, std::byte{1});
      while (target.ok() && ended(*origin.comm, (*target)->put(data.data(), kMuch, 1, 0)).ok()) {
      }
      _exit(0);
    }
    self.emplace(1, here.get(), fence_ms);
    window = window_of(*self->comm, kMuch);
    const auto* first = reinterpret_cast<const std::atomic<char>*>(window->data());
    until([&] { return first->load() != 0; }, [&] { self->comm->progress(); });
    kill(child, SIGSTOP);
    waitpid(child, nullptr, WUNTRACED);
  }
  ~StoppedPut() {
    if (window != nullptr) kill(child, SIGKILL);  // a test that failed
    wait_for_end();
  }
  void wait_for_end() {
    if (child < 0) return;
    kill(child, SIGCONT);
    until([&] { return waitpid(child, nullptr, WNOHANG) == child; },
          [&] { self->comm->progress(); });
    child = -1;
  }
  pid_t child = -1;
  std::optional<WindowRank> self;
  std::unique_ptr<Window> window;
};

// Whether the child was stopped in the middle of a copy.
bool destroy_beside_a_stopped_put() {
  constexpr size_t kMuch = StoppedPut::kMuch;
  std::optional<StoppedPut> stopped("20");
  const std::byte* const place = stopped->window->data();
  bool copying = false;
  {
    CapturedLog log(base::LogLevel::kWarning);
    stopped->window.reset();
    for (const std::string& line : log.lines) {
      copying |= line.find("may still be written to") != std::string::npos;
    }
  }
  Communicator& comm = *stopped->self->comm;
  auto next = must(comm.allocate(kMuch));
  if (copying) {
    EXPECT_TRUE(next.data + kMuch <= place || place + kMuch <= next.data)
        << "memory that may still be written to is used again";
  }
  stopped->wait_for_end();
  EXPECT_EQ(std::memcmp(next.data, std::vector<std::byte>(kMuch).data(), kMuch), 0);
  return copying;
}

// Promise(collectives): Memory of a window that a stopped process may still write to is not used
//   again | a put that is stopped in the middle of a copy, while its target destroys its window
TEST(WindowsOfProcesses, MemoryThatAStoppedOneMayWriteToIsNotUsedAgain) {
  until([] { return destroy_beside_a_stopped_put(); });
}

// Whether the child was stopped in the middle of a copy, so that its target waited.
bool sum_beside_a_stopped_put() {
  constexpr int kSums = 100;
  std::optional<StoppedPut> stopped("3600000");
  const std::vector<std::shared_ptr<Endpoint>> endpoints = {stopped->self->endpoint,
                                                            open_endpoints(1, "shm")[0]};
  const auto comms = group_of(endpoints, 2);
  std::atomic<int> sums{0};
  std::atomic<bool> destroyed{false};
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    stopped->window.reset();
    destroyed = true;
  });
  // Lets the threads come to their ends, whatever the test has found.
  struct Ending {
    ~Ending() {
      kill(child, SIGCONT);
      for (std::thread& thread : threads) thread.join();
    }
    std::vector<std::thread>& threads;
    pid_t child;
  };
  const Ending ending{threads, stopped->child};
  for (const auto& comm : comms) {
    threads.emplace_back([&] {
      for (int i = 0; i < kSums; ++i) {
        ASSERT_EQ(sum_of(*comm), 3);
        ++sums;
      }
    });
  }
  until([&] { return sums == 2 * kSums || destroyed; });
  return !destroyed;
}

// Promise(collectives): While a window that is destroyed waits for a process that is stopped in a
//   copy to it, the other groups of the endpoint go on | 100 sums before the process is woken
TEST(WindowsOfProcesses, AStoppedOneHoldsUpNoOtherGroup) {
  until([] { return sum_beside_a_stopped_put(); });
}

// --- and another group ---------------------------------------------------------------------------

class NextWindows : public testing::TestWithParam<std::string> {};

// Promise(collectives): A put that failed in one group holds back no word of the next one | another
//   process takes the rank of one that is gone
TEST_P(NextWindows, AreNotHeldBackByWhatFailedBefore) {
  auto endpoints = open_endpoints(2, GetParam());
  auto handles = handles_of(endpoints);
  auto comms = group_of(endpoints, 7);
  std::vector<std::unique_ptr<Window>> windows(2);
  const auto make = [&](int rank) {
    windows[rank] = must(Window::allocate(*comms[rank], sizeof(uint64_t), {.words = true}));
  };
  const auto add = [&] {
    CallOptions options;
    options.tag = 5;
    return ended(*comms[0], windows[0]->put_add(nullptr, 0, 1, 0, {*windows[0]}, options));
  };
  on_threads(2, make);
  windows[1].reset();
  comms[1].reset();
  endpoints[1].reset();
  until([&] { return !add().ok(); });
  endpoints[1] = open_endpoints(1, GetParam())[0];
  handles[1] = endpoints[1]->handle();
  on_threads(2, [&](int rank) {
    if (rank == 0) {
      ASSERT_EQ(ended(*comms[0], comms[0]->reconfigure(handles, 8, kLongStart)), absl::OkStatus());
    } else {
      comms[1] = *Communicator::create(endpoints[1], handles, group_options(8));
    }
    make(rank);
    if (rank == 0) {
      EXPECT_EQ(add(), absl::OkStatus());
    } else {
      const auto* word = reinterpret_cast<const std::atomic<uint64_t>*>(windows[1]->data());
      until([&] { return word->load() == 1; }, [&] { comms[1]->progress(); });
    }
    EXPECT_EQ(comms[rank]->barrier(), absl::OkStatus());
  });
}

// Promise(collectives): Tags of accesses that are over take no memory | 10,000 of them
TEST_P(NextWindows, RememberNoTagsOfAccessesThatAreOver) {
  run_endpoints(open_endpoints(2, GetParam()), 7, [](Communicator& comm) {
    auto window = must(Window::allocate(comm, 2 * sizeof(uint64_t), {.words = true}));
    size_t before = 0, after = 0;
    for (int tag = 0; comm.rank() == 0 && tag < 11'000; ++tag) {
      CallOptions options;
      options.tag = tag;
      const int data = tag;
      ASSERT_EQ(ended(comm, window->put_add(&data, sizeof data, 1, 8, {*window}, options)),
                absl::OkStatus());
      if (tag == 1000) before = mallinfo2().uordblks;
      after = mallinfo2().uordblks;
    }
    ASSERT_EQ(comm.barrier(), absl::OkStatus());
    EXPECT_LE(after, before + (size_t{128} << 10));
  });
}

INSTANTIATE_TEST_SUITE_P(Providers, NextWindows, testing::Values("shm", "tcp"),
                         [](const auto& param) { return param.param; });

INSTANTIATE_TEST_SUITE_P(Providers, WindowFaults,
                         testing::Values("shm", "tcp", "ucx", "verbs_fake"),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace baton
