// Destroys queue pairs that the adapter has let go of, on a thread of its own.
//
// Destroying one may take long: rdma_rxe waits up to 50 seconds for packets that lie in the queue
// of an interface whose link is down. No other thread needs to: a queue pair that has flushed
// touches no memory any more. One that has not is destroyed where it is, for that is its fence.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace baton::verbs {

class QueuePairReaper {
 public:
  QueuePairReaper() = default;
  ~QueuePairReaper();  // waits until all is done
  QueuePairReaper(const QueuePairReaper&) = delete;
  QueuePairReaper& operator=(const QueuePairReaper&) = delete;

  // From the provider's thread. `destroy` runs once, on the other thread, in the order given.
  void reap(std::function<void()> destroy);

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable more_;
  std::deque<std::function<void()>> waiting_;
  bool ending_ = false;
  std::thread thread_;  // started with the first call
};

}  // namespace baton::verbs
