// Connections to the workers that loads come from, by their addresses. A name is looked up by a
// thread of this object's, for as long as DNS takes: nobody else waits for it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "transport/worker.h"

namespace baton::kvtransfer {

class KvCalls {
 public:
  explicit KvCalls(Worker& worker) : worker_(worker) {}
  ~KvCalls() { close(); }

  // The connection to who is at `address`, made where there is none or the last one went down.
  // Generation 0: a name is being looked up, and take_ended() will say what came of it.
  absl::StatusOr<PeerId> call(const std::string& address);
  // The addresses whose look-ups have ended since, each with its connection or why there is none.
  // The worker is woken when there is one.
  using Ended = std::vector<std::pair<std::string, absl::StatusOr<PeerId>>>;
  Ended take_ended();
  void on_peer_down(PeerId peer);
  // Waits for the look-ups that have begun; others do not begin. Before the worker goes.
  void close();

 private:
  void look_up();

  Worker& worker_;
  absl::flat_hash_map<std::string, PeerId> connected_;
  absl::flat_hash_set<std::string> looked_up_;  // being
  std::mutex mutex_;                            // of what follows, but for threads_
  std::condition_variable wanted_;
  std::deque<std::string> queue_;
  Ended ended_;
  size_t idle_ = 0;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace baton::kvtransfer
