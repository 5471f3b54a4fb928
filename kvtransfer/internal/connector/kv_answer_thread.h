// A thread that answers probes while the engine's thread computes: slow is not silent.
//
// An engine moves its transfers and reads its messages between layers, and one layer of a large
// prompt may take longer than a decode worker waits for a sign of life. This thread looks whenever
// the engine's has not for a moment; what is no probe it leaves for the engine's. A process that is
// stopped has no such thread either, and that is what probes find out.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "kvtransfer/internal/connector/kv_mailbox.h"
#include "transport/worker.h"

namespace baton::kvtransfer {

class KvAnswerThread {
 public:
  // Throws std::system_error where no thread can be had. Both outlive it.
  KvAnswerThread(Worker& worker, KvMailbox& mailbox);
  ~KvAnswerThread();  // stops and joins

  // From the engine's thread. It has read its messages:
  void looked() { looked_.store(true, std::memory_order_relaxed); }
  // It waits for messages itself, and is woken by them; this thread sleeps until it is away again.
  void engine_waits(bool waits);

 private:
  void run();

  Worker& worker_;
  KvMailbox& mailbox_;
  std::atomic<bool> looked_{false};
  std::mutex mutex_;  // held while this thread looks
  std::condition_variable wake_;
  bool stop_ = false;
  bool engine_waits_ = false;
  bool asleep_ = false;  // until it is away
  std::thread thread_;
};

}  // namespace baton::kvtransfer
