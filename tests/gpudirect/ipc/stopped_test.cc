// A process that shares memory of a device is stopped at some step of that memory's life. Nobody
// else waits for it; who parts with it gets his memory back, or hears that he does not; and when it
// goes on it moves no byte any more, hears that it is out, and gives back what it has. Or it is
// killed where it stands.
//
// Here three steps of each way and side; BATON_CASES=all is thirty.
#include "tests/gpudirect/ipc/device_end.h"
#include "tests/std.h"
#include "tests/used.h"

namespace baton {
namespace {

using std::chrono::milliseconds;

struct Stopping {
  const char* name;
  const char* provider;
  bool malloc = false;  // memory of cudaMalloc; or by virtual memory management
  bool lent = false;    // staged, from one's ring to the other's device
};

constexpr std::string_view kOut = "\nout";

struct Case {
  Stopping way;
  bool child_maps = true;  // it writes and reads this side's memory; or the other way round
  uint64_t step = 0;       // of the child's calls of the driver; 0: it is not stopped
  bool ended = false;      // the call has ended; or it begins
  bool killed = false;     // where it stands; or it goes on
};

// Ends with 0 where nothing is left and nothing was wrong, stopped or not.
void live_as_child(const Case& what, Pipe& down, Pipe& up) {
  uint64_t steps = 0;
  bool out = false;
  {
    CleanFake fake({.ipc_handles = !what.way.lent});
    {
      End end(fake, what.way.provider);
      fake.fake().at_step(what.step, what.ended, [] { raise(SIGSTOP); });
      what.way.malloc ? end.make_by_malloc() : end.make();
      if (what.child_maps) {
        std::string offered = down.hear();
        if (offered.empty()) _exit(1);
        out = offered.ends_with(kOut);
        if (out) offered.resize(offered.size() - kOut.size());
        const bool done = end.exchange(offered) &&
                          (!what.way.lent || (end.lent() && end.exchange_again(offered)));
        EXPECT_TRUE(done || what.step != 0);
        up.say("done");
      } else {
        up.say(end.offer());
      }
      // The other one has parted with it, if they ever met.
      fcntl(down.ends[0], F_SETFL, O_NONBLOCK);
      end.until([&] {
        out |= down.hear() == kOut;
        return out && end.worker->stats().peers_up == 0;
      });
      end.give_back();
      end.worker.reset();
    }
    steps = fake.fake().steps();
    fake.fake().at_step(0, false, nullptr);
  }
  up.say(std::to_string(steps));
  _exit(testing::Test::HasFailure() ? 1 : 0);
}

// How many steps the child made, if nothing stopped it.
uint64_t live(const Case& what) {
  Pipe down, up;
  const pid_t child = base::fork_child();
  if (child == 0) {
    down.close_end(1);
    up.close_end(0);
    live_as_child(what, down, up);
  }
  up.close_end(1);
  fcntl(up.ends[0], F_SETFL, O_NONBLOCK);
  std::string said;
  bool stopped = false, stopped_now = false, gone = false;
  int how = 0;
  const auto look = [&] {
    said += up.hear();
    if (!gone && waitpid(child, &how, WNOHANG | WUNTRACED) == child) {
      stopped_now = WIFSTOPPED(how);
      stopped |= stopped_now;
      gone = !WIFSTOPPED(how);
    }
  };
  const auto hears = [&](const End& end, auto&& ready) {
    end.until([&] {
      look();
      return stopped || gone || ready();
    });
  };
  {
    CleanFake fake({.ipc_handles = !what.way.lent});
    {
      // Short for one that stands still: who is only slow would be cut off as well.
      End::Settings fence;
      if (what.step != 0) fence = {{"shm.fence_ms", "100"}};
      End here(fake, what.way.provider, fence);
      End other(fake, what.way.provider), third(fake, what.way.provider);
      for (End* end : {&here, &other, &third}) end->make();
      if (what.way.malloc) {
        here.give_back();
        here.make_by_malloc();
      }
      std::fill_n(here.view(), kSharedBytes, std::byte{7});
      PeerId peer;
      if (what.child_maps) {
        down.say(here.offer());
        hears(here, [&] { return said == "done"; });
        if (const auto event = here.worker->next_peer_event()) peer = event->peer;
      } else if (hears(here, [&] { return said.size() > RemoteRegion::kEncodedBytes; }),
                 said.size() > RemoteRegion::kEncodedBytes) {
        peer = *here.worker->connect(said.substr(RemoteRegion::kEncodedBytes));
        const auto remote = RemoteRegion::decode(said.substr(0, RemoteRegion::kEncodedBytes));
        for (int i = 0; i < (what.way.lent ? 40 : 4) && !stopped; ++i) {
          const TransferId id =
              *here.worker->submit({.op = i % 2 == 0 ? Op::kWrite : Op::kRead,
                                    .peer = peer,
                                    .local = here.region,
                                    .local_layout = Layout::contiguous(0, kSharedBytes),
                                    .remote = *remote,
                                    .remote_layout = Layout::contiguous(0, kSharedBytes)});
          hears(here, [&] { return ended(*here.worker->state(id)); });
        }
      }
      look();

      // Whoever it is that the child keeps waiting, it is not these two, nor anybody with this one.
      EXPECT_TRUE(other.exchange(third.offer(), third.worker.get()));
      EXPECT_TRUE(other.exchange(here.offer(), here.worker.get()));
      if (peer.generation != 0) {
        const Time begin = Clock::steady().now();
        here.worker->disconnect(peer, milliseconds(20)).IgnoreError();
        EXPECT_LT(Clock::steady().now() - begin, patient(milliseconds(5000)));
        EXPECT_EQ(here.worker->stats().open_transfers, 0u);
      }
      // From here on the bytes are this side's, if it may have them.
      const Time begin = Clock::steady().now();
      const absl::Status back = here.worker->deregister_memory(here.region);
      EXPECT_LT(Clock::steady().now() - begin, patient(milliseconds(5000)));
      EXPECT_TRUE(back.ok() || absl::IsUnavailable(back)) << back;
      look();
      if (!gone && (what.killed || !back.ok())) {
        kill(child, SIGKILL);
        waitpid(child, &how, 0);
        gone = true;
      }
      fake.fake().run_all();
      std::fill_n(here.view(), kSharedBytes, std::byte{42});
      if (!gone) {
        kill(child, SIGCONT);
        down.say(std::string(kOut));
        here.until([&] {
          look();
          if (std::exchange(stopped_now, false)) kill(child, SIGCONT);  // late in its life
          // Nor is it in again where it had never come before.
          while (const auto event = here.worker->next_peer_event()) {
            if (event->kind == PeerEvent::Kind::kUp) here.worker->begin_disconnect(event->peer);
          }
          return gone;
        });
        EXPECT_EQ(how, 0) << "what it had was not given back, or it was told nothing";
      }
      for (int i = 0; i < 20; ++i) here.worker->progress();
      fake.fake().run_all();
      EXPECT_EQ(std::count(here.view(), here.view() + kSharedBytes, std::byte{42}), kSharedBytes)
          << "bytes came late";
      EXPECT_TRUE(other.exchange(third.offer(), third.worker.get()));
      here.free();
      for (End* end : {&other, &third}) end->give_back();
    }
    EXPECT_EQ(fake.fake().queued(), 0u);
  }
  if (!gone) {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
  said += up.hear();
  const size_t digits = said.find_last_not_of("0123456789") + 1;
  return stopped || digits == said.size() ? 0 : std::stoull(said.substr(digits));
}

// Nothing is deregistered meanwhile, as in a server whose peers come and go.
TEST(CudaIpcPeers, ThatEndWithMemoryOpenCostNothing) {
  std::deque<Child> children;
  for (int i = 0; i < 4; ++i) {
    children.emplace_back([](const Pipe& down, const Pipe& up) {
      InstalledFake fake;
      End end(fake, "shm");
      end.make();
      up.say(end.exchange(down.hear()) ? "done" : "not");
      raise(SIGKILL);
    });
  }
  CleanFake fake;
  End here(fake, "shm");
  here.make_by_malloc();
  size_t before = 0;
  for (Child& child : children) {
    fcntl(child.up.ends[0], F_SETFL, O_NONBLOCK);
    child.down.say(here.offer());
    std::string said;
    here.until([&] { return !(said += child.up.hear()).empty(); });
    EXPECT_EQ(said, "done");
    child.end();
    here.until([&] { return here.worker->stats().peers_up == 0; });
    for (int round = 0; round < 3; ++round) here.worker->progress();
    if (before == 0) before = entries_of("/proc/self/fd");  // what is made once is there
    EXPECT_EQ(entries_of("/proc/self/fd"), before);
  }
  here.give_back();
}

class StoppedAt : public testing::TestWithParam<Stopping> {};

TEST_P(StoppedAt, AnyStepBlocksNoPeer) {
  std::mt19937_64 random(11);
  for (const bool child_maps : {true, false}) {
    Case what{GetParam(), child_maps};
    const uint64_t steps = live(what);  // what is made once in a process is there
    ASSERT_GT(steps, 20u);
    const size_t before = entries_of("/proc/self/fd");
    const char* const cases = std::getenv("BATON_CASES");
    const int points = cases != nullptr && std::string_view(cases) == "all" ? 30 : 3;
    for (int i = 0; i < points; ++i) {
      what.step = 1 + random() % steps;
      what.ended = random() % 2 != 0;
      what.killed = i % 3 == 2;
      SCOPED_TRACE(testing::Message()
                   << (child_maps ? "who maps" : "who shares") << " at step " << what.step
                   << (what.ended ? " ended" : " begins") << (what.killed ? ", killed" : ""));
      live(what);
      EXPECT_EQ(entries_of("/proc/self/fd"), before);
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, StoppedAt,
                         testing::Values(Stopping{"Mapped", "shm"},
                                         Stopping{"ByHandle", "shm", true},
                                         Stopping{"Lent", "shm", true, true},
                                         Stopping{"Staged", "tcp"}),
                         [](const auto& way) { return std::string(way.param.name); });

}  // namespace
}  // namespace baton
