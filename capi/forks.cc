// Forks of the process that the library is in.
#include "capi/forks.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>

namespace baton::capi {
namespace {

constexpr std::chrono::seconds kMostWait{1};

struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  int inside = 0;
  int forking = 0;
};
// Never destroyed: threads may fork until the program's last moment.
alignas(Gate) unsigned char place[sizeof(Gate)];
Gate* gate = new (place) Gate;
std::atomic<uint32_t> fork_count{0};

void before_fork() {
  std::unique_lock lock(gate->mutex);
  ++gate->forking;
  gate->changed.wait_for(lock, kMostWait, [] { return gate->inside == 0; });
  lock.release();
}
void after_fork() {
  --gate->forking;
  gate->mutex.unlock();
  gate->changed.notify_all();
}
void in_child() {
  gate = new (place) Gate;  // whoever was inside, or waited, is not here
  fork_count.fetch_add(1, std::memory_order_relaxed);
}

// As the library is loaded, so that no fork can come in between.
[[maybe_unused]] const int at_load = pthread_atfork(before_fork, after_fork, in_child);

}  // namespace

uint32_t forks() { return fork_count.load(std::memory_order_relaxed); }

ForkWaits::ForkWaits() {
  std::unique_lock lock(gate->mutex);
  gate->changed.wait(lock, [] { return gate->forking == 0; });
  ++gate->inside;
}

ForkWaits::~ForkWaits() {
  const std::lock_guard lock(gate->mutex);
  if (--gate->inside == 0) gate->changed.notify_all();
}

}  // namespace baton::capi
