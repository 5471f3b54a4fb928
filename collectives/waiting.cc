// Driving calls to their end: polling, sleeping, the background thread.
#include <poll.h>

#include <algorithm>
#include <thread>

#include "collectives/communicator_impl.h"

namespace baton {
namespace {

// How long a waiting thread polls before it lets others run, and before it sleeps.
constexpr Time kSpin = std::chrono::microseconds(50);
constexpr Time kYield = std::chrono::microseconds(1000);
constexpr Time kBackgroundSpin = std::chrono::microseconds(5);
// Even if nobody wakes us: deadlines, and peers whose wake-up call was lost with them.
constexpr Time kLongestSleep = std::chrono::milliseconds(10);
constexpr Time kIdleSleep = std::chrono::milliseconds(50);
constexpr Time kLook = std::chrono::milliseconds(1);
constexpr uint32_t kTurnsPerTick = 64;

}  // namespace

bool Communicator::Impl::advance() {
  if (!broken.ok()) return false;
  absl::StatusOr<bool> moved = executor->advance();
  if (!moved.ok()) {
    on_executor_error(moved.status());
    return true;
  }
  bool any = *moved;
  if (any_transfer || (!any && ++turns % kTurnsPerTick == 0)) any |= tick();
  if (memory->regions().size() != published_regions) {
    if (absl::Status status = publish_regions(); !status.ok()) fail(status, rank, true);
  }
  if (!finished.empty()) {
    // Mail that says "I called something else" comes with the data, not after it.
    if (any_transfer) drain();
    for (size_t i = 0; i < finished.size(); ++i) finish(*finished[i], absl::OkStatus());
    finished.clear();
  }
  return any;
}

bool Communicator::Impl::tick() {
  const bool any = worker->progress();
  drain();
  if (const Time time = now(); time >= next_look) {
    next_look = time + kLook;
    check_deadlines();
  }
  return any;
}

void Communicator::Impl::tick_sometimes() {
  if (ranks > 1 && executor != nullptr && now() >= next_look) tick();
}

std::optional<absl::Status> Communicator::Impl::reap(Work work) {
  WorkSlot* slot = find(work);
  if (slot == nullptr) {
    return absl::NotFoundError("there is no such call: its end was already reported");
  }
  if (!slot->done.load(std::memory_order_acquire)) return std::nullopt;
  absl::Status result = std::move(slot->result);
  slot->id.store(0, std::memory_order_release);
  return result;
}

absl::Status Communicator::Impl::wait(Work work) {
  if (background.joinable()) {
    std::unique_lock lock(mutex);
    std::optional<absl::Status> result;
    call_ended.wait(lock, [&] { return (result = reap(work)).has_value(); });
    return *std::move(result);
  }
  Time idle_since = Time::zero();
  for (uint32_t turn = 0;; ++turn) {
    {
      std::lock_guard lock(mutex);
      if (std::optional<absl::Status> result = reap(work)) return *std::move(result);
      if (advance()) {
        idle_since = Time::zero();
        continue;
      }
    }
    // The clock is not free: look at it now and then.
    if (turn % 16 != 0 && !crowded) continue;
    const Time time = now();
    if (idle_since == Time::zero()) idle_since = time;
    const Time idle = time - idle_since;
    if (idle > kYield) {
      doze(kLongestSleep);
    } else if (crowded || idle > kSpin) {
      std::this_thread::yield();
    }
  }
}

void Communicator::Impl::nap(Time longest) {
  if (!worker->arm()) return;
  const Time timer = worker->next_timer();
  if (timer != kNever) longest = std::min(longest, std::max(Time::zero(), timer - now()));
  pollfd fd{.fd = worker->wait_fd(), .events = POLLIN, .revents = 0};
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(longest);
  const timespec timeout{.tv_sec = seconds.count(), .tv_nsec = (longest - seconds).count()};
  ppoll(&fd, 1, &timeout, nullptr);
}

void Communicator::Impl::doze(Time longest) {
  control->sleeping.fetch_add(1, std::memory_order_seq_cst);
  bool any;
  {
    std::lock_guard lock(mutex);
    any = advance();
  }
  if (!any) {
    sleeps.fetch_add(1, std::memory_order_relaxed);
    nap(longest);
  }
  control->sleeping.fetch_sub(1, std::memory_order_seq_cst);
}

void Communicator::Impl::run_background() {
  Time idle_since = Time::zero();
  while (!stop.load(std::memory_order_relaxed)) {
    {
      std::unique_lock lock(mutex);
      if (in_flight.empty() || !broken.ok()) {
        background_wakes.wait_for(
            lock, kIdleSleep, [&] { return stop.load() || (!in_flight.empty() && broken.ok()); });
        if (ranks > 1) tick();
      }
      if (advance()) {
        idle_since = Time::zero();
        continue;
      }
      if (in_flight.empty()) continue;
    }
    const Time time = now();
    if (idle_since == Time::zero()) idle_since = time;
    if (time - idle_since > kBackgroundSpin) doze(kLongestSleep);
  }
}

}  // namespace baton
