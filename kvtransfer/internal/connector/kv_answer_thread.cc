// Looks for probes while no other thread does.
#include "kvtransfer/internal/connector/kv_answer_thread.h"

#include <chrono>

namespace baton::kvtransfer {
namespace {

// How long the engine's thread may be away before this one looks: a part of the second for which
// decode workers wait by default.
constexpr std::chrono::milliseconds kAwayFor{50};

}  // namespace

KvAnswerThread::KvAnswerThread(Worker& worker, KvMailbox& mailbox)
    : worker_(worker), mailbox_(mailbox), thread_([this] { run(); }) {}

KvAnswerThread::~KvAnswerThread() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void KvAnswerThread::engine_waits(bool waits) {
  const std::lock_guard lock(mutex_);
  engine_waits_ = waits;
  if (!waits && asleep_) wake_.notify_one();
}

void KvAnswerThread::run() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (engine_waits_) {
      asleep_ = true;
      wake_.wait(lock);
      asleep_ = false;
      continue;
    }
    looked_.store(false, std::memory_order_relaxed);
    wake_.wait_for(lock, kAwayFor);
    if (stop_ || engine_waits_ || looked_.load(std::memory_order_relaxed)) continue;
    worker_.progress();
    mailbox_.collect();
  }
}

}  // namespace baton::kvtransfer
