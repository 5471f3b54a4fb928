// ComputePool: tasks are claimed from one atomic ticket.
#include "engine/kernels/compute_pool.h"

#include <algorithm>

#include "hwy/base.h"
#include "hwy/cache_control.h"

namespace baton::engine {
namespace {

// Before the caller lets others run, while workers end the last tasks.
constexpr int kSpins = 1000;

}  // namespace

ComputePool::ComputePool(int threads)
    : size_(threads > 0 ? threads : std::max(1, int(std::thread::hardware_concurrency()))) {
  for (int i = 1; i < size_; ++i) threads_.emplace_back([this, i] { work(i); });
}

ComputePool::~ComputePool() {
  bell_.end();
  for (std::thread& thread : threads_) thread.join();
}

bool ComputePool::run_one(int thread) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while ((ticket & 0xffffffffu) != 0) {
    const Call call = call_.load(std::memory_order_relaxed);
    void* const target = target_.load(std::memory_order_relaxed);
    const int64_t tasks = tasks_.load(std::memory_order_relaxed);
    if (ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) {
      call(target, tasks - static_cast<int64_t>((ticket & 0xffffffffu)), thread);
      done_.fetch_add(1, std::memory_order_release);
      return true;
    }
  }
  return false;
}

void ComputePool::run(int64_t tasks, Call call, void* target) {
  if (size_ == 1 || tasks <= 1) {
    for (int64_t task = 0; task < tasks; ++task) call(target, task, 0);
    return;
  }
  call_.store(call, std::memory_order_relaxed);
  target_.store(target, std::memory_order_relaxed);
  tasks_.store(tasks, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  const uint64_t kernel = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
  ticket_.store(kernel << 32 | static_cast<uint64_t>(tasks), std::memory_order_release);
  bell_.ring();
  while (run_one(0)) {
  }
  for (int spins = 0; done_.load(std::memory_order_acquire) != tasks; ++spins) {
    if (spins < kSpins) {
      hwy::Pause();
    } else {
      std::this_thread::yield();
    }
  }
}

void ComputePool::work(int thread) {
  for (;;) {
    const int seen = bell_.look();
    if (PoolBell::is_end(seen)) return;
    while (run_one(thread)) {
    }
    bell_.wait(seen);
  }
}

}  // namespace baton::engine
