// The one way in which a test waits: for a fact, and not for a time.
//
//   until([&] { return thread_is_up.load(); });
//   until([&] { return b.landed == 3; }, [&] { a.progress(), b.progress(); },
//         [&] { return state_of(*a.worker); });
//
// A rig has an until(fact) of its own, which turns what the rig has and says what state it is in.
#pragma once

#include <concepts>

#include "tests/sanitized.h"
#include "tests/seeds.h"
#include "tests/std.h"
#include "tests/test.h"
#include "transport/clock.h"

namespace baton {

// Where until() was called. A rig passes it on: until(fact, CallSite from = CallSite::here()).
struct CallSite {
  const char* file;
  int line;
  static CallSite here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// When a fact is given up: far longer than it takes on a busy machine, and within CTest's limit
// (baton_test() in cmake/BatonTargets.cmake), so that the state is still printed.
inline Time until_gives_up() {
  const auto patience = static_cast<int64_t>(number_of("BATON_PATIENCE", 1));
  return std::min<Time>(patience * std::chrono::seconds(kSanitized ? 120 : 60),
                        std::chrono::seconds(kSanitized ? 400 : 200));
}

inline const pid_t kTestProgram = getpid();

// Fails the test and ends it, as an exception that GoogleTest knows. On a thread of the test's own,
// and in a forked child, the process ends.
[[noreturn]] inline void give_up(const std::string& state, CallSite from) {
  std::ostringstream what;
  what << "until() gave up after " << seconds_of(until_gives_up()) << " s: the fact never came. "
       << (state.empty() ? "" : "State: ") << state;
  if (getpid() != kTestProgram) {
    std::fprintf(stderr, "%s:%d: %s\n", from.file, from.line, what.str().c_str());
    _exit(1);
  }
  ADD_FAILURE_AT(from.file, from.line) << what.str();
  throw testing::AssertionException(testing::TestPartResult(
      testing::TestPartResult::kFatalFailure, from.file, from.line, what.str().c_str()));
}

// What until() does meanwhile where other threads or processes bring the fact about.
struct LetOthersRun {
  int rounds = 0;
  void operator()() {
    if (++rounds < 100) return std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
};
struct NoState {
  std::string operator()() const { return ""; }
};

// Calls `turn` until `fact()` holds; fails the test, with `state()`, when it does not come.
template <std::predicate Fact, typename Turn = LetOthersRun, typename State = NoState>
void until(Fact&& fact, Turn turn = {}, const State& state = {}, CallSite from = CallSite::here()) {
  using Steady = std::chrono::steady_clock;
  for (const auto end = Steady::now() + until_gives_up(); !fact(); turn()) {
    if (Steady::now() > end) give_up(state(), from);
  }
}

// The state of a worker or an agent, and of a peer of the worker's.
template <typename Stats>
std::string state_of(const Stats& stats, const std::string& name) requires requires {
  stats.open_transfers;
}
{
  std::ostringstream out;
  out << name << ": " << stats.peers_up << " peers up, " << stats.open_transfers
      << " transfers open, " << stats.transfers_ended << " ended, " << stats.slices_posted
      << " slices posted, " << stats.notifications_waiting << " notifications unread; ";
  return out.str();
}
template <typename Worker, typename Peer>
std::string state_of(const Worker& worker, Peer peer, const std::string& name) {
  std::ostringstream out;
  out << state_of(worker.stats(), name) << worker.peer_status(peer) << ", " << worker.explain(peer)
      << "; ";
  return out.str();
}

// Whether a thread of this process waits for something: for tests of who waits for whom.

// `thread`: what gettid() says in it.
inline bool sleeps(pid_t thread) {
  std::string stat;
  std::getline(std::ifstream("/proc/self/task/" + std::to_string(thread) + "/stat"), stat);
  const size_t name_end = stat.rfind(") ");
  return name_end != std::string::npos && stat[name_end + 2] == 'S';
}

}  // namespace baton
