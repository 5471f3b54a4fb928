// A process that shares memory of a device with another one, over CUDA IPC or staged over tcp, is
// killed at every step of that memory's life: made, registered, exported, imported, mapped, copied,
// unmapped, deregistered, freed. The other one's transfer ends, no byte of its memory moves after
// that, and it has as many descriptors and mappings as before.
//
// Here every fifth point, of a ring that is lent every eleventh and sixty at most; BATON_CASES=all
// is each of them.
#include "tests/gpudirect/ipc/device_end.h"
#include "tests/sanitized.h"
#include "tests/std.h"
#include "tests/used.h"

namespace baton {
namespace {

// Who makes the driver's calls that are counted, and who is killed at one of them.
enum class Kill : uint8_t {
  kWhoMaps,             // at its own calls
  kWhoShares,           // at its own calls
  kWhoSharesMeanwhile,  // at the calls of the other one
};

struct Point {
  Kill kill = Kill::kWhoMaps;
  const char* provider = "shm";
  bool malloc = false;  // memory of cudaMalloc; or by virtual memory management
  bool lent = false;    // that nobody can open: staged, from one's ring to the other's device
  uint64_t step = 0;    // 0: nobody is killed
  bool ended = false;   // the call has ended; or it begins
};

gpudirect::FakeOptions driver_of(const Point& point) { return {.ipc_handles = !point.lent}; }

bool exchange(const Point& point, const End& end, const std::string& offered) {
  return end.exchange(offered) && (!point.lent || (end.lent() && end.exchange_again(offered)));
}

// How many steps the counted side made; 0: somebody was killed.
uint64_t live(const Point& point) {
  const bool child_maps = point.kill == Kill::kWhoMaps;
  Pipe down, up;
  const pid_t child = fork();
  if (child == 0) {
    down.close_end(1);
    up.close_end(0);
    uint64_t steps = 0;
    {
      InstalledFake fake(driver_of(point));
      End end(fake, point.provider);
      if (point.kill != Kill::kWhoSharesMeanwhile) {
        fake.fake().at_step(point.step, point.ended, [] { raise(SIGKILL); });
      }
      point.malloc ? end.make_by_malloc() : end.make();
      if (child_maps) {
        const std::string offered = down.hear();
        if (offered.empty() || !exchange(point, end, offered)) _exit(1);
      } else {
        up.say(end.offer());
        fcntl(down.ends[0], F_SETFL, O_NONBLOCK);
        while (down.hear().empty() && getppid() != 1) end.worker->progress();
      }
      end.give_back();
      end.worker.reset();
      steps = fake.fake().steps();
    }
    up.say(std::to_string(steps));
    _exit(0);
  }
  up.close_end(1);
  std::atomic<bool> killed{false};  // by a thread that pins, maybe
  uint64_t steps = 0;
  {
    CleanFake fake(driver_of(point));
    End here(fake, point.provider);
    point.malloc ? here.make_by_malloc() : here.make();
    const uint64_t made = fake.fake().steps();
    std::fill_n(here.view(), kSharedBytes, std::byte{7});
    const auto kill_it = [&] {
      if (killed.exchange(true)) return;
      kill(child, SIGKILL);
      waitpid(child, nullptr, 0);
    };
    const auto gone = [&] {
      if (!killed && waitpid(child, nullptr, WNOHANG) == child) killed = true;
      return killed.load();
    };
    if (child_maps) {
      down.say(here.offer());
      here.until(gone);
    } else if (const std::string offered = up.hear(); !offered.empty()) {
      if (point.kill == Kill::kWhoSharesMeanwhile) {
        fake.fake().at_step(point.step, point.ended, kill_it);
      }
      const bool done = exchange(point, here, offered);
      EXPECT_TRUE(done || point.step != 0);
      const bool staged = here.worker->stats().staged_transfers > 0;
      if (done) {
        EXPECT_EQ(staged, point.lent || std::string_view(point.provider) == "tcp");
      }
      if (point.kill != Kill::kWhoSharesMeanwhile) {
        down.say("done");
        here.until(gone);
      }
    }
    if (point.kill != Kill::kWhoSharesMeanwhile) {
      const std::string said = up.hear();
      if (!said.empty()) steps = std::stoull(said);
    }
    const bool copied_here = point.lent || std::string_view(point.provider) == "tcp";
    if (copied_here && child_maps) {
      // What was sent before the end is copied by this side, until it knows of the end.
      here.until([&] { return here.worker->stats().peers_up == 0; });
      fake.fake().run_all();
    }
    // What is used for something else now stays as it is.
    std::fill_n(here.view(), kSharedBytes, std::byte{42});
    if (point.kill != Kill::kWhoSharesMeanwhile || killed) {
      here.until([&] { return here.worker->stats().peers_up == 0; });
    }
    fake.fake().run_all();
    for (int i = 0; i < 20; ++i) here.worker->progress();
    fake.fake().run_all();
    EXPECT_EQ(std::count(here.view(), here.view() + kSharedBytes, std::byte{42}), kSharedBytes)
        << "bytes came late";
    here.give_back();
    here.worker.reset();
    EXPECT_EQ(fake.fake().queued(), 0u);
    if (point.kill == Kill::kWhoSharesMeanwhile) {
      steps = killed ? 0 : fake.fake().steps() - made;
      if (!killed) kill_it();
    }
    fake.fake().at_step(0, false, nullptr);
  }
  return steps;
}

class KilledAt : public testing::TestWithParam<Point> {};

// Promise(devices): A killed peer leaves no copy and no mapping of shared device memory | marks per
//   copy; the owner's fence waits for them
TEST_P(KilledAt, AnyStepLeavesNothingToTheOtherOne) {
  Point point = GetParam();
  const uint64_t steps = live(point);  // what is made once in a process is there
  ASSERT_GT(steps, 30u);
  const char* const given = std::getenv("BATON_CASES");
  const std::string cases = given != nullptr ? given : "";
  const Used before;
  // A ring is lent when a thread has pinned it, and meanwhile both sides ask again and again: how
  // many steps that makes nobody knows, and past the last one nobody is killed.
  const uint64_t every = (point.lent ? 11 : 5) * (kSanitized && cases != "all" ? 3 : 1);
  constexpr size_t kPastTheEnd = 8;
  const size_t most = point.lent && cases != "all" ? 60 : SIZE_MAX;
  size_t missed = 0;  // one after the other
  size_t points = 0;
  size_t killed = 0;
  for (uint64_t step = 1; step <= steps && missed < kPastTheEnd && points < most; ++step) {
    for (const bool ended : {false, true}) {
      if (cases != "all" && (2 * step + (ended ? 1 : 0)) % every != 0) continue;
      SCOPED_TRACE(testing::Message() << "step " << step << (ended ? " ended" : " begins"));
      point.step = step;
      point.ended = ended;
      const bool was_killed = live(point) == 0;
      killed += was_killed ? 1 : 0;
      missed = was_killed || !point.lent ? 0 : missed + 1;
      ++points;
      const Used after;
      EXPECT_EQ(after.descriptors, before.descriptors);
      EXPECT_EQ(after.shared_mappings, before.shared_mappings);
      if (HasFailure()) return;
    }
  }
  std::printf("%zu steps, %zu points, killed at %zu\n", static_cast<size_t>(steps), points, killed);
  EXPECT_GE(killed * 10, point.lent ? 50 : points * 7);
}

INSTANTIATE_TEST_SUITE_P(
    Who, KilledAt,
    testing::Values(
        Point{Kill::kWhoMaps, "shm"}, Point{Kill::kWhoShares, "shm"},
        Point{Kill::kWhoSharesMeanwhile, "shm"}, Point{Kill::kWhoMaps, "shm", true},
        Point{Kill::kWhoShares, "shm", true}, Point{Kill::kWhoSharesMeanwhile, "shm", true},
        Point{Kill::kWhoMaps, "shm", true, true}, Point{Kill::kWhoShares, "shm", true, true},
        Point{Kill::kWhoSharesMeanwhile, "shm", true, true}, Point{Kill::kWhoMaps, "tcp"},
        Point{Kill::kWhoShares, "tcp"}, Point{Kill::kWhoSharesMeanwhile, "tcp"}),
    [](const auto& each) {
      const Kill kill = each.param.kill;
      return std::string(each.param.provider) +
             (each.param.lent     ? "Lent"
              : each.param.malloc ? "Malloc"
                                  : "") +
             (kill == Kill::kWhoMaps     ? "Maps"
              : kill == Kill::kWhoShares ? "Shares"
                                         : "SharesMeanwhile");
    });

}  // namespace
}  // namespace baton
