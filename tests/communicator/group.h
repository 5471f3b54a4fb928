// Ranks as threads of the test: each with a communicator of its own, over a real provider.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "collectives/communicator.h"
#include "collectives/rendezvous.h"
#include "gtest/gtest.h"

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

// Calls body(communicator) on `ranks` threads and waits for all of them.
inline void run_group(int ranks, CommunicatorOptions options,
                      const std::function<void(Communicator&)>& body) {
  auto server = collectives::RendezvousServer::start(*options.worker.key, "", 0,
                                                     static_cast<uint32_t>(ranks));
  ASSERT_TRUE(server.ok()) << server.status();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    CommunicatorOptions own = options;
    own.rank = rank;
    own.ranks = ranks;
    own.rendezvous = (*server)->address();
    threads.emplace_back([own, &body] {
      auto comm = Communicator::create(own);
      ASSERT_TRUE(comm.ok()) << "rank " << own.rank << ": " << comm.status();
      body(**comm);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace baton
