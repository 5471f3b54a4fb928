// Ranks as threads of the test: each with a communicator of its own, over a real provider.
#pragma once

#include "collectives/communicator.h"
#include "collectives/rendezvous.h"
#include "tests/manual_clock.h"
#include "tests/test.h"
#include "tests/until.h"

namespace baton {

inline ClusterKey test_key() { return *ClusterKey::from_bytes("a key for tests of 24 B."); }

inline CommunicatorOptions test_options(const std::string& provider) {
  CommunicatorOptions options;
  options.worker.providers = {provider};
  options.worker.key = test_key();
  options.slot_bytes = 64 << 10;
  options.calibrate = false;
  options.timeout = patient(std::chrono::seconds(60));
  return options;
}

inline std::string text(const absl::Status& status) { return std::string(status.message()); }

// The deadline of a call of rank 0 that rank 1 does not make, by a clock of theirs: it goes on when
// both have had a round, so that none is late with its answer because the machine is busy.
class DeadlineInRounds {
 public:
  const Clock& clock() const { return clock_; }
  absl::Status wait(Communicator& comm, Work work) {
    std::optional<absl::Status> ended;
    until([&] { return (ended = comm.test(work)).has_value(); }, [&] { ++rounds_; });
    return *ended;
  }
  void stay_away(Communicator& comm) {
    int seen = 0;
    until([&] { return !comm.status().ok(); },
          [&] {
            comm.progress();
            if (const int now = rounds_; std::exchange(seen, now) != now) {
              clock_.advance(std::chrono::milliseconds(1));
            }
          });
  }

 private:
  ManualClock clock_;
  std::atomic<int> rounds_{0};
};

// A thread for what a rank does: what that throws fails the test.
inline std::thread rank_thread(int rank, const std::function<void()>& body) {
  return std::thread([rank, body] {
    try {
      body();
    } catch (const std::exception& why) {
      ADD_FAILURE() << "rank " << rank << ": " << why.what();
    }
  });
}

// Calls body(communicator) on `ranks` threads and waits for all of them.
inline void run_group(int ranks, CommunicatorOptions options,
                      const std::function<void(Communicator&)>& body) {
  auto server = must(collectives::RendezvousServer::start(*options.worker.key, "", 0,
                                                          static_cast<uint32_t>(ranks)));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    CommunicatorOptions own = options;
    own.rank = rank;
    own.ranks = ranks;
    own.rendezvous = server->address();
    threads.push_back(rank_thread(rank, [own, &body] { body(*must(Communicator::create(own))); }));
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace baton
