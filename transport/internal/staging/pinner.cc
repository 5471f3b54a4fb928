// Pins memory beside the progress of a worker.
#include "transport/internal/staging/pinner.h"

#include <system_error>

namespace baton::internal {

Pinner::~Pinner() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  condition_.notify_one();
  thread_.join();
}

bool Pinner::start() {
  if (thread_.joinable()) return true;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error&) {
    return false;
  }
  return true;
}

void Pinner::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    condition_.wait(lock, [this] { return stop_ || !work_.empty(); });
    if (work_.empty()) return;
    std::function<void()> work = std::move(work_.front());
    work_.pop_front();
    lock.unlock();
    work();
    work = nullptr;  // and what it holds, before the next one or the end
    lock.lock();
  }
}

void Pinner::ask(std::function<void()> work) {
  if (!start()) return work();
  {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
  }
  condition_.notify_one();
}

void Pinner::pin(uint64_t job, std::function<absl::StatusOr<Pin>()> work) {
  ask([this, job, work = std::move(work)] {
    absl::StatusOr<Pin> pin = work();
    {
      const std::lock_guard lock(mutex_);
      done_.push_back({job, std::move(pin)});
    }
    told_();
  });
}

void Pinner::let_go(Pin pin, std::shared_ptr<const void> mapping) {
  ask([pin = std::move(pin), mapping = std::move(mapping)]() mutable {
    pin.reset();
    mapping.reset();
  });
}

std::vector<Pinner::Done> Pinner::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(done_, {});
}

}  // namespace baton::internal
