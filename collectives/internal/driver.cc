// Advancing the executor and the worker, the loops of waiting callers, and the background thread.
#include "collectives/internal/driver.h"

#include <algorithm>

namespace baton::collectives::internal {
namespace {

// How long a waiting thread polls before it lets others run, and before it sleeps.
constexpr Time kSpin = std::chrono::microseconds(50);
constexpr Time kYield = std::chrono::microseconds(1000);
constexpr Time kBackgroundSpin = std::chrono::microseconds(5);
// Even if no event wakes us: deadlines, and peers whose wake-up call was lost with them.
constexpr Time kLongestSleep = std::chrono::milliseconds(10);
constexpr Time kIdleSleep = std::chrono::milliseconds(50);
constexpr uint32_t kTurnsPerTick = 64;
// Turns of the executor before a blocking call lets others at the communicator: some microseconds.
constexpr int kShortCall = 100;

}  // namespace

Driver::~Driver() {
  if (!background_.joinable()) return;
  stop_.store(true);
  {
    std::lock_guard lock(needs_.mutex);
    background_wakes_.notify_all();
  }
  background_.join();
}

void Driver::start_background() {
  background_ = std::thread([this] { run_background(); });
}

bool Driver::advance() {
  if (!needs_.failure.broken().ok()) return false;
  absl::StatusOr<bool> moved = needs_.executor.advance();
  if (!moved.ok()) {
    needs_.failure.on_executor_error(moved.status());
    return true;
  }
  bool any = *moved;
  const bool on_devices = needs_.calls.any_on_devices();
  if (on_devices) {
    moved = needs_.calls.advance_devices();
    if (!moved.ok()) {
      tick();  // a peer that is gone is the better reason
      needs_.failure.fail(moved.status(), needs_.mesh.rank(), true);
      return true;
    }
    any |= *moved;
  }
  const bool any_transfer = needs_.mesh.any_transfer() || on_devices;
  // A call that has ended and has nothing to send leaves the worker in peace: a round of progress
  // costs system calls.
  const bool over = needs_.calls.any_done();
  if (any_transfer ? needs_.mesh.submitted() || !over : !any && ++turns_ % kTurnsPerTick == 0) {
    any |= tick();
  }
  if (absl::Status status = needs_.mesh.publish_regions(); !status.ok()) {
    needs_.failure.fail(status, needs_.mesh.rank(), true);
  }
  if (needs_.calls.any_done()) {
    // A control message that says "I called something else" comes with the data, not after it.
    if (any_transfer) needs_.mesh.drain();
    needs_.calls.finish();
  }
  if (needs_.calls.any_leaving()) {
    any = true;
    if (absl::Status status = needs_.calls.copy_out(); !status.ok()) {
      needs_.failure.fail(status, needs_.mesh.rank(), true);
    }
  }
  // A call that only waits for a device hears the others above.
  return any || needs_.executor.combining() || needs_.calls.any_under_way_on_devices();
}

bool Driver::tick() {
  const bool any = needs_.mesh.worker().progress();
  needs_.mesh.drain();
  needs_.failure.look(needs_.mesh.now());
  return any;
}

void Driver::tick_sometimes() {
  if (needs_.mesh.ranks() > 1 && needs_.mesh.now() >= needs_.failure.next_look()) tick();
}

std::optional<absl::Status> Driver::run_short(Work work) {
  for (int turn = 0; turn < kShortCall && !background() && !needs_.mesh.crowded(); ++turn) {
    if (std::optional<absl::Status> result = needs_.calls.reap(work)) return result;
    advance();
  }
  return std::nullopt;
}

void Driver::call_started() {
  advance();
  if (background()) background_wakes_.notify_one();
}

absl::Status Driver::wait(Work work) {
  if (background()) {
    std::unique_lock lock(needs_.mutex);
    std::optional<absl::Status> result;
    needs_.calls.ended().wait(lock, [&] { return (result = needs_.calls.reap(work)).has_value(); });
    return *std::move(result);
  }
  const bool crowded = needs_.mesh.crowded();
  Time idle_since = Time::zero();
  for (uint32_t turn = 0;; ++turn) {
    {
      std::lock_guard lock(needs_.mutex);
      if (std::optional<absl::Status> result = needs_.calls.reap(work)) return *std::move(result);
      if (advance()) {
        idle_since = Time::zero();
        continue;
      }
    }
    // The clock is not free: look at it now and then.
    if (turn % 16 != 0 && !crowded) continue;
    const Time time = needs_.mesh.now();
    if (idle_since == Time::zero()) idle_since = time;
    const Time idle = time - idle_since;
    if (idle > kYield) {
      doze(kLongestSleep);
    } else if (crowded || idle > kSpin) {
      std::this_thread::yield();
    }
  }
}

void Driver::doze(Time longest) {
  std::atomic<uint32_t>& sleeping = needs_.mesh.control().sleeping;
  sleeping.fetch_add(1, std::memory_order_seq_cst);
  bool any;
  {
    std::lock_guard lock(needs_.mutex);
    any = advance();
  }
  if (!any) {
    sleeps_.fetch_add(1, std::memory_order_relaxed);
    needs_.mesh.nap(longest);
  }
  sleeping.fetch_sub(1, std::memory_order_seq_cst);
}

void Driver::run_background() {
  const auto working = [&] {
    return !needs_.calls.in_flight().empty() && needs_.failure.broken().ok();
  };
  Time idle_since = Time::zero();
  while (!stop_.load(std::memory_order_relaxed)) {
    {
      std::unique_lock lock(needs_.mutex);
      if (!working()) {
        background_wakes_.wait_for(lock, kIdleSleep, [&] { return stop_.load() || working(); });
        if (needs_.mesh.ranks() > 1) tick();
      }
      if (advance()) {
        idle_since = Time::zero();
        continue;
      }
      if (needs_.calls.in_flight().empty()) continue;
    }
    const Time time = needs_.mesh.now();
    if (idle_since == Time::zero()) idle_since = time;
    if (time - idle_since > kBackgroundSpin) doze(kLongestSleep);
  }
}

}  // namespace baton::collectives::internal
